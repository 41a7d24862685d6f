"""Every way to forward mode works inside ``forward_mode()``, and names it outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arrays import normal
from jax import lax
from jax.experimental import jet
from jax.sharding import AxisType, PartitionSpec

import jax_memeff

X, DIRECTION = (normal(seed, 1, 3, 1, 2) for seed in range(2))


def ours(x):
    return jax_memeff.dot_product_attention(x, 0.5 * x, x)


def plain(x):
    scores = jnp.einsum("btnh,bsnh->bnts", x, 0.5 * x) / jnp.sqrt(2)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), x)


def jvp(function):
    return jax.jvp(function, (X,), (DIRECTION,))


def scanned(function):
    return lambda x: lax.scan(lambda x, _: (function(x), None), x, length=2)[0]


def root(function):
    """The solution y of ``y = 0.1 function(y) + x``, whose derivative needs that of ``function``
    in forward mode.
    """

    def solve(residual, y):
        for _ in range(8):
            y = y - residual(y)
        return y

    def tangent_solve(linear, y):
        def flat(v):
            return linear(v.reshape(y.shape)).ravel()

        matrix = jnp.stack([flat(unit) for unit in jnp.eye(y.size)], 1)
        return jnp.linalg.solve(matrix, y.ravel()).reshape(y.shape)

    def solution(x):
        return lax.custom_root(
            lambda y: y - 0.1 * function(y) - x, jnp.zeros_like(x), solve, tangent_solve
        )

    return solution


def sharded(function):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def without_jit(function):
    with jax.disable_jit():
        return jvp(function)


WAYS: dict[str, Callable[[Any], Any]] = {
    "jvp": jvp,
    "jvp_jit": lambda f: jvp(jax.jit(f)),
    "jit_jvp": lambda f: jax.jit(lambda: jvp(f))(),
    "lower_jvp": lambda f: jax.jit(lambda: jvp(f)).lower().compile()(),
    "without_jit": without_jit,
    "linearize": lambda f: jax.linearize(f, X)[1](DIRECTION),
    "linearize_jit": lambda f: jax.linearize(jax.jit(f), X)[1](DIRECTION),
    "jvp_checkpoint": lambda f: jvp(jax.checkpoint(f)),
    "jvp_scan": lambda f: jvp(scanned(f)),
    "jvp_cond": lambda f: jvp(lambda x: lax.cond(x[0, 0, 0, 0] > -9, f, jnp.sin, x)),
    "jvp_custom_root": lambda f: jvp(root(f)),
    "grad_custom_root": lambda f: jax.grad(lambda x: root(f)(x).sum())(X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "jacfwd_jit": lambda f: jax.jacfwd(jax.jit(f))(X),
    "vmap_jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(X[None]),
    "jvp_vmap": lambda f: jax.jvp(jax.vmap(f), (X[None],), (X[None],)),
    "grad_jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum())(X),
    "jvp_shard_map": lambda f: jvp(sharded(f)),
    "jvp_jit_shard_map": lambda f: jvp(jax.jit(sharded(f))),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("way", WAYS)
def test_forward_mode(way, assert_close):
    with pytest.raises(TypeError, match=r"forward mode.*`with jax_memeff.forward_mode\(\):`"):
        WAYS[way](ours)
    with jax_memeff.forward_mode():
        got = WAYS[way](ours)
    assert_close(got, WAYS[way](plain), 1e-5)


def test_hessian_needs_no_context(assert_close):
    """Forward over reverse differentiates the gradient, which has both modes."""

    def hessian(function):
        return jax.jit(jax.hessian(lambda x: jnp.sum(jnp.sin(function(x)))))(X)

    got, want = map(hessian, (ours, plain))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("mode", ["outside", "inside"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_taylor_mode(mode, wrap):
    def call():
        return jet.jet(wrap(ours), (X,), ((X, X),))

    message = r"no Taylor mode.*\n.*expected jax.jvp.*forward_mode\(\):`, got jax.experimental.jet"
    with pytest.raises(jax_memeff.UnsupportedError, match=message):
        if mode == "outside":
            call()
        else:
            with jax_memeff.forward_mode():
                call()


@pytest.mark.parametrize("mode", ["outside", "inside"])
def test_paged_calls_do_not_name_a_mode_that_they_lack(mode):
    pool = normal(2, 2, 16, 1, 2)
    table, lengths = jnp.array([[0]]), jnp.array([3])

    def paged(x):
        return jax_memeff.paged_attention(x, pool, pool, table, lengths)

    def call():
        jvp(jax.jit(paged))

    with pytest.raises(jax_memeff.UnsupportedError, match="paged_attention has no derivative"):
        if mode == "outside":
            call()
        else:
            with jax_memeff.forward_mode():
                call()
