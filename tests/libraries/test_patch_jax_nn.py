"""``patch_jax_nn``: when a patch begins and ends, for which threads, and what it reports."""

from __future__ import annotations

import functools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from test_clients import KEY, ORIGINAL, QUERY, VALUE, is_ours, patched, restores_jax_nn, said
from test_jax_nn_parity import operands

import jax_memeff
from jax_memeff import patch_jax_nn

__all__ = ["restores_jax_nn", "said"]


def call():
    return patched(QUERY, KEY, VALUE)


@pytest.mark.quick
def test_nested_patches_end_in_any_order():
    first, second = patch_jax_nn(), patch_jax_nn()
    wrapper = jax.nn.dot_product_attention
    assert wrapper is not ORIGINAL
    first.undo()
    first.undo()
    assert jax.nn.dot_product_attention is wrapper and is_ours(call)
    with second as same:
        assert same is second
    assert jax.nn.dot_product_attention is ORIGINAL and not is_ours(call)
    second.undo()


def test_a_patch_has_one_block():
    patch = patch_jax_nn()
    with patch, pytest.raises(RuntimeError, match="already has a with block"):
        patch.__enter__()
    with pytest.raises(RuntimeError, match="has ended; open a new patch"):
        patch.__enter__()
    assert jax.nn.dot_product_attention is ORIGINAL


def test_a_patch_is_no_decorator():
    with pytest.raises(
        TypeError, match=r"not a decorator, got a call; write `with jax_memeff.patch_jax_nn"
    ):
        patch_jax_nn()(call)
    assert jax.nn.dot_product_attention is ORIGINAL


def test_patches_of_signal_handlers():
    """They run between any two instructions of the thread that opens and ends patches."""

    def handler(*_):
        with patch_jax_nn():
            pass

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        for _ in range(300):
            patch_jax_nn().undo()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert jax.nn.dot_product_attention is ORIGINAL and not is_ours(call)


def test_an_error_ends_the_patch():
    with pytest.raises(KeyError), patch_jax_nn():
        raise KeyError
    assert jax.nn.dot_product_attention is ORIGINAL


def test_jitted_functions_are_traced_again():
    traces = []

    @jax.jit
    def jitted(query):
        traces.append(is_ours(lambda: patched(query, KEY, VALUE)))
        return query

    for _ in range(2):
        jitted(QUERY)
        with patch_jax_nn():
            jitted(QUERY)
    # Each program is traced once and then reused.
    assert traces == [False, True]


def test_a_function_imported_under_the_patch_is_that_of_jax_afterwards():
    with patch_jax_nn():
        from jax.nn import dot_product_attention
    assert not is_ours(lambda: dot_product_attention(QUERY, KEY, VALUE))
    with patch_jax_nn():
        assert is_ours(lambda: dot_product_attention(QUERY, KEY, VALUE))


def test_a_replacement_by_somebody_else_stays(monkeypatch):
    patch = patch_jax_nn()
    ours = jax.nn.dot_product_attention

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    jax.nn.dot_product_attention = theirs
    assert is_ours(call)
    patch.undo()
    assert jax.nn.dot_product_attention is theirs and not is_ours(call)
    with patch_jax_nn():
        assert is_ours(call)
    assert jax.nn.dot_product_attention is theirs
    jax.nn.dot_product_attention = ORIGINAL


@pytest.mark.quick
def test_every_thread_sees_the_patch():
    with patch_jax_nn(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_ours, call).result()


def test_threads_that_patch_at_once():
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        for _ in range(50):
            with patch_jax_nn():
                assert jax.nn.dot_product_attention is not ORIGINAL

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert jax.nn.dot_product_attention is ORIGINAL


def test_each_line_of_code_is_named_once(said):
    with patch_jax_nn():
        for _ in range(2):
            jax.vmap(jax.nn.dot_product_attention)(*(x[None] for x in operands()))
        patched(QUERY, KEY, VALUE)
        patched(QUERY, KEY, VALUE)
    modules = (__name__, patched.__module__)
    assert all(f"of {x}, line" in line for x, line in zip(modules, said(), strict=True))
    assert jax_memeff.patch_jax_nn is patch_jax_nn
