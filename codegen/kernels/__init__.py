"""The device kernels: one module for each file of ffi/include/memeff/kernels, of the same name."""

from __future__ import annotations

from jax_memeff.codegen.kernels.f16x3.fmha_bwd_f16x3_sm90 import FmhaBwdF16x3Sm90
from jax_memeff.codegen.kernels.fmha_bwd_large_dim_sm80 import FmhaBwdLargeDimSm80
from jax_memeff.codegen.kernels.fmha_bwd_sm80 import FmhaBwdSm80
from jax_memeff.codegen.kernels.fmha_bwd_sm90 import FmhaBwdSm90
from jax_memeff.codegen.kernels.fmha_bwd_two_kernel_sm90 import FmhaBwdTwoKernelSm90
from jax_memeff.codegen.kernels.fmha_fwd_f16x3_sm90 import FmhaFwdF16x3Sm90
from jax_memeff.codegen.kernels.fmha_fwd_large_dim_sm80 import FmhaFwdLargeDimSm80
from jax_memeff.codegen.kernels.fmha_fwd_large_dim_sm90 import FmhaFwdLargeDimSm90
from jax_memeff.codegen.kernels.fmha_fwd_latent_sm90 import FmhaFwdLatentSm90
from jax_memeff.codegen.kernels.fmha_fwd_sm80 import FmhaFwdSm80
from jax_memeff.codegen.kernels.fmha_fwd_sm90 import FmhaFwdSm90
from jax_memeff.codegen.kernels.large_dim.fmha_bwd_large_dim_sm90 import FmhaBwdLargeDimSm90
from jax_memeff.codegen.kernels.split.fmha_fwd_split_sm80 import FmhaFwdSplitSm80
from jax_memeff.codegen.kernels.tangent.fmha_tangent_sm90 import FmhaTangentSm90
from jax_memeff.codegen.spec import Kernel

KERNELS: tuple[Kernel, ...] = (
    # wgmma first: twice the throughput of mma.sync.
    FmhaFwdSm90(),
    FmhaFwdF16x3Sm90(),
    FmhaFwdLatentSm90(),
    FmhaFwdLargeDimSm90(),
    FmhaBwdSm90(),
    FmhaBwdTwoKernelSm90(),
    FmhaBwdF16x3Sm90(),
    FmhaBwdLargeDimSm90(),
    FmhaTangentSm90(),
    # Among mma.sync kernels, the one with split keys comes first: it is rejected unless a call has
    # few query rows.
    FmhaFwdSplitSm80(),
    FmhaFwdSm80(),
    FmhaBwdSm80(),
    # Any head dim, but slower.
    FmhaFwdLargeDimSm80(),
    FmhaBwdLargeDimSm80(),
)
"""Every kernel, in the order of preference. Within a family, less padding takes precedence over
this order."""
