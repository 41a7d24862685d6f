"""The device kernels. A GPU generation is a folder, and a kernel in it is a pair of files: a module
that chooses its tile and describes its launch, beside the device code that it includes.
"""

from __future__ import annotations

from jax_memeff.codegen.kernels import sm80, sm90
from jax_memeff.codegen.spec import Kernel

KERNELS: tuple[Kernel, ...] = (*sm90.KERNELS, *sm80.KERNELS)
"""Every kernel, in the order of preference: wgmma before mma.sync, which has half its throughput.
Within a generation, less padding takes precedence over this order."""
