"""float32 forwards whose rows differ in size by many powers of two, and whose masks hide rows of
huge keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import oracle
from attention_case import Case
from kernel_cases import CAUSAL

from jax_memeff._call.operands import Operands

HUGE = 1e30


@dataclasses.dataclass(frozen=True)
class WideRange(Case):
    """A float32 case. Scores stay so small that no probability is lost. Values grow with their
    position, so that causal rows differ in size, too.
    """

    dtype: str = "float32"
    size: float = 1.0
    """The factor of all operands; the scale is divided by its square."""
    column: float = 1.0
    """The factor of the first column of queries and values; that of keys is divided by it."""

    def __str__(self) -> str:
        return f"{super().__str__()}-size{self.size:g}-column{self.column:g}"

    def arrays(self, seed: int | None = 0) -> tuple[Operands, Any, Any]:
        operands, *cotangents = super().arrays(seed)
        if self.boolean and seed is not None:
            operands = self.resized_rows(operands, seed)
        query, key, value = (np.float32(self.size) * array for array in operands[:3])
        query[..., 0] *= self.column
        key[..., 0] /= self.column
        value[..., 0] *= self.column
        return operands._replace(query=query, key=key, value=value), *cotangents

    def resized_rows(self, operands: Operands, seed: int) -> Operands:
        rng = np.random.default_rng(seed)

        def resized(rows: Any, least: int, most: int) -> Any:
            exponents = rng.integers(least, most, size=rows.shape[:3], endpoint=True)
            return np.ldexp(rows, np.sort(exponents, axis=1)[..., None])

        query = resized(operands.query, -40, 0)
        key, value = resized(operands.key, -40, 0), resized(operands.value, -40, 40)
        hidden = ~operands.mask.as_array(self.B, self.N, self.T, self.S).any((1, 2))
        assert hidden.any() and not hidden.all()
        key[hidden] = value[hidden] = HUGE
        return operands._replace(query=query, key=key, value=value)


def assert_matches(case: WideRange, out: Any) -> None:
    """Errors of a row are relative to the sum of the magnitudes of its terms."""
    operands, dout, _ = case.arrays()
    reference = oracle.answer(operands, case.options, dout).out
    sizes = operands._replace(value=abs(operands.value))
    terms = np.linalg.norm(oracle.answer(sizes, case.options, dout).out, axis=-1)
    errors = np.linalg.norm(np.asarray(out, np.float64) - reference, axis=-1)
    if case.boolean:
        assert terms.min(where=terms > 0, initial=np.inf) < 1e-6 * terms.max()
    np.testing.assert_array_less(errors, 5e-6 * terms + np.finfo(np.float32).tiny)


def cases() -> list[WideRange]:
    of = functools.partial(WideRange, B=1, T=200, S=300, K=1)
    cases = [of(H=H, boolean=("B11S",), **CAUSAL) for H in (64, 96, 128)]
    cases += [of(size=size, scale=size**-2 / 8) for size in (1e6, 1e-6, 1e15, 1e-15)]
    return [*cases, of(H=128, column=2.0**20), of(column=2.0**-20)]
