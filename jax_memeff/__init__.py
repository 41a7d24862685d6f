"""Exact attention for JAX with linear memory, on kernels generated for the problem at hand."""

from jax_memeff import dropout as dropout
from jax_memeff.api import dot_product_attention as dot_product_attention
from jax_memeff.check import check as check
from jax_memeff.errors import CompileError as CompileError
from jax_memeff.errors import UnsupportedError as UnsupportedError
from jax_memeff.export import export_disabled_checks as export_disabled_checks
from jax_memeff.export import register_targets as register_targets
from jax_memeff.mask import Mask as Mask
from jax_memeff.offsets import Offsets as Offsets
from jax_memeff.packed import dot_product_attention_packed as dot_product_attention_packed
from jax_memeff.ring import ring_attention as ring_attention
from jax_memeff.ring_schedule import unzigzag as unzigzag
from jax_memeff.ring_schedule import zigzag as zigzag
from jax_memeff.varlen import varlen_attention as varlen_attention
from jax_memeff.vjp import forward_mode as forward_mode


def __getattr__(name: str) -> str:
    # Reading the version searches the installed distributions: only who asks for it waits.
    if name == "__version__":
        from importlib.metadata import version

        return version("jax-memeff")
    raise AttributeError(f"module 'jax_memeff' has no attribute {name!r}")
