"""Score functions and masks of random calls, with definitions for indices that broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff import Mask

BLOCK, MARGIN = 64, 24
"""The rows and columns of a listed KV block, and the elements around arrays that nothing reads."""

Arrays = dict[str, Any]
Index = tuple[Any, Any, Any, Any]


class Sizes(NamedTuple):
    """Batch size, rows, columns, heads and key heads; valid rows and columns of a batch index."""

    B: int
    T: int
    S: int
    N: int
    K: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def valid(self, b: Any, q: Any, k: Any) -> Any:
        return (q < np.array(self.rows)[b]) & (k < np.array(self.columns)[b])


class Function(NamedTuple):
    """A score function: the shapes of its arrays, their indices, and the function itself."""

    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    indices: Callable[[Sizes, Index], dict[str, tuple[Any, ...]]]
    score: Callable[[Any, dict[str, Any]], Any]
    """A function of a score and the elements that it reads."""


def _table_index(s: Sizes, i: Index) -> tuple[Any, ...]:
    return i[1], i[2] - i[3] + s.S + MARGIN


def _pair_index(s: Sizes, i: Index) -> tuple[Any, ...]:
    _, h, q, k = i
    return h, q // 16 - k // 16 + s.S // 16 + 1, q % 16 - k % 16 + 15


def _outer(s: Sizes, i: Index) -> dict[str, tuple[Any, ...]]:
    return {"rows": (i[0], i[2]), "columns": (i[3],)}


def _outer_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"rows": (s.B, s.T + MARGIN), "columns": (s.S + MARGIN,)}


FUNCTIONS: dict[str, Function] = {
    "none": Function(lambda s: {}, lambda s, i: {}, lambda x, a: x),
    "gain": Function(
        lambda s: {"gain": (s.N + MARGIN,)},
        lambda s, i: {"gain": (i[1],)},
        lambda x, a: 3 * jnp.tanh(x * a["gain"] / 3),
    ),
    "alibi": Function(
        lambda s: {"slopes": (s.N,)},
        lambda s, i: {"slopes": (i[1],)},
        lambda x, a: x + a["slopes"] * a["distance"] / 64,
    ),
    "table": Function(
        lambda s: {"table": (s.N, s.T + s.S + 2 * MARGIN)},
        lambda s, i: {"table": _table_index(s, i)},
        lambda x, a: x + a["table"],
    ),
    "pairs": Function(
        lambda s: {"pairs": (s.N, (s.T + s.S) // 16 + 3, 31)},
        lambda s, i: {"pairs": _pair_index(s, i)},
        lambda x, a: x + a["pairs"],
    ),
    "buckets": Function(
        lambda s: {"buckets": (16, s.N)},
        lambda s, i: {"buckets": (((i[2] - i[3]) // 8 + 8).clip(0, 15), i[1])},
        lambda x, a: x + a["buckets"],
    ),
    "outer": Function(_outer_shapes, _outer, lambda x, a: x + a["rows"] * a["columns"]),
    "gates": Function(
        _outer_shapes,
        _outer,
        lambda x, a: x * jax.nn.sigmoid(a["rows"] + a["columns"]) + jax.nn.relu(x),
    ),
    "square": Function(
        lambda s: {"square": (s.T + MARGIN, s.S + MARGIN)},
        lambda s, i: {"square": (i[2], i[3])},
        lambda x, a: x * (1 + a["square"] / 4),
    ),
    "holes": Function(
        lambda s: {"slopes": (s.N,)},
        lambda s, i: {"slopes": (i[1],)},
        lambda x, a: jnp.where(a["distance"] % 7 == 3, -jnp.inf, x * a["slopes"]),
    ),
}


def score_function(name: str, sizes: Sizes, arrays: Arrays) -> Any:
    """The function as a user writes it, over scalars."""
    function = FUNCTIONS[name]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        found = function.indices(sizes, (b, h, q, k))
        elements = {own: arrays[own][index] for own, index in found.items()}
        return function.score(score, elements | {"distance": k - q})

    return None if name == "none" else score_mod


class MaskCase(NamedTuple):
    """A mask, and its definition for indices that broadcast."""

    mask: Callable[[Sizes], Mask]
    valid: Callable[[Sizes, Index], Any]


def _prefix(s: Sizes) -> np.ndarray:
    return 5 + 11 * np.arange(s.B, dtype=np.int32)


def _documents(s: Sizes) -> np.ndarray:
    position = np.arange(max(s.T, s.S) + MARGIN, dtype=np.int32)
    return np.stack([position // (40 + 30 * b) for b in range(s.B)])


def _lists(s: Sizes) -> np.ndarray:
    """Two KV blocks for each Q block; the second may be absent or out of range."""
    q_blocks = -(-s.T // BLOCK)
    first = np.random.default_rng(1).integers(0, -(-s.S // BLOCK), (1, s.N, q_blocks, 1))
    second = np.random.default_rng(2).integers(-1, 9, first.shape)
    return np.concatenate([first, second], -1).astype(np.int32)


def _listed(s: Sizes, i: Index) -> Any:
    _, h, q, k = i
    return (_lists(s)[0, h, q // BLOCK] == (k // BLOCK)[..., None]).any(-1)


def _function(test: Callable[..., Any], array: Callable[[Sizes], np.ndarray]) -> Any:
    def mask(s: Sizes) -> Mask:
        own = jnp.asarray(array(s))
        return Mask.function(lambda b, h, q, k: test(own, b, h, q, k))

    return mask


def _before(prefix: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < prefix[b]


def _same(ids: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ids[b, q] == ids[b, k]


MASKS: dict[str, MaskCase] = {
    "full": MaskCase(lambda s: Mask(), lambda s, i: i[2] >= 0),
    "causal": MaskCase(lambda s: Mask.causal(), lambda s, i: i[3] <= i[2]),
    "window": MaskCase(
        lambda s: Mask.window(60, 20),
        lambda s, i: (i[3] >= i[2] - 60) & (i[3] <= i[2] + 20),
    ),
    "not": MaskCase(
        lambda s: Mask.causal() & ~Mask.window(30, -10),
        lambda s, i: (i[3] <= i[2]) & ((i[3] < i[2] - 30) | (i[3] > i[2] - 10)),
    ),
    "prefix": MaskCase(
        lambda s: Mask.causal() | _function(_before, _prefix)(s),
        lambda s, i: (i[3] <= i[2]) | _before(_prefix(s), *i),
    ),
    "documents": MaskCase(_function(_same, _documents), lambda s, i: _same(_documents(s), *i)),
    "dilated": MaskCase(
        lambda s: Mask.function(lambda b, h, q, k: (q - k) % 3 <= h),
        lambda s, i: (i[2] - i[3]) % 3 <= i[1],
    ),
    "listed": MaskCase(lambda s: Mask.kv_blocks(_lists(s), block_size=BLOCK), _listed),
}
