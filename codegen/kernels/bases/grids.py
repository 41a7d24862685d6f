"""The grids of kernels whose CTAs own tiles."""

from __future__ import annotations

from jax_memeff.codegen.features import VARLEN
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.launch import Grid
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec


def has_token_grid(spec: KernelSpec) -> bool:
    """Whether grids cover only the tiles that the tokens of packed sequences fill. A kernel that
    writes every element of a bias gradient also processes tiles beyond the lengths.
    """
    return spec[VARLEN] and bias_gradient(spec) in ("none", "dbias_kernel")


def query_tile_grid(spec: KernelSpec, rows: int | None = None) -> Grid:
    """A CTA for each tile of queries of a head, of ``rows`` rows or as large as the spec's."""
    tiles = "N*all_queries" if has_token_grid(spec) else "B*N*T"
    return Grid(f"{tiles}/{rows or spec.tile.query}")


def key_tile_grid(spec: KernelSpec) -> Grid:
    """A CTA for each KV block of a key head."""
    tiles = "K*all_keys" if has_token_grid(spec) else "B*K*S"
    return Grid(f"{tiles}/{spec.tile.key}")


def bias_tile_grid(spec: KernelSpec) -> Grid:
    """A CTA for each tile of scores of the bias's own batch indices and heads."""
    tiles = f"bias_gradient.2/{spec.tile.query}*S/{spec.tile.key}"
    return Grid(f"bias_gradient.0*bias_gradient.1*{tiles}")


def key_tiles(spec: KernelSpec, sizes: Sizes) -> int:
    """The number of CTAs of :func:`key_tile_grid`."""
    if has_token_grid(spec):
        return sizes.padded_keys(spec.tile.key) // spec.tile.key
    return sizes.batch * sizes.key_heads * -(-sizes.keys // spec.tile.key)


def ordering_words(ctas: int) -> int:
    """A ticket counter and the semaphore of each CTA, for deterministic sums of dq
    (ffi/include/memeff/schedule/dq_semaphore.cuh).
    """
    return 1 + ctas
