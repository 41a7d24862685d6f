"""Calls with a large bias, as in masks that add -1e9 to padding keys."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import oracle
from attention_case import Case
from kernel_cases import BOTTOM_RIGHT, CAUSAL
from oracle_checks import cancellation, largest

from jax_memeff._call.operands import Operands

MASKED = -2e38
LOST = 2.0**24
"""A logsumexp beyond it is a whole number in float32."""


@dataclasses.dataclass(frozen=True)
class LargeBias(Case):
    """A third of the rows has the large bias in all elements, another third in the first and last
    columns, and the rest in some elements; a few elements are masked.
    """

    large: float = -1e30
    parts: bool = False
    """The keys of a row are divided into parts that have equal weight, however large the bias
    is.
    """

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.large:g}"

    def draw_bias(self, rng: np.random.Generator) -> Any:
        bias = rng.standard_normal(self.shape(self.bias or ""), np.float32)
        if self.large < 0:
            bias[rng.random(bias.shape) < 0.1] = self.large
        T, S = bias.shape[2:]
        if T > 1:
            whole, some = bias[:, :, : T // 3], bias[:, :, T // 3 : 2 * T // 3]
        else:
            whole, some = bias[:, ::2], bias[:, 1::2]
        whole[:] = self.large
        some[..., : S // 3] = some[..., S - S // 3 :] = self.large
        dtype = jnp.dtype(self.bias_dtype or self.dtype)
        if S > 1 and dtype != np.float16:
            bias[rng.random(bias.shape) < 0.05] = MASKED
        return bias.astype(dtype)

    @property
    def averages(self) -> bool:
        """Whether the scores of a row with a large bias are equal. They are not if the factor of
        the bias is no power of two, because the product is rounded after the score is added, nor if
        the bias is one number per row, because it changes no score.
        """
        factor = self.soft_cap or self.options.scaling.scale
        return math.frexp(factor)[0] == 0.5 and (self.bias or "")[-1:] == "S" and not self.parts


class Same(NamedTuple):
    """An equivalent call for the oracle."""

    operands: Operands
    """The operands, with a large greatest bias subtracted from its row, and with queries of 0 in
    lost rows, so that the oracle has digits for their scores.
    """
    dout: Any
    dlse: Any
    shift: np.ndarray
    """The subtracted numbers, [B, T, N]."""
    lost: np.ndarray
    """Rows without a gradient, whose cotangents are 0; bool[B, T, N]."""


def without_large_rows(case: LargeBias) -> Same:
    operands, dout, dlse = case.arrays()
    scores = case.B, case.N, case.T, case.S
    bias = np.broadcast_to(np.asarray(operands.bias), scores).astype(np.float64)
    valid = oracle.valid_elements(operands.mask, *scores) & (bias >= -1e37)
    greatest = np.where(valid, bias, -np.inf).max(-1)
    shift = np.where((abs(greatest) > 1e3) & np.isfinite(greatest), greatest, 0)
    bias = np.maximum(bias - shift[..., None], -6e4)  # fits float16, and its weight is 0
    shift = shift.transpose(0, 2, 1)
    lost = abs(shift) >= LOST
    assert lost.any() == (abs(case.large) >= LOST)
    return Same(
        operands._replace(query=_zeroed(operands.query, lost), bias=np.where(valid, bias, MASKED)),
        _zeroed(dout, lost),
        _zeroed(dlse, lost),
        shift,
        lost,
    )


def _zeroed(x: Any, rows: np.ndarray) -> Any:
    return np.where(rows.reshape(rows.shape + (1,) * (x.ndim - 3)), 0, x).astype(x.dtype)


def assert_matches(case: LargeBias, results: tuple) -> None:
    """As ``assert_results_match``, for a case with a large bias."""
    same = without_large_rows(case)
    answer = functools.partial(oracle.answer, same.operands, case.options, same.dout, same.dlse)
    reference = answer(np.float64)
    wide = case.dtype == "float32"
    low = (
        oracle.Answer._make([None] * len(oracle.Answer._fields))
        if wide
        else answer(jnp.dtype(case.dtype))
    )
    (out, lse), gradients = results
    np.testing.assert_allclose(lse, reference.lse + same.shift, rtol=1e-6, atol=1e-3)
    if case.averages:
        oracle.check("out", out, reference.out, low.out)
    else:
        rows = (out, reference.out) if wide else (out, reference.out, low.out)
        oracle.check("out", *(_zeroed(np.asarray(x), same.lost) for x in rows))
        _assert_between_values(case, same, out)
    if gradients is not None:
        _assert_gradients_match(case, same, reference, low, gradients)


def _assert_between_values(case: LargeBias, same: Same, out: Any) -> None:
    assert np.isfinite(out).all()
    if not case.dropout:
        value = np.repeat(np.asarray(same.operands.value, np.float32), case.N // case.K, 2)
        assert (abs(out) <= 1.01 * abs(value).max(1, keepdims=True)).all()


def _assert_gradients_match(
    case: LargeBias, same: Same, reference: oracle.Answer, low: oracle.Answer, gradients: tuple
) -> None:
    query, key = same.operands[:2]
    floor = cancellation(same.operands, case.options, same.dout, reference.out)
    scale = abs(case.options.scaling.scale)
    floors = {"query": scale * largest(key), "key": scale * largest(query), "value": 0}
    for (name, factor), got in zip(floors.items(), gradients[:3], strict=True):
        want, rough = getattr(reference, name), getattr(low, name)
        oracle.check(f"d{name}", got, want, rough, floor=floor * factor)
    broadcast = tuple(axis for axis, dim in enumerate(case.bias or "") if dim == "1")

    def summed(x: Any) -> Any:
        if x is None:
            return None
        return x.astype(np.float64).sum(broadcast, keepdims=True).astype(x.dtype)

    want, rough, terms = map(summed, (reference.bias, low.bias, reference.bias_scale))
    oracle.check("dbias", gradients[3], want, rough, scale=terms, floor=floor)


def gpu_cases() -> list[LargeBias]:
    """Cases with a 32-bit bias in whole rows of each size, and cases for other kernels."""
    cases = [
        LargeBias(T=300, S=570, K=1, H=H, dtype=dtype, bias=bias, bias_dtype="float32", large=large)
        for H, bias in ((64, "BNTS"), (128, "1N1S"), (256, "1NTS"))
        for dtype in ("bfloat16", "float16")
        for large in (-1e4, -1e9, -1e10, -1e30, 1e10)
    ]
    for large in (-1e9, -1e30):
        of = functools.partial(LargeBias, T=300, S=570, large=large)
        cases += [
            of(bias="BNTS"),
            of(H=96, bias="11TS", soft_cap=4.0, **CAUSAL),
            of(N=4, K=2, H=128, bias="1NTS", scale=0.125, dropout=0.2, **CAUSAL),
            of(H=128, bias="BNT1"),
            of(H=264, bias="1NTS", scale=0.0625),
            of(H=264, bias="BNT1"),
            of(dtype="float32", bias="BNTS"),
            of(dtype="float32", H=128, bias="1N1S", deterministic=True),
        ]
    few = LargeBias(T=5, S=3000, N=4, K=1, bias="1NTS", **BOTTOM_RIGHT)
    return [*cases, few, dataclasses.replace(few, T=70, K=4, H=128, bias="1N1S", large=-1e10)]
