"""The errors of functions that cannot be traced."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax.experimental import hijax
from jax.extend.core import Primitive

from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.errors import UnsupportedError

TABLE = normal(1, 4, 64)


def line_of(text: str) -> str:
    """The place of a text in this file, as ``name:line``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line and f'"{text}' not in line)
    return f"{Path(__file__).name}:{number}"


def score_error(kind, function):
    with pytest.raises(kind) as caught:
        traced_score_function(function)
    assert "score_mod" in str(caught.value)
    return str(caught.value)


def mask_error(kind, function):
    with pytest.raises(kind) as caught:
        traced_mask_function(function)
    assert "Mask.function" in str(caught.value)
    return str(caught.value)


@pytest.mark.quick
def test_the_number_of_arguments():
    message = score_error(TypeError, lambda s, q, k: s)
    assert "must take (score, batch, head, query, key)" in message and "(s, q, k)" in message
    message = mask_error(TypeError, lambda s, b, h, q, k: q < k)
    assert "must take (batch, head, query, key)" in message
    assert "a function of 5 arguments" in score_error(TypeError, TABLE)
    traced_score_function(lambda *args, scale=2.0: args[0] * scale)


def test_the_kind_of_the_result():
    assert "got tuple" in score_error(TypeError, lambda s, b, h, q, k: (s, s))
    message = score_error(TypeError, lambda s, b, h, q, k: None)
    assert "got NoneType; does it lack a `return`?" in message
    message = score_error(ValueError, lambda s, b, h, q, k: TABLE[h])
    assert "shape (64,)" in message and "scalars" in message
    message = score_error(TypeError, lambda s, b, h, q, k: q - k)
    assert "must return a float scalar, got int32" in message and ".astype(" in message
    assert "real part" in score_error(TypeError, lambda s, b, h, q, k: s * 1j)
    assert "Mask.function" in score_error(TypeError, lambda s, b, h, q, k: q < k)
    message = mask_error(TypeError, lambda b, h, q, k: q - k)
    assert "must return a bool scalar, got int32" in message and "!= 0" in message


def test_python_that_needs_numbers():
    host = np.asarray(TABLE)
    assert "jnp.asarray" in score_error(TypeError, lambda s, b, h, q, k: s + host[h, 0])
    assert "jnp.asarray" in score_error(TypeError, lambda s, b, h, q, k: s + [1.0, 2.0][h])
    assert "jnp instead of np" in score_error(TypeError, lambda s, b, h, q, k: s * np.exp(s))
    assert "float()" in score_error(TypeError, lambda s, b, h, q, k: s * float(q))
    assert "jnp.where" in mask_error(TypeError, lambda b, h, q, k: q > k and k > 3)
    assert "jnp.where" in score_error(TypeError, lambda s, b, h, q, k: s if q > k else 0.0)
    # range() asks for an index.
    assert "int()" in score_error(TypeError, lambda s, b, h, q, k: s + sum(range(q)))


class Banded:
    """A function that is an object, as those of Flax and Equinox are."""

    def __call__(self, s, b, h, q, k):  # the definition of an object
        return (s, s)


def test_errors_name_the_line():
    def branch(s, b, h, q, k):
        near = q - k
        if near > 3:  # the branch
            return s
        return -s

    def index(q):
        return int(q)  # the conversion

    def array(s, b, h, q, k):  # the definition of a jitted function
        row = TABLE[h] + s  # the row that is returned
        other = s * 2
        del other
        return row

    def captured(s, b, h, q, k):  # the definition that returns an array
        return TABLE

    def nothing(s, b, h, q, k):  # the definition that returns nothing
        del s

    rule = jax.custom_jvp(lambda x: x)
    rule.defjvp(lambda primals, tangents: (primals[0], jax.lax.lgamma(primals[0]) * tangents[0]))

    def underived(s, b, h, q, k):  # the definition without a derivative
        return rule(s)

    for function, kind, text in (
        (branch, TypeError, "# the branch"),
        (lambda s, b, h, q, k: s + index(q), TypeError, "# the conversion"),
        (array, ValueError, "# the row that is returned"),
        (jax.jit(array), ValueError, "# the definition of a jitted function"),
        (captured, ValueError, "# the definition that returns an array"),
        (functools.partial(captured), ValueError, "# the definition that returns an array"),
        (jax.jit(captured), ValueError, "# the definition that returns an array"),
        (nothing, TypeError, "# the definition that returns nothing"),
        (Banded(), TypeError, "# the definition of an object"),
        (underived, UnsupportedError, "# the definition without a derivative"),
    ):
        assert f"{line_of(text)}" in score_error(kind, function), text
    assert line_of("a mask of numbers") in mask_error(
        TypeError,
        lambda b, h, q, k: q - k,  # a mask of numbers
    )


@pytest.mark.quick
def test_primitives_without_scalar_form_are_named_with_their_line():
    def function(s, b, h, q, k):
        x = s + 1
        return jax.lax.lgamma(x)  # the line that is to be named

    message = score_error(UnsupportedError, function)
    assert "`lgamma`" in message and line_of("the line that is to be named") in message

    def nested(s, b, h, q, k):
        return s + jax.jit(lambda x: jnp.sort(jnp.stack([x, -x])))(s)[0]  # nested in a jit

    message = score_error(UnsupportedError, nested)
    assert "`sort`" in message and line_of("nested in a jit") in message


def test_loops_and_side_effects():
    def loop(s, b, h, q, k):
        return jax.lax.fori_loop(0, 17, lambda i, x: x * s, s)

    message = score_error(UnsupportedError, loop)
    assert "loops (`scan`) of more than 16 steps" in message and "write the steps out" in message

    def search(s, b, h, q, k):
        return jax.lax.while_loop(lambda x: x < q, lambda x: x * 2 + 1, k) + s

    assert "loops (`while`)" in score_error(UnsupportedError, search)

    def prints(b, h, q, k):
        jax.debug.print("{}", q)
        return q < k

    assert "side effects" in mask_error(UnsupportedError, prints)


def test_an_index_that_depends_on_the_score():
    def function(s, b, h, q, k):
        return s + TABLE[h, s.astype(jnp.int32)]

    assert "an index depends on the score" in score_error(UnsupportedError, function)


def test_arrays_that_are_too_large():
    message = score_error(UnsupportedError, lambda s, b, h, q, k: s + TABLE[h].sum())
    assert "64 elements" in message and "at most 16" in message
    message = score_error(UnsupportedError, lambda s, b, h, q, k: jnp.sum(s * jnp.arange(17)))
    assert "17 elements" in message
    message = score_error(UnsupportedError, lambda s, b, h, q, k: s + (TABLE * s)[h, q])
    assert "256 elements" in message and "index it" in message


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_dtypes_without_scalar_form(dtype):
    array = jnp.ones(3, dtype)
    message = score_error(
        UnsupportedError, lambda s, b, h, q, k: s + array[h].real.astype(jnp.float32)
    )
    assert dtype in message and "bool" in message


def test_keys_of_random_numbers():
    keys = jax.random.split(jax.random.key(0), 4)
    message = score_error(UnsupportedError, lambda s, b, h, q, k: s + jax.random.uniform(keys[h]))
    assert "key<" in message


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_mutable_arrays(where):
    """NumPy read a traced one forever, and raised an error about its bounds otherwise."""
    reference = jax.new_ref(jnp.arange(4.0))

    def written(s, b, h, q, k):
        reference[0] = 5.0
        return s

    for function in (
        lambda s, b, h, q, k: s + reference[h],
        lambda s, b, h, q, k: s + reference[...][h],
        written,
    ):
        with pytest.raises(UnsupportedError) as caught:
            where(lambda own=function: traced_score_function(own)[1])()
        message = str(caught.value)
        assert "mutable array" in message and f"{Path(__file__).name}:" in message
    assert reference[0] == 0
    mask_error(UnsupportedError, lambda b, h, q, k: reference[k] > 0)


def test_a_rule_that_reads_inside():
    @jax.custom_jvp
    def biased(x, h):
        return x + TABLE[h, 0]

    biased.defjvp(lambda primals, tangents: (biased(*primals), tangents[0]))
    message = score_error(UnsupportedError, lambda s, b, h, q, k: biased(s, h))
    assert "pass it to the function" in message


def test_a_derivative_without_scalar_form():
    @jax.custom_jvp
    def function(x):
        return x

    function.defjvp(
        lambda primals, tangents: (primals[0], jax.lax.lgamma(primals[0]) * tangents[0])
    )
    message = score_error(UnsupportedError, lambda s, b, h, q, k: function(s))
    assert "its derivative" in message and "`lgamma`" in message


def test_a_rule_that_is_not_linear_in_its_cotangent():
    """Kernels multiply one derivative by the cotangent of the score."""

    def with_rule(backward):
        @jax.custom_vjp
        def function(x):
            return 2 * x

        function.defvjp(lambda x: (2 * x, x), lambda x, cotangent: (backward(x, cotangent),))
        return lambda s, b, h, q, k: function(s) + function(TABLE[h, k])

    for backward in (
        lambda x, g: jnp.clip(g, -1, 1),
        lambda x, g: jnp.sign(g) * x,
        lambda x, g: g + 1,
        lambda x, g: g * g,
        lambda x, g: jnp.where(g > 0, g, 0),
    ):
        message = score_error(UnsupportedError, with_rule(backward))
        assert "is not linear in its cotangent" in message
        assert line_of("return lambda s, b, h, q, k: function(s)") in message
    for backward in (
        lambda x, g: jnp.where(x > 0, -3 * g, x * g / 4) - g,
        lambda x, g: jax.lax.cond(x > 0, lambda g: g * x, lambda g: 0 * g, g),
        lambda x, g: jnp.stack([g, x * g]) @ jnp.array([1.0, 2.0]),
        lambda x, g: g.astype(jnp.bfloat16).astype(jnp.float32),
        lambda x, g: jnp.zeros_like(x),
    ):
        traced_score_function(with_rule(backward))


@pytest.mark.parametrize("is_linear", [True, False])
def test_the_backward_of_a_high_level_primitive(is_linear):
    base: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # its name until JAX 0.11

    class Doubled(base):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return 2 * x

        def vjp_fwd(self, nonzero, x):
            return self(x), None

        def vjp_bwd_retval(self, residuals, cotangent):
            return (5 * cotangent if is_linear else jnp.clip(cotangent, -1, 1),)

    def function(s, b, h, q, k):
        return Doubled(jax.typeof(s))(s)

    if not is_linear:
        message = score_error(UnsupportedError, function)
        assert "is not linear in its cotangent" in message
        return
    program, _ = traced_score_function(function)
    value = functools.partial(evaluate, program, batch=0, head=0, query=0, key=0, arrays=[])
    assert value(1.5) == 3 and jax.grad(value)(1.5) == 5


def test_an_operation_without_a_derivative():
    one_way = Primitive("one_way")
    one_way.def_abstract_eval(lambda x: x)

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), one_way.bind(*tangents)))
    message = score_error(UnsupportedError, lambda s, b, h, q, k: doubled(s))
    assert "its derivative" in message and "one_way" in message and "stop_gradient" in message
    program, _ = traced_score_function(
        lambda s, b, h, q, k: doubled(jax.lax.stop_gradient(s)),
    )
    assert [value.op for value in program.values].count("mul") == 1


def test_errors_of_the_function_are_its_own():
    with pytest.raises(KeyError, match="missing"):
        traced_score_function(lambda s, b, h, q, k: {}["missing"])
