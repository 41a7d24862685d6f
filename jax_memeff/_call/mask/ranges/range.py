"""The bounds of a value in each tile, and helpers that all rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff.codegen.functions.program import Value

SAFE_PRODUCT = float(2**30)
MORE_THAN_ROUNDING = 2.0**-20


class Range(NamedTuple):
    """The bounds of a value in each tile; for bools, whether all and whether any are true."""

    low: Any
    high: Any
    """The same object as ``low`` if the value is constant in a tile."""
    width: int | None = None
    """For integers, an upper bound on ``high - low`` in every tile, provided that no sum overflows;
    None if unknown."""

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @classmethod
    def exact(cls, value: Any) -> Range:
        return cls(value, value, 0)

    @classmethod
    def everything(cls, dtype: str) -> Range:
        """The unbounded range."""
        if dtype == "bool":
            return cls(jnp.asarray(False), jnp.asarray(True))
        if dtype.startswith("float"):
            # NaN bounds make every comparison undecided.
            return cls(jnp.asarray(np.nan, dtype), jnp.asarray(np.nan, dtype))
        limits = np.iinfo(dtype)
        return cls(jnp.asarray(limits.min, dtype), jnp.asarray(limits.max, dtype))

    def where(self, known: jax.Array, dtype: str) -> Range:
        """This range in tiles where ``known`` is true, and the unbounded range in the others."""
        other = Range.everything(dtype)
        low, high = jnp.where(known, self.low, other.low), jnp.where(known, self.high, other.high)
        return Range(low, high, self.width)

    def widened(self) -> Range:
        """The range of floats whose last bits are unknown.

        A result that overflows here may be just finite in a kernel, so infinity is widened to the
        largest floats.
        """
        most = float(jnp.finfo(jnp.result_type(self.low)).max)
        low, high = jnp.minimum(self.low, most), jnp.maximum(self.high, -most)
        return Range(
            low - jnp.abs(low) * MORE_THAN_ROUNDING, high + jnp.abs(high) * MORE_THAN_ROUNDING
        )


Rule = Callable[[Value, list[Range], list[Any]], Range | None]
"""Like :func:`applied`, if some operands are not exact; None if the range is unbounded."""


def dtype_of(x: Range) -> str:
    return np.dtype(jnp.result_type(x.low)).name


def is_float(value: Value) -> bool:
    return value.dtype.startswith("float")


def least(bounds: list[Any]) -> Any:
    found = bounds[0]
    for bound in bounds[1:]:
        found = jnp.minimum(found, bound)
    return found


def largest(bounds: list[Any]) -> Any:
    found = bounds[0]
    for bound in bounds[1:]:
        found = jnp.maximum(found, bound)
    return found
