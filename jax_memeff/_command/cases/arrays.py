"""The arrays of a case: the oracle's problem, and what the call gets, with NaN where nothing may be
read.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call.dropout import key_words, threshold
from jax_memeff._command.cases import oracle
from jax_memeff._command.cases.case import Case
from jax_memeff._command.cases.oracle import Problem
from jax_memeff._cuda import named_functions

MOVING = ("query", "key", "value", "bias", "sinks", "captured")
"""The arrays that have gradients."""

_GAPS = (3, 5)
"""Tokens before the first packed sequence, and after the last."""

_BLOCKS = "blocks"
_DOCUMENTS = 4

_DISTINCT = 1048573
"""Numbers of an array before they repeat: drawing takes longer than a large case otherwise. A
prime, so rows of no tile are equal.
"""


def in_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The mask function of cases that name none of the user's."""
    return (q // 16 + k // 32) % 3 > 0


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arrays of a case in its dtype, padded, with finite numbers everywhere."""

    case: Case
    padded: Mapping[str, np.ndarray]

    @classmethod
    def draw(cls, case: Case, *, as_in_models: bool = False) -> Arrays:
        """Normal numbers, the same for each run of a case.

        By default they are odd: biases have infinite elements, and segments no order.
        ``as_in_models`` leaves that out: four documents of the same length, a finite bias.
        """
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        dtype = jnp.dtype(case.dtype)

        def normal(*shape: int, dtype: Any = dtype) -> np.ndarray:
            count = min(math.prod(shape), _DISTINCT)
            return np.resize(rng.standard_normal(count, np.float32).astype(dtype), shape)

        queries, keys = (case.B, case.T, case.N), (case.B, case.S, case.K)
        drawn = {
            "query": normal(*queries, case.H),
            "key": normal(*keys, case.H),
            "value": normal(*keys, case.value_dim),
            "dout": normal(*queries, case.value_dim),
            "dlse": normal(*queries, dtype=np.float32),
        }
        if case.latent:
            drawn["value"] = drawn["key"][..., : case.value_dim]
        if case.tangents:
            drawn |= {f"{name}_tangent": normal(*drawn[name].shape) for name in MOVING[:3]}
        if case.bias:
            bias_dtype = jnp.dtype(case.bias_dtype or case.dtype)
            drawn["bias"] = normal(*_shape(case, case.bias), dtype=bias_dtype)
            if not as_in_models:
                drawn["bias"] = _with_infinite(drawn["bias"], rng)
        if case.sinks:
            drawn["sinks"] = 2 * normal(case.N, dtype=np.float32)
            drawn["sinks"][1:2] = -np.inf
        if case.score_function in _CAPTURED:
            drawn["captured"] = normal(_CAPTURED[case.score_function](case), dtype=np.float32)
        if case.dropout:
            drawn["words"] = rng.integers(2**32, size=2, dtype=np.uint32)
        if case.segments:  # of -1 none is valid
            for name, length in (("query_ids", case.T), ("key_ids", case.S)):
                ids = np.sort(rng.integers(-1, 3, (case.B, length), np.int32), axis=1)
                documents = np.arange(length, dtype=np.int32) * _DOCUMENTS // length
                drawn[name] = np.resize(documents, ids.shape) if as_in_models else ids
        if case.boolean:
            shape = _shape(case, case.boolean)
            count = min(math.prod(shape), _DISTINCT)
            drawn["boolean"] = np.resize(rng.random(count) < 0.8, shape)
        if case.keys:  # -1 and S are no key
            shape = case.B, case.T, 1, case.keys_of_row
            count = min(math.prod(shape), _DISTINCT)
            drawn["lists"] = np.resize(rng.integers(-1, case.S + 1, count, np.int32), shape)
        return cls(case, drawn)

    def problem(self) -> Problem:
        """The problem in float64."""
        case = self.case
        wide = {name: x.astype(np.float64) for name, x in self.padded.items() if name in _FLOATS}
        kept = np.ones(())
        if case.dropout:
            dropped = threshold(case.dropout)
            kept = self.kept * (256 / (256 - dropped))
        sinks = None
        if case.sinks:
            sinks = np.broadcast_to(wide["sinks"][:, None], self._scores[:3])
            sinks = np.where(self._rows, sinks, -np.inf)
        return Problem(
            *(wide[name] for name in ("query", "key", "value", "dout", "dlse")),
            valid=self.valid,
            kept=kept,
            scale=case.H**-0.5,
            soft_cap=case.soft_cap,
            bias=wide.get("bias"),
            is_latent=case.latent,
            sinks=sinks,
            function=self._function(wide.get("captured")),
        )

    @property
    def kept(self) -> np.ndarray:
        """The elements that dropout keeps, bool[B, N, T, S]."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            key = jax.random.wrap_key_data(jnp.asarray(self.padded["words"]), impl="threefry2x32")
            words = np.asarray(key_words(key))
        return oracle.kept_elements(words, threshold(self.case.dropout), self._scores)

    @property
    def _scores(self) -> tuple[int, int, int, int]:
        return self.case.B, self.case.N, self.case.T, self.case.S

    @property
    def _lengths(self) -> np.ndarray:
        """Of queries and keys, [2, B, 1, 1, 1]."""
        case = self.case
        lengths = case.lengths or ((case.T, case.S),) * case.B
        return np.transpose(lengths)[..., None, None, None]

    @property
    def _positions(self) -> np.ndarray:
        """Of the rows, for windows and functions: [B, 1, T, 1], negative for rows without token."""
        first = self._lengths[1] - self.case.T if self.case.kind == "paged" else 0
        rows = np.arange(self.case.T)[:, None] + first
        return np.broadcast_to(rows, (self.case.B, 1, self.case.T, 1))

    @property
    def _rows(self) -> np.ndarray:
        """The rows within the lengths, bool[B, 1, T]."""
        return ((np.arange(self.case.T)[:, None] < self._lengths[0]) & (self._positions >= 0))[
            ..., 0
        ]

    @property
    def valid(self) -> np.ndarray:
        """The mask by its definition, bool[B, N, T, S]."""
        case, rows, columns = self.case, self._positions, np.arange(self.case.S)
        query_lengths, key_lengths = self._lengths
        valid = self._rows[..., None] & (columns < key_lengths)
        if case.causal is not None:
            is_shifted = case.causal == "bottom_right" and case.kind != "paged"
            valid = valid & (columns <= rows + is_shifted * (key_lengths - query_lengths))
        if case.window is not None:
            left, right = case.window
            valid = valid & (columns >= rows - left) & (columns <= rows + right)
        if case.segments:
            query_ids = self.padded["query_ids"][:, None, :, None]
            key_ids = self.padded["key_ids"][:, None, None, :]
            valid = valid & (query_ids == key_ids) & (query_ids >= 0)
        if case.boolean:
            valid = valid & self.padded["boolean"]
        if case.keys:
            listed = np.zeros((case.B, 1, case.T, case.S + 1), bool)
            lists = np.swapaxes(self.padded["lists"], 1, 2)
            np.put_along_axis(listed, np.where(lists < 0, case.S, lists), True, 3)
            valid = valid & listed[..., : case.S]
        if case.mask_function == _BLOCKS:
            valid = valid & in_blocks(0, 0, rows, columns)
        elif case.mask_function:
            function = named_functions.imported("--mask-function", case.mask_function)
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                valid = valid & np.asarray(_over_elements(function)(*self._indices))
        return np.broadcast_to(valid, self._scores)

    @property
    def _indices(self) -> list[np.ndarray]:
        """Batch index, head, row and column of each score, int32[B, N, T, S]."""
        batch, heads, _, columns = np.ogrid[: self.case.B, : self.case.N, :1, : self.case.S]
        indices = (batch, heads, self._positions, columns)
        return [np.broadcast_to(x, self._scores).astype(np.int32) for x in indices]

    def _function(self, captured: np.ndarray | None) -> oracle.Function | None:
        case, rows, columns = self.case, self._positions, np.arange(self.case.S)
        if captured is None:
            if not case.score_function:
                return None
            function = named_functions.imported("--score-function", case.score_function)
            return _evaluated(function, self._indices)
        if case.score_function == "alibi":
            heads = np.arange(case.N)[:, None, None]
            return oracle.added_term(captured, heads, columns - rows)
        return oracle.added_term(captured, rows - columns + case.S - 1, np.ones(()))

    def given(self) -> dict[str, np.ndarray]:
        """What the call gets: NaN beyond the lengths; packed or in pages if the case asks."""
        case, found = self.case, dict(self.padded)
        if case.lengths is None:
            return found
        query_lengths, key_lengths = np.asarray(case.lengths, np.int32).T
        of_queries, of_keys = self._names("query"), self._names("key")
        if case.kind == "paged":
            pools = _in_pages({name: found[name] for name in of_keys}, key_lengths, case)
            return found | pools | {"key_lengths": key_lengths}
        if "bias" in found:
            found["bias"] = self._poisoned_bias()
        for names, lengths, starts in (
            (of_queries, query_lengths, "query_starts"),
            (of_keys, key_lengths, "key_starts"),
        ):
            for name in names:
                found[name] = _poisoned(found[name], lengths)
            if case.kind == "packed":
                ends = np.cumsum([_GAPS[0], *lengths], dtype=np.int32)
                found |= {name: _packed(found[name], lengths) for name in names}
                found[starts] = ends
        return found | {"query_lengths": query_lengths, "key_lengths": key_lengths}

    def _names(self, side: str) -> list[str]:
        own: dict[str, tuple[str, ...]] = {}
        own["query"] = ("query", "dout", "dlse", "query_tangent", "query_ids", "lists")
        own["key"] = ("key", "value", "key_tangent", "value_tangent", "key_ids")
        return [name for name in own[side] if name in self.padded]

    def _poisoned_bias(self) -> np.ndarray:
        bias = self.padded["bias"].copy()
        lengths = np.asarray(self.case.lengths)
        for b in range(len(bias)):
            query, key = lengths.max(0) if len(bias) == 1 else lengths[b]
            if bias.shape[2] > 1:
                bias[b, :, query:] = np.nan
            if bias.shape[3] > 1:
                bias[b, :, :, key:] = np.nan
        return bias

    def unpacked(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The results in the shapes of the padded arrays.

        A token of no sequence must have 0, or -inf as logsumexp; if one has not, the first element
        of the result becomes NaN, which no comparison accepts.
        """
        if self.case.kind != "packed":
            return dict(results)
        assert self.case.lengths is not None
        query_lengths, key_lengths = zip(*self.case.lengths, strict=True)
        found = dict(results)
        for name, packed in results.items():
            if name in ("out", "lse", "dquery", "out_tangent", "lse_tangent"):
                found[name] = _unpacked(packed, query_lengths, self.case.T, name == "lse")
            elif name in ("dkey", "dvalue"):
                found[name] = _unpacked(packed, key_lengths, self.case.S, False)
        return found


_FLOATS = (*MOVING, "dout", "dlse")
_CAPTURED: Mapping[str, Callable[[Case], int]] = {
    "alibi": lambda case: case.N,
    "distances": lambda case: case.T + case.S - 1,
}
"""The length of the array that a score function reads."""


def _shape(case: Case, dims: str) -> tuple[int, ...]:
    return tuple(1 if dim == "1" else getattr(case, dim) for dim in dims)


def _with_infinite(bias: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The bias with -inf (or what counts as -inf) in some elements and whole rows."""
    bias[rng.random(bias.shape) < 0.02] = -np.inf
    bias[rng.random(bias.shape[:3]) < 0.04] = -np.inf
    if bias.dtype != np.float16:
        bias[rng.random(bias.shape) < 0.02] = -2e38
    return bias


def _poisoned(padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """NaN beyond the lengths; ids stay as they are."""
    if np.issubdtype(padded.dtype, np.integer):
        return padded
    beyond = np.arange(padded.shape[1]) >= lengths[:, None]
    return np.where(beyond.reshape(*beyond.shape, *[1] * (padded.ndim - 2)), np.nan, padded).astype(
        padded.dtype
    )


def _packed(padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T, ...] as [tokens, ...], with NaN (or -1) in gaps."""
    fill = -1 if np.issubdtype(padded.dtype, np.integer) else np.nan
    gaps = [np.full((gap, *padded.shape[2:]), fill, padded.dtype) for gap in _GAPS]
    rows = [own[:length] for own, length in zip(padded, lengths, strict=True)]
    return np.concatenate([gaps[0], *rows, gaps[1]])


def _unpacked(packed: np.ndarray, lengths: Any, longest: int, is_lse: bool) -> np.ndarray:
    fill = -np.inf if is_lse else 0
    padded = np.full((len(lengths), longest, *packed.shape[1:]), fill, packed.dtype)
    ends = np.cumsum([_GAPS[0], *lengths])
    for own, end, length in zip(padded, ends[1:], lengths, strict=True):
        own[:length] = packed[end - length : end]
    if not (packed[: _GAPS[0]] == fill).all() or not (packed[ends[-1] :] == fill).all():
        padded.flat[0] = np.nan
    return padded


def _in_pages(
    padded: Mapping[str, np.ndarray], lengths: np.ndarray, case: Case
) -> dict[str, np.ndarray]:
    """Pools whose pages are in random order, with NaN in rows and pages that nothing may read."""
    size = case.page_size
    pages = -(-case.S // size)
    rng = np.random.default_rng(0)
    order = rng.permutation(case.B * pages + 2).astype(np.int32)  # two pages are free
    table = order[: case.B * pages].reshape(case.B, pages)
    found: dict[str, np.ndarray] = {"table": table}
    for name, array in padded.items():
        pool = np.full((len(order), size, *array.shape[2:]), np.nan, array.dtype)
        for b, length in enumerate(lengths):
            columns = np.arange(length)
            pool[table[b, columns // size], columns % size] = array[b, :length]
        found[name] = pool
    return found


def _over_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of scalars, for arrays of four dims."""
    for _ in range(4):
        function = jax.vmap(function)
    return function


def _evaluated(function: Callable[..., Any], indices: list[np.ndarray]) -> oracle.Function:
    """The user's function in float32 on the CPU, with its gradient by JAX."""

    def on_scores(scores: np.ndarray) -> tuple[np.ndarray, oracle.Pullback]:
        def of_scores(x: jax.Array) -> jax.Array:
            return _over_elements(function)(x, *indices)

        device = jax.local_devices(backend="cpu")[0]
        with jax.default_device(device):
            changed, transpose = jax.vjp(of_scores, jnp.asarray(scores, jnp.float32))

        def pullback(gradient: np.ndarray, magnitudes: bool) -> tuple[np.ndarray, None]:
            with jax.default_device(device):
                (found,) = transpose(jnp.asarray(gradient, jnp.float32))
            return np.asarray(found, np.float64), None

        return np.asarray(changed, np.float64), pullback

    return on_scores
