"""Programs of the JAX peers: many calls inside one jit, none of which XLA can hoist or drop."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from cells import Cell
from inputs import Inputs, adapt
from jax import lax
from peers import Peer


class JaxProgram:
    """``calls`` calls in one compiled program.

    The results of a launch are donated to the next, so that a launch neither allocates nor clears
    them.
    """

    def __init__(self, compiled: Any, inputs: Inputs, results: Any, calls: int):
        self.compiled = compiled
        self.inputs = inputs
        self.calls = calls
        self._results = results

    def launch(self) -> None:
        self._results = self.compiled(self.inputs, self._results)

    def wait(self) -> None:
        jax.block_until_ready(self._results)

    def results(self) -> list[jax.Array]:
        """The output, then the gradients in the order query, key, value, bias."""
        return list(self._results)


def one_call(attention: Any, backward: bool):
    """A function of ``Inputs``: the output, and the gradients of every differentiable operand."""

    def forward(inputs: Inputs):
        return (attention(inputs),)

    def forward_and_backward(inputs: Inputs):
        out, pullback = jax.vjp(
            lambda operands: attention(inputs._replace(**operands)), inputs.differentiable()
        )
        (gradients,) = pullback(inputs.cotangent)
        return (out, *(gradients[name] for name in inputs.differentiable()))

    return forward_and_backward if backward else forward


@jax.jit
def distance(result: jax.Array, reference: jax.Array) -> jax.Array:
    """Relative, in the Frobenius norm."""
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    return jnp.linalg.norm((result - reference).ravel()) / jnp.linalg.norm(reference.ravel())


def compile_program(peer: Peer, cell: Cell, inputs: Inputs, calls: int, backward: bool):
    """The executable of ``calls`` calls and the shapes of its results.

    Inside the loop every input passes an optimization barrier and is carried on, so XLA cannot
    prove that it stays the same, and hoists nothing. Every result is carried too, so nothing is
    eliminated. The barrier vanishes when XLA has scheduled the program and costs no kernel.
    """
    function = one_call(peer.attention(cell), backward)
    arrays = jax.eval_shape(lambda inputs: adapt(inputs, peer, cell), inputs)
    results = jax.eval_shape(function, arrays)

    def program(inputs, results):
        def body(_, carry):
            inputs = lax.optimization_barrier(carry[0])
            return inputs, function(inputs)

        return lax.fori_loop(0, calls, body, (inputs, results))[1]

    return jax.jit(program, donate_argnums=1).lower(arrays, results).compile(), results


def facts(compiled: Any) -> dict[str, Any]:
    """What is timed (:func:`loop_body`), and its memory beside operands and results."""
    memory = compiled.memory_analysis()
    return {
        "loop_body": loop_body(compiled.as_text()),
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


# What costs no kernel in a compiled loop body.
_FREE = frozenset(("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"))
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(")


def loop_body(hlo: str) -> dict[str, int]:
    """How often each operation occurs in the first loop of a compiled program.

    It shows what is timed: one call, and nothing that the loop itself has added but the counter.

    >>> loop_body('''
    ... %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
    ...   %p = (s32[], f32[8]) parameter(0)
    ...   %x = f32[8]{0} get-tuple-element(%p), index=1
    ...   ROOT %c = f32[8]{0} custom-call(%x), custom_call_target="attention"
    ... }
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
    ... }''')
    {'custom-call': 1}
    """
    body = _BODY.search(hlo)
    if body is None:
        return {}
    counts: Counter[str] = Counter()
    inside = False
    for line in hlo.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            inside = line.lstrip("%").split(" ")[0] == body.group(1)
        elif inside and (match := _INSTRUCTION.match(line)):
            counts[match.group(1)] += match.group(1) not in _FREE
    return {operation: count for operation, count in sorted(counts.items()) if count}
