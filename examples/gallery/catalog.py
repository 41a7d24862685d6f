"""All functions of the gallery, each with the arguments of an example."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gallery import lists, scores, structure, windows
from jax_memeff import Mask


class Shape(NamedTuple):
    """The sizes of an example: T rows and T columns; draft trees have fewer rows."""

    batch: int
    heads: int
    length: int

    @property
    def block(self) -> int:
        """Block size of sparse masks: an eighth of the sequence, at most 64."""
        return min(64, self.length // 8)

    @property
    def width(self) -> int:
        """Width of an image with one token per pixel: square, or 64 wide if it is larger."""
        return min(64, math.isqrt(self.length))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A function of the gallery, and how an example calls it."""

    make: Callable[..., scores.ScoreFunction | Mask]
    """Returns the ``score_mod`` or the ``mask`` of ``dot_product_attention``."""
    title: str
    arguments: Callable[[Shape], tuple[Any, ...]]
    """Returns the arguments of ``make``: arrays of the right size, and static numbers."""
    is_causal: bool = False
    """Whether the example is causal as well."""
    rows: int | None = None
    """The number of rows, if it differs from the number of columns."""
    has_kernels: bool = True

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def is_mask(self) -> bool:
        """Whether ``make`` returns a mask; otherwise it returns a function of scores."""
        return self.make.__module__ != scores.__name__

    def call(self, *arguments: Any) -> dict[str, Any]:
        """The arguments of ``dot_product_attention``."""
        kind = "mask" if self.is_mask else "score_mod"
        return {kind: self.make(*arguments), "is_causal": self.is_causal}


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def _alibi(shape: Shape) -> tuple[jax.Array]:
    return (2.0 ** (-8 * (jnp.arange(shape.heads) + 1) / shape.heads),)


def _swin(shape: Shape) -> tuple[jax.Array]:
    distances = 2 * shape.width - 1
    return (_normal(shape.heads, distances, distances),)


def _global_tokens(shape: Shape) -> tuple[int, jax.Array]:
    index = jnp.arange(shape.batch * shape.length).reshape(shape.batch, shape.length)
    return shape.length // 16, index % (shape.length // 2) == shape.length // 8


def _head_windows(shape: Shape) -> tuple[jax.Array]:
    return (shape.length // 2 ** (1 + jnp.arange(shape.heads) % 5),)


def _documents(shape: Shape) -> tuple[jax.Array]:
    """Three documents, whose lengths differ between batch indices."""
    ends = jnp.array([[3, 4]]) * shape.length // 8 + jnp.arange(shape.batch)[:, None]
    return ((jnp.arange(shape.length)[:, None] >= ends[:, None]).sum(2, dtype=jnp.int32),)


_PARENTS = (-1, -1, 0, 0, 1, 2, 2, 3, 4, 5, 5, 7)


def _draft_tree(shape: Shape) -> tuple[jax.Array, jax.Array]:
    context = shape.length - len(_PARENTS) - jnp.arange(shape.batch)
    return jnp.asarray(structure.ancestors_of(_PARENTS)), context


def _bigbird(shape: Shape) -> tuple[jax.Array, int]:
    count = shape.length // shape.block
    return jax.random.randint(jax.random.key(0), (count, 2), 0, count), shape.block


def _listed_blocks(shape: Shape) -> tuple[jax.Array, int]:
    """The blocks that a router with random scores chooses, and the first block."""
    count = shape.length // shape.block
    chosen = jax.lax.top_k(_normal(shape.batch, shape.heads, count, count), 2)[1]
    return chosen.at[..., 0].set(0), shape.block


def _listed_keys(shape: Shape) -> tuple[jax.Array]:
    """The lists of an indexer with random queries, keys and weights."""
    query, key = _normal(shape.batch, shape.length, 2, 9), _normal(shape.batch, shape.length, 8)
    return (lists.lightning_indexer(query[..., 1:], key, query[..., 0], shape.length // 8),)


def _block_sparse(shape: Shape) -> tuple[jax.Array, int]:
    count = shape.length // shape.block
    drawn = jax.random.bernoulli(jax.random.key(0), 0.25, (shape.heads, count, count))
    return drawn | jnp.eye(count, dtype=bool), shape.block


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(scores.alibi, "ALiBi", _alibi, is_causal=True),
        Entry(
            scores.relative_table,
            "A learned table of distances",
            lambda shape: (_normal(shape.heads, 2 * shape.length),),
        ),
        Entry(
            scores.t5_bias,
            "T5's buckets with a learned table",
            lambda shape: (_normal(32, shape.heads), shape.length),
        ),
        Entry(scores.swin_bias, "Swin's bias in two dimensions", _swin),
        Entry(scores.soft_cap, "Soft cap", lambda shape: (2.0,)),
        Entry(windows.sliding_window, "Sliding window", lambda shape: (shape.length // 8,)),
        Entry(windows.global_tokens, "Sliding window with global tokens", _global_tokens),
        Entry(windows.dilated_window, "Dilated window", lambda shape: (shape.length // 16, 4)),
        Entry(
            windows.neighborhood,
            "Neighbourhood attention in two dimensions",
            lambda shape: (shape.length // min(32, shape.width), min(32, shape.width), 3),
        ),
        Entry(windows.head_windows, "A window for each head", _head_windows),
        Entry(
            windows.look_ahead,
            "Causal chunks with look-ahead",
            lambda shape: (shape.block, shape.block // 2),
        ),
        Entry(
            windows.local_or_global,
            "Gemma's local and global layers in one scan",
            lambda shape: (jnp.int32(shape.length // 8),),
        ),
        Entry(
            structure.prefix_lm,
            "Prefix language model",
            lambda shape: (shape.length // (4 + jnp.arange(shape.batch)),),
        ),
        Entry(structure.documents, "Documents", _documents),
        Entry(structure.draft_tree, "A tree of draft tokens", _draft_tree, rows=len(_PARENTS)),
        Entry(structure.bigbird, "BigBird's blocks", _bigbird),
        Entry(structure.listed_blocks, "Blocks from index lists", _listed_blocks),
        Entry(structure.block_sparse, "Blocks from a table", _block_sparse),
        Entry(lists.listed_keys, "Keys of an indexer", _listed_keys, has_kernels=False),
    )
}
