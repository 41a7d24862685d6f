"""The host's time for a decode step under jit, as a server calls it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from measuring.timing import Failure, measure

import jax_memeff

_ROUNDS = 7
_BATCH_SECONDS = 0.05


class _Step:
    """Calls a jitted function repeatedly; its first results become the next first arguments."""

    calls = 1

    def __init__(self, function: Any, state: tuple[Any, ...], *arguments: Any):
        self._function = jax.jit(function, donate_argnums=range(len(state)))
        self._state, self._arguments = state, arguments
        self._results: Any = None
        self.launch()

    def launch(self) -> None:
        self._results = self._function(*self._state, *self._arguments)
        if self._state:
            self._state = self._results[: len(self._state)]

    def wait(self) -> None:
        jax.block_until_ready(self._results)


def measure_all(implementation: Any) -> dict[str, dict[str, Any]]:
    """Microseconds of host time for each call; the device is faster than the host."""
    query = jnp.ones((2, 1, 8, 64), jnp.bfloat16)
    token = jnp.ones((2, 1, 8, 64), jnp.bfloat16)
    key, value, first, second = (jnp.ones((16, 16, 8, 64), jnp.bfloat16) for _ in range(4))
    table, lengths = jnp.arange(16, dtype=jnp.int32).reshape(2, 8), jnp.array([100, 40], jnp.int32)
    attention = functools.partial(jax_memeff.paged_attention, implementation=implementation)

    def append_and_attend(key: Any, value: Any, query: Any, token: Any, *where: Any) -> Any:
        key, value = jax_memeff.append_to_pages(key, value, token, token, *where)
        return key, value, attention(query, key, value, *where)

    dense = functools.partial(jax_memeff.dot_product_attention, implementation=implementation)
    programs = {
        "bare": _Step(lambda x: x + 1, (), jnp.zeros(())),
        "dense": _Step(dense, (), query, *(x.reshape(2, 128, 8, 64) for x in (key, value))),
        "paged": _Step(attention, (), query, key, value, table, lengths),
        "append_and_paged": _Step(append_and_attend, (first, second), query, token, table, lengths),
    }
    outcomes = measure(programs, rounds=_ROUNDS, batch_seconds=_BATCH_SECONDS)
    return {
        name: {"error": outcome.reason}
        if isinstance(outcome, Failure)
        else {"us": 1e6 * outcome.seconds, "spread": outcome.spread}
        for name, outcome in outcomes.items()
    }
