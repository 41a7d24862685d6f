"""Programs of the JAX peers: many calls inside one jit, none of which XLA can merge or drop."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from programs.cells import Cell
from programs.inputs import Inputs, adapt
from programs.peers import Peer


class JaxProgram:
    """A compiled :func:`program_of`, with as many calls as results.

    The results of a launch are donated to the next, so that a launch neither allocates nor clears
    them.
    """

    def __init__(self, compiled: Any, inputs: Inputs, results: list[Any]):
        self.compiled = compiled
        self.calls = len(results)
        self.inputs = (inputs,) * self.calls
        self._results = results

    def launch(self) -> None:
        self._results = self.compiled(self.inputs, self._results)

    def wait(self) -> None:
        jax.block_until_ready(self._results)

    def results(self) -> list[jax.Array]:
        """The output, then the gradients in the order of ``Inputs.differentiable``."""
        return list(self._results[-1])


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


def program_of(function: Any):
    """A function of the inputs of one or more calls and of the previous launch's results.

    Every call has its own parameters, although the same arrays are passed, so XLA cannot prove that
    two calls are equal, and merges none. All results are returned, so it drops none. The barrier,
    which costs no kernel, keeps it from fusing parts of two calls. There is no XLA loop, because
    that would count its iterations with an extra kernel.
    """

    call = jax.jit(function)  # traced and lowered once

    def program(inputs: tuple[Inputs, ...], donated: list[Any]):
        del donated
        results = []
        for arrays in inputs:
            arrays, results = lax.optimization_barrier((arrays, results))
            results.append(call(arrays))
        return results

    return program


@jax.jit
def distance(result: jax.Array, reference: jax.Array) -> jax.Array:
    """The relative distance in the Frobenius norm."""
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    return jnp.linalg.norm((result - reference).ravel()) / jnp.linalg.norm(reference.ravel())


def compile_program(peer: Peer, cell: Cell, inputs: Inputs, calls: int, backward: bool):
    """The executable for ``calls`` consecutive calls, and the result shapes of one."""
    arrays = jax.eval_shape(lambda inputs: adapt(inputs, peer, cell), inputs)
    return compile_calls(one_call(peer.attention(cell), backward), arrays, calls)


def compile_calls(function: Any, arrays: Any, calls: int):
    """The executable for ``calls`` consecutive calls of a function, and the result shapes of one.

    ``arrays`` has the shapes and dtypes of its argument.
    """
    results = jax.eval_shape(function, arrays)
    program = jax.jit(program_of(function), donate_argnums=1, keep_unused=True)
    return program.lower((arrays,) * calls, [results] * calls).compile(), results


def facts(compiled: Any, calls: int) -> dict[str, Any]:
    """The timed operations (:func:`operations`), and the memory beyond operands and results."""
    memory = compiled.memory_analysis()
    return {
        "operations": operations(compiled.as_text(), calls),
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


# Instructions of a compiled program that launch no kernel.
_FREE = frozenset(("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"))
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(")


def operations(hlo: str, calls: int) -> dict[str, float]:
    """The number of occurrences per call of each operation in a compiled program.

    It shows what is timed: every call, and nothing between them.

    >>> operations('''
    ... %fused (p: f32[8]) -> f32[8] {
    ...   ROOT %n = f32[8]{0} negate(%p)
    ... }
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   %c = f32[8]{0} custom-call(%x), custom_call_target="attention"
    ...   %d = f32[8]{0} custom-call(%c), custom_call_target="attention"
    ...   ROOT %f = f32[8]{0} fusion(%d), calls=%fused
    ... }''', calls=2)
    {'custom-call': 1.0, 'fusion': 0.5}
    """
    counts: Counter[str] = Counter()
    inside = False
    for line in hlo.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            inside = line.startswith("ENTRY ")
        elif inside and (match := _INSTRUCTION.match(line)):
            counts[match.group(1)] += match.group(1) not in _FREE
    return {name: count / calls for name, count in sorted(counts.items()) if count}
