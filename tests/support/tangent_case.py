"""Tangents of test calls of attention: their arrays, running them, and the comparison."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packing
from attention_case import Case, Zeros, passed
from oracle_checks import cancellation

from jax_memeff._call.operands import Operands, gradients_of, needs_grad_of

EVERY = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class TangentCase:
    """A call, and the operands that have a tangent."""

    case: Case
    given: tuple[str, ...] = EVERY

    def __str__(self) -> str:
        letters = "" if self.given == EVERY else f"-d{'d'.join(name[0] for name in self.given)}"
        return f"{self.case}{letters}"

    def arrays(self, seed: int | None = 0) -> tuple[Operands, dict[str, np.ndarray]]:
        """The operands, and tangents that have the whole batch; zeros without a seed."""
        operands, _, _ = self.case.arrays(seed)
        rng: Any = Zeros() if seed is None else np.random.default_rng(1)
        drawn = {name: rng.standard_normal(getattr(operands, name).shape) for name in EVERY}
        dtype = operands.query.dtype
        return operands, {name: drawn[name].astype(dtype) for name in self.given}

    def passed(self, seed: int | None = 0) -> tuple[Operands, dict[str, np.ndarray]]:
        """The arrays that a call gets: NaN beyond the lengths, and packed if the case asks."""
        operands, tangents = self.arrays(seed)
        own, _, _ = passed(self.case, operands, self._like_out(operands), None)
        whole = dataclasses.replace(self.case, shared=())
        others = operands._replace(**tangents)
        others, _, _ = passed(whole, others, self._like_out(operands), None)
        return own, {name: getattr(others, name) for name in self.given}

    def _like_out(self, operands: Operands) -> np.ndarray:
        shape = (*operands.query.shape[:3], self.case.value_dim)
        return np.zeros(shape, operands.query.dtype)

    def run(self) -> tuple[Any, Any]:
        """Tangents of out and lse in the shapes of the case, from one jitted program."""
        operands, tangents = jax.tree.map(jnp.asarray, self.passed())
        results = _run(operands, self.case.options, tangents)
        if not self.case.packed:
            return results
        queries, _ = packing.packings(self.case)
        dout, dlse = (queries.unpack(x, self.case.T, 0) for x in results)
        return dout, dlse

    @property
    def needs_grad(self) -> Any:
        """The tangents that the call has, as ``selection.kernels`` takes them."""
        return needs_grad_of(self.arrays(None)[0], self.given)


@functools.partial(jax.jit, static_argnums=1)
def _run(operands: Operands, options: Any, tangents: dict[str, jax.Array]) -> Any:
    from jax_memeff._op import primitives

    out, lse, *_ = primitives.forward(operands, options)
    given = gradients_of(operands, tangents)
    return primitives.tangent(operands, options, out, lse, given)


def assert_tangents_match(made: TangentCase, results: tuple[Any, Any]) -> None:
    """Compares results of :meth:`TangentCase.run` with those of the definition in float64.

    The error of 16-bit inputs is compared with that of the definition in their dtype.
    """
    operands, tangents = made.arrays()
    directions = [tangents.get(name, np.zeros_like(getattr(operands, name))) for name in EVERY]
    answer = functools.partial(oracle.tangents, operands, made.case.options, directions)
    dout, dlse = answer(np.float64)
    low, _ = answer(operands.query.dtype)
    # dP V and dlse O may cancel: each is rounded by itself.
    out = oracle.answer(operands, made.case.options, dout).out
    floor = np.abs(dlse).max(initial=0) * cancellation(
        operands, made.case.options, np.ones_like(out), out
    )
    oracle.check("dout", results[0], dout, low, floor=floor)
    rough = 1e-3 if made.case.soft_cap is not None else 2e-5
    oracle.check("lse", results[1], dlse, lse_tolerance=rough)
