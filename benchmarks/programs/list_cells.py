"""Problems with lists of keys (``Mask.keys``), and our call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_memeff
from programs.cells import Cell
from programs.inputs import Inputs, make


@dataclasses.dataclass(frozen=True)
class ListCell(Cell):
    """A cell whose queries attend to ``keys`` keys each; without a mask if those are all."""

    keys: int = 0

    @property
    def is_dense(self) -> bool:
        return self.keys == self.key_length

    @property
    def is_latent(self) -> bool:
        """The values are the first columns of the keys."""
        return self.value_dim < self.head_dim

    @property
    def name(self) -> str:
        """A readable name, unique among the cells of a set.

        >>> SETS["lists"][0][0].name
        'hd576/512 B1 N128/1 T4096 S8192, 2048 keys'
        """
        return f"{super().name}, {'all' if self.is_dense else self.keys} keys"

    def flops(self, backward: bool) -> float:
        """``2 (H + Hv)`` for each query and key of its list.

        Forward+backward has ``2 (3 H + 2 Hv)`` in addition, for five matrix products.

        >>> SETS["lists"][0][0].flops(False) == 2 * 4096 * 128 * 2048 * (576 + 512)
        True
        """
        columns = self.head_dim + self.value_dim
        if backward:
            columns += 3 * self.head_dim + 2 * self.value_dim
        return 2.0 * self.batch * self.query_length * self.heads * self.keys * columns

    def lists(self) -> jax.Array:
        """``int32[1, 1, T, n]``: distinct random keys of each query; all heads share them."""
        order = np.random.default_rng(0).random((self.query_length, self.key_length), np.float32)
        chosen = np.argpartition(order, self.keys - 1)[:, : self.keys]
        return jnp.asarray(chosen[None, None], jnp.int32)

    def inputs(self, lists: Any) -> Inputs:
        """The arrays of a call with these lists, which a dense cell ignores."""
        mask = None if self.is_dense else jax_memeff.Mask.keys(lists, unique_indices=True)
        made = make(self)
        return made._replace(mask=mask, value=None if self.is_latent else made.value)

    def attention(self, implementation: Any) -> Callable[[Inputs], jax.Array]:
        def attention(inputs: Inputs) -> jax.Array:
            return jax_memeff.dot_product_attention(
                inputs.query,
                inputs.key,
                inputs.value,
                value_dim=self.value_dim if self.is_latent else None,
                mask=inputs.mask,
                implementation=implementation,
            )

        return attention


def _latent(heads: int, length: int, keys: int) -> list[ListCell]:
    return [ListCell("lists", 1, 4096, length, heads, 1, 576, 512, keys=keys)]


def _grouped(queries: int, length: int, heads: int, key_heads: int, dim: int, keys: int):
    sizes = 1, queries, length, heads, key_heads, dim, dim
    return [ListCell("lists", *sizes, keys=n, gradients=False) for n in (keys, length)]


SETS: dict[str, list[list[ListCell]]] = {
    "lists": [
        _latent(128, 8192, 2048),
        _latent(64, 8192, 2048),
        _latent(128, 8192, 512),
        _latent(128, 32768, 2048),
        _grouped(4096, 8192, 64, 8, 128, 2048),
    ],
    "tiny": [
        [ListCell("lists", 1, 8, 64, 4, 1, 32, 16, keys=16)],
        _grouped(8, 64, 4, 2, 16, 16),
    ],
}
"""Cells that are timed together: grouped heads with and without lists. ``tiny`` is for tests."""
