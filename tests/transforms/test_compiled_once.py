"""Calls outside of ``jax.jit`` compile nothing that an earlier call compiled."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from jax_memeff import Offsets, dot_product_attention, forward_mode, varlen_attention

X = normal(0, 2, 6, 4, 8)
PACKED = functools.partial(
    varlen_attention, cu_seqlens_q=np.array([0, 2, 6]), cu_seqlens_k=np.array([0, 4, 6])
)


def attention(x, **arguments):
    out = dot_product_attention(x, x, x, is_causal=True, **arguments)
    return jnp.sum(out**2)


def packed(x):
    tokens = x[0]
    out = PACKED(tokens, tokens, tokens, max_seqlen_q=4, max_seqlen_k=4)
    return jnp.sum(out**2)


def forward_over_reverse(function):
    return jax.jvp(jax.grad(function), [X], [X])


def reverse_over_reverse(function):
    return jax.grad(lambda x: jnp.vdot(jax.grad(function)(x), X))(X)


def forward_over_forward(function):
    with forward_mode():
        return jax.jvp(lambda x: jax.jvp(function, [x], [X])[1], [X], [X])


def heads_one_by_one():
    def part(head):
        key, offsets = jax.random.key(0), Offsets(head=head, num_heads=8)
        return attention(X, dropout_rate=0.5, dropout_key=key, offsets=offsets)

    return jax.vmap(part)(jnp.arange(2))


CALLS = {
    f"{derivative.__name__}-{function.__name__}": functools.partial(derivative, function)
    for derivative in (forward_over_reverse, reverse_over_reverse, forward_over_forward)
    for function in (attention, packed)
} | {"heads_one_by_one": heads_one_by_one}


@contextlib.contextmanager
def compiled_programs():
    """Yields a list that gets an entry for each program that JAX compiles or loads."""
    found = []

    def record(event, duration_secs, **_):
        if "backend_compile" in event:
            found.append((event, duration_secs))

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_compiles_nothing(name):
    call = CALLS[name]
    with compiled_programs() as programs:
        first = call()
    assert programs  # so the test can see compilations
    with compiled_programs() as programs:
        second = call()
    assert not programs
    jax.tree.map(np.testing.assert_array_equal, first, second)


PROGRAM = """
import jax, jax.numpy as jnp, jax_memeff

def step(x):
    print("traced")
    return jax_memeff.dot_product_attention(x, x, x, is_causal=True)

step = jax.jit(step)
step(jnp.ones((1, 8, 2, 8)))
step(jnp.ones((1, 8, 2, 8)))
"""


def test_a_fresh_process_traces_a_function_once():
    """Modules that are first imported while JAX traces must not change its configuration."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "traced\n"), done.stderr
