"""Converts a padded call to packed sequences: rows without padding, with NaN between sequences."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_memeff._call.operands import Operands
from jax_memeff._call.sequences import Sequences

if TYPE_CHECKING:
    from attention_case import Case


@dataclasses.dataclass(frozen=True)
class Packing:
    """The tokens of each sequence of a case, of its queries or of its keys."""

    lengths: tuple[int, ...]
    gaps: tuple[int, ...]
    """The tokens of no sequence: before the first sequence, and after each."""

    @property
    def starts(self) -> list[int]:
        ends = np.cumsum([self.gaps[0], *np.add(self.lengths, self.gaps[1:])])
        return [int(end) for end in ends[:-1]]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + sum(self.gaps)

    def pack(self, padded: Any, fill: float) -> Any:
        """Converts [B, T, ...] to [1, tokens, ...]."""
        padded = np.asarray(padded)
        packed = np.full((self.tokens, *padded.shape[2:]), fill, padded.dtype)
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            packed[start : start + length] = padded[b, :length]
        return packed[None]

    def unpack(self, packed: Any, longest: int, fill: float) -> np.ndarray:
        """Converts [1, tokens, ...] to [B, T, ...] and asserts that gaps hold ``fill``."""
        packed = np.asarray(packed)[0]
        padded = np.full((len(self.lengths), longest, *packed.shape[1:]), fill, packed.dtype)
        in_gap = np.ones(self.tokens, bool)
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            padded[b, :length] = packed[start : start + length]
            in_gap[start : start + length] = False
        np.testing.assert_array_equal(packed[in_gap], np.full_like(packed[in_gap], fill))
        return padded


def packings(case: Case, seed: int = 0) -> tuple[Packing, Packing]:
    """The packings of queries and keys of a case with lengths. Gaps have any size; many are
    empty.
    """
    rng = np.random.default_rng(seed)
    assert case.lengths is not None
    queries, keys = (
        Packing(side, tuple(int(x) for x in rng.choice([0, 0, 1, 7, 150], case.B + 1)))
        for side in zip(*case.lengths, strict=True)
    )
    return queries, keys


def packed(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """The packed arrays of a case with lengths, with NaN in the gaps."""
    queries, keys = packings(case)

    def sequence_starts(packing: Packing) -> Any:
        starts = packing.starts
        return np.array([*starts, starts[0] + packing.tokens], np.int32)

    segments = tuple(
        (queries.pack(query_ids, 0), keys.pack(key_ids, 0))
        for query_ids, key_ids in operands.mask.segment_ids
    )
    key_lists = []
    for lists in operands.mask.key_lists:
        of_rows = np.broadcast_to(lists.indices, (case.B, *lists.indices.shape[1:]))
        indices: Any = queries.pack(np.swapaxes(of_rows, 1, 2), 0)
        key_lists.append(dataclasses.replace(lists, indices=indices))
    return (
        operands._replace(
            query=queries.pack(operands.query, np.nan),
            key=keys.pack(operands.key, np.nan),
            value=keys.pack(operands.value, np.nan),
            mask=dataclasses.replace(
                operands.mask,
                segment_ids=segments,
                key_lists=tuple(key_lists),
                query_lengths=None,
                key_lengths=None,
            ),
            sequences=Sequences(
                sequence_starts(queries),
                sequence_starts(keys),
                np.array(queries.lengths, np.int32),  # type: ignore[arg-type]
                np.array(keys.lengths, np.int32),  # type: ignore[arg-type]
                case.T,
                case.S,
            ),
        ),
        queries.pack(dout, np.nan),
        None if dlse is None else queries.pack(dlse, np.nan),
    )


def unpacked_forward(case: Case, results: tuple) -> tuple:
    """The results of a forward of packed arrays in padded form; None stays None."""
    out, *of_rows = results
    queries, _ = packings(case)
    return (
        queries.unpack(out, case.T, 0),
        *(None if x is None else queries.unpack(x, case.T, -np.inf) for x in of_rows),
    )


def unpacked(case: Case, results: tuple) -> tuple:
    """The results of ``attention_case.run`` of packed arrays in padded form."""
    forward, (dq, dk, dv, *others) = results
    queries, keys = packings(case)
    return unpacked_forward(case, forward), (
        queries.unpack(dq, case.T, 0),
        keys.unpack(dk, case.S, 0),
        keys.unpack(dv, case.S, 0),
        *others,
    )
