"""Masks from the structure of a sequence; pass the result of each function as ``mask=``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff import Mask


def prefix_lm(prefix: jax.Array) -> Mask:
    """A causal mask, except that all rows attend to the whole prefix.

    Raffel et al., "Exploring the Limits of Transfer Learning", 2020.

    Args:
        prefix: integer [B]: the length of each prefix.
    """
    return Mask.causal() | Mask.function(lambda b, h, q, k: k < prefix[b])


def documents(ids: jax.Array) -> Mask:
    """Rows attend to the columns of their own document.

    ``Mask.segments(ids, ids)`` is the same mask if no id is negative. Language models combine
    it with ``Mask.causal()``.

    Args:
        ids: integer [B, T]: the document of each token.
    """
    return Mask.function(lambda b, h, q, k: ids[b, q] == ids[b, k])


def draft_tree(ancestors: jax.Array, context: jax.Array) -> Mask:
    """Draft tokens after a context: each attends to the context, its ancestors and itself.

    Miao et al., "SpecInfer", 2024, use such a mask to verify all branches of a draft in one call.

    Args:
        ancestors: bool [n, n], from :func:`ancestors_of`; the rows are the n draft tokens.
        context: integer [B]: the number of context tokens; the keys of the drafts follow them.
    """
    count = ancestors.shape[0]

    def attends(b, h, q, k):
        node = k - context[b]
        return (node < 0) | ((node < count) & ancestors[q, node])

    return Mask.function(attends)


def ancestors_of(parents: Sequence[int]) -> np.ndarray:
    """The ancestors of each node, including the node itself: bool [n, n].

    Args:
        parents: the parent of each node, an earlier node; -1 for children of the context.

    >>> ancestors_of([-1, 0, 0, 1]).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 0, 1, 0],
           [1, 1, 0, 1]])
    """
    found = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found


def bigbird(random_blocks: jax.Array, block: int) -> Mask:
    """Neighbouring blocks, a global first block, and a few random blocks for each block of rows.

    Zaheer et al., "Big Bird", 2020.

    Args:
        random_blocks: integer [T / block, r]: the random blocks of each block of rows.
        block: the number of rows, and of columns, of a block.
    """

    def attends(b, h, q, k):
        row, column = q // block, k // block
        near = abs(row - column) <= 1
        is_global = (row == 0) | (column == 0)
        return near | is_global | jnp.any(random_blocks[row] == column)

    return Mask.function(attends)


def listed_blocks(lists: jax.Array, block: int) -> Mask:
    """Each block of rows attends to the blocks of columns in its list, for example a router's.

    Yuan et al., "Native Sparse Attention", and Lu et al., "MoBA", 2025. Lists may be traced, such
    as the indices of ``jax.lax.top_k``. Language models add ``& Mask.causal()``.

    Args:
        lists: integer [B, N, T / block, n]: the indices of blocks; pad with -1.
        block: the number of rows, and of columns, of a block; multiples of 128 are fastest.
    """
    return Mask.kv_blocks(lists, block_size=block)


def block_sparse(blocks: jax.Array, block: int) -> Mask:
    """The blocks of scores that are true in an array, for each head.

    Args:
        blocks: bool [N, T / block, S / block].
        block: the number of rows, and of columns, of a block.
    """
    return Mask.function(lambda b, h, q, k: blocks[h, q // block, k // block])
