"""The problem that a call poses to the code generator."""

from __future__ import annotations

import dataclasses
import math

from jax_memeff._call import divisors
from jax_memeff._call.divisors import gradient_shape
from jax_memeff._call.functions import needs_delta_from_scores
from jax_memeff._call.mask import Window
from jax_memeff._call.operands import NeedsGrad, Operands, array_of, differentiable, is_packed
from jax_memeff._call.options import Divisors, Options
from jax_memeff._cuda import functions
from jax_memeff.codegen.features import FEATURES
from jax_memeff.codegen.features.bias import BiasLayout
from jax_memeff.codegen.features.functions import AskedDelta, AskedFunctions
from jax_memeff.codegen.problem import Direction, Dtype, Problem
from jax_memeff.codegen.strategy import Sizes

_DTYPES: dict[str, Dtype] = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call in the form that the features of the code generator read. From it each feature derives
    whether the call asks for it (``asked_by`` in codegen/features).
    """

    operands: Operands
    """The types of the operands."""
    options: Options
    needs_grad: NeedsGrad | None
    """None in a forward; in a call for tangents, the operands that have a tangent."""
    is_tangent: bool = False

    @property
    def direction(self) -> Direction:
        """The direction of the kernels: results, gradients or tangents."""
        if self.is_tangent:
            return "tangent"
        return "forward" if self.needs_grad is None else "backward"

    @property
    def mask_kinds(self) -> frozenset[str]:
        """The conditions of the mask, by name."""
        return self.operands.mask.kinds()

    @property
    def functions(self) -> AskedFunctions | None:
        """The user's functions, without the values of their literals."""
        needs_grad = None if self.is_tangent else self.needs_grad
        return functions.asked(self.operands, self.options, needs_grad)

    @property
    def delta_from_scores(self) -> AskedDelta | None:
        """Present if the kernels sum gradients for which a rounded output has too few digits."""
        if self.is_tangent or self.needs_grad is None:
            return None
        needed = self.needs_grad.captured
        summed = functions.gradients_in_kernels(self.operands, self.options, self.needs_grad)
        if not summed or not needs_delta_from_scores(self.operands, self.options, needed):
            return None
        return AskedDelta(has_sinks=self.operands.sinks is not None)

    @property
    def windows(self) -> tuple[Window | None, Window | None]:
        """The bounds of the columns that a row attends to. Kernels do not depend on alignments."""
        return self.operands.mask.top_left, self.operands.mask.bottom_right

    @property
    def broadcasts_batch(self) -> bool:
        """Whether some batch indices, but not all, share an operand or a gradient."""
        avals, options = self.operands, self.options
        batch = avals.scores_shape[0]
        batch_sizes = {divisors.combined(avals.mask, options.divisors, batch)[0]}
        batch_sizes |= {
            array_of(avals, name).shape[0]
            for name in differentiable(avals)
            if array_of(avals, name) is not None and divisors.may_sum_gradient(name, avals)
        }
        if self.needs_grad is not None:
            batch_sizes |= {
                self._gradient_shape(name)[0]
                for name in self.needs_grad.names
                if divisors.may_sum_gradient(name, avals)
            }
        keys = () if avals.sequences is not None else (avals.key, avals.value)
        return not batch_sizes <= {1, batch} or any(array.shape[0] != batch for array in keys)

    @property
    def bias_layout(self) -> BiasLayout:
        """How the bias is broadcast, as far as it matters to kernels.

        The gradient of a bias that is broadcast over columns needs no kernel: vjp.py computes it.
        """
        scores_shape, shape = self.operands.scores_shape, self._gradient_shape("bias")
        if shape == scores_shape:
            return "full"
        if shape[3] == 1 and scores_shape[3] != 1:
            return "rows"
        return "columns" if shape[2] == 1 else "common"

    @property
    def bias_alignment(self) -> int:
        """The alignment in bytes, up to 16, at which every row of the bias starts."""
        return bias_alignment(self.operands)

    def _gradient_shape(self, name: str) -> tuple[int, ...]:
        shape = array_of(self.operands, name).shape
        return divisors.gradient_shape(name, shape, self.operands, self.options.divisors)


def problem_of(call: KernelCall, arch: str) -> Problem:
    """The problem of a call on an architecture."""
    return Problem(
        direction=call.direction,
        dtype=_dtype(call.operands, call.options),
        head_dim=call.operands.query.shape[3],
        value_dim=call.operands.value_dim,
        arch=arch,
        features={feature.name: feature.asked_by(call) for feature in FEATURES},
        needs_grad=_needs_grad(call),
    )


def _needs_grad(call: KernelCall) -> tuple[str, ...]:
    if call.needs_grad is None:
        return ()
    # The gradients of captured arrays are part of the feature, but not their tangents.
    names = call.needs_grad._replace(captured=()).names
    return (*names, "captured") if call.is_tangent and any(call.needs_grad.captured) else names


def _dtype(avals: Operands, options: Options) -> Dtype:
    dtype = _DTYPES[avals.query.dtype.name]
    return "tf32" if dtype == "f32" and options.precision == "tf32" else dtype


def bias_alignment(avals: Operands) -> int:
    """The alignment in bytes, up to 16, at which every row of the bias starts."""
    bias = avals.bias
    return 16 if bias is None else math.gcd(16, bias.shape[3] * bias.dtype.itemsize)


def sizes_of(avals: Operands, divisors: Divisors) -> Sizes:
    """The sizes of a call for the code generator."""
    batch, heads, queries, keys = avals.scores_shape
    _, query_tokens, _, head_dim = avals.query.shape
    _, key_tokens, key_heads, _ = avals.key.shape
    has_tokens = is_packed(avals)
    bias_gradient = (1, 1)
    if avals.bias is not None:
        bias_gradient = gradient_shape("bias", avals.bias.shape, avals, divisors)[:2]
    return Sizes(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=avals.value_dim,
        query_tokens=query_tokens if has_tokens else None,
        key_tokens=key_tokens if has_tokens else None,
        bias_gradient=(bias_gradient[0], bias_gradient[1]),
    )
