"""The kernels whose products are mma.sync, for every architecture from sm_75 on."""

from __future__ import annotations

from jax_memeff.codegen.kernels.sm80.backward import FmhaBwdSm80
from jax_memeff.codegen.kernels.sm80.forward import FmhaFwdSm80
from jax_memeff.codegen.kernels.sm80.large_dim_backward import FmhaBwdLargeDimSm80
from jax_memeff.codegen.kernels.sm80.large_dim_forward import FmhaFwdLargeDimSm80
from jax_memeff.codegen.kernels.sm80.split import FmhaFwdSplitSm80
from jax_memeff.codegen.spec import Kernel

KERNELS: tuple[Kernel, ...] = (
    # The kernel with split keys comes first: it is rejected unless a call has few query rows.
    FmhaFwdSplitSm80(),
    FmhaFwdSm80(),
    FmhaBwdSm80(),
    # Any head dim, but slower.
    FmhaFwdLargeDimSm80(),
    FmhaBwdLargeDimSm80(),
)
