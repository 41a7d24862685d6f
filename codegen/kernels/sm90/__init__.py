"""The kernels whose products are wgmma, for Hopper."""

from __future__ import annotations

from jax_memeff.codegen.kernels.sm90.backward import FmhaBwdSm90
from jax_memeff.codegen.kernels.sm90.f16x3_backward import FmhaBwdF16x3Sm90
from jax_memeff.codegen.kernels.sm90.f16x3_forward import FmhaFwdF16x3Sm90
from jax_memeff.codegen.kernels.sm90.forward import FmhaFwdSm90
from jax_memeff.codegen.kernels.sm90.large_dim_backward import FmhaBwdLargeDimSm90
from jax_memeff.codegen.kernels.sm90.large_dim_forward import FmhaFwdLargeDimSm90
from jax_memeff.codegen.kernels.sm90.latent import FmhaFwdLatentSm90
from jax_memeff.codegen.kernels.sm90.latent_backward import FmhaBwdLatentSm90
from jax_memeff.codegen.kernels.sm90.tangent import FmhaTangentSm90
from jax_memeff.codegen.kernels.sm90.two_kernel_backward import FmhaBwdTwoKernelSm90
from jax_memeff.codegen.spec import Kernel

KERNELS: tuple[Kernel, ...] = (
    FmhaFwdSm90(),  # 16-bit elements, head dims up to 256
    FmhaFwdF16x3Sm90(),  # float32
    FmhaFwdLatentSm90(),  # paged calls whose values are columns of the keys
    FmhaFwdLargeDimSm90(),  # head dims from 257 on
    FmhaBwdSm90(),  # up to 128
    FmhaBwdTwoKernelSm90(),  # 129 to 256
    FmhaBwdF16x3Sm90(),  # float32
    FmhaBwdLatentSm90(),  # lists of keys whose values are columns of the keys
    FmhaBwdLargeDimSm90(),  # from 257 on
    FmhaTangentSm90(),
)
"""In the order of choice."""
