"""The common base of the backward kernels: gradients, their sums, and the stages around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jax_memeff.codegen.features import BIAS, DETERMINISTIC
from jax_memeff.codegen.features.bias import gradient as bias_gradient
from jax_memeff.codegen.features.feature import Constant, CppType
from jax_memeff.codegen.launch import Workspace
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.sizes import Sizes, round_up
from jax_memeff.codegen.spec import SPEC_GRADIENTS, Kernel, KernelSpec
from jax_memeff.codegen.strategy import Strategy


class Backward(Kernel):
    """A backward in one or more kernels, after a preprocess kernel that writes row statistics."""

    direction = "backward"

    def reasons(self, spec: KernelSpec, problem: Problem, strategy: Strategy) -> list[str]:
        asked = tuple(name for name in SPEC_GRADIENTS if name in problem.needs_grad)
        reasons = super().reasons(spec, problem, strategy)
        if problem.direction == "backward" and spec.gradients != asked:
            reasons.append(
                f"it computes the gradients of {', '.join(spec.gradients)}, "
                f"not of {', '.join(asked)}"
            )
        return reasons

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        needs_grad = {
            f"k{name.capitalize()}Gradient": name in spec.gradients for name in SPEC_GRADIENTS
        }
        return {
            **super().constants(spec),
            **needs_grad,
            "kOrdersQueries": spec.orders_queries,
            "kSplitQ": spec.split_q,
            "kCountsKvBlocks": self.counts_kv_blocks(spec),
        }

    def counts_kv_blocks(self, spec: KernelSpec) -> bool:
        """Whether the main kernel counts finished KV blocks, so that the postprocess kernel may run
        beside its last CTAs (ffi/include/memeff/kernels/backward/dq_sums/finished.cuh).
        """
        return False

    def bias_sum_rows(self, spec: KernelSpec) -> int:
        """The rows of sums that each KV block of a (batch, head) slice has for the gradient of a
        bias that is broadcast over rows, if the sums are deterministic.
        """
        raise NotImplementedError

    def workspaces(
        self, spec: KernelSpec, sizes: Sizes, multiprocessors: int
    ) -> Iterator[Workspace]:
        yield Workspace("row_statistics", (2 * sizes.padded_queries(spec.tile.query),))
        bias = spec[BIAS]
        if bias is not None and bias.gradient in ("shared", "columns"):
            yield Workspace("bias_gradient_sum", (self._bias_sums(spec, sizes),))

    def _bias_sums(self, spec: KernelSpec, sizes: Sizes) -> int:
        """The size of the sums of ffi/include/memeff/score/bias/gradient.cuh."""
        slices = sizes.bias_gradient[0] * sizes.bias_gradient[1]
        rows = 1
        if bias_gradient(spec) == "shared":
            rows = round_up(sizes.queries, spec.tile.query)
        elif spec[DETERMINISTIC]:
            slices = sizes.batch * sizes.heads
            rows = self.bias_sum_rows(spec)
        return slices * rows * round_up(sizes.keys, spec.tile.key)
