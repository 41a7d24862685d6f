"""The program of a traced function: values, reads, numbers, arrays, and equality."""

from __future__ import annotations

import functools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax.ad_checkpoint import checkpoint_name
from score_functions import MASK_FUNCTIONS, SCORE_FUNCTIONS, everywhere, integers

from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.operations import apply
from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.codegen.functions.operations import OPERATIONS, is_supported
from jax_memeff.codegen.functions.program import Value

TABLE = normal(1, 4, 9)
ENDS = jax.device_put(np.array([2, 3, 5, 8], np.int32))


def score_program(function):
    return traced_score_function(function)[0]


def mask_program(function):
    return traced_mask_function(function)[0]


def ops(program, result=0):
    """The operations of a program, without its inputs and numbers."""
    kept = {i for i in range(len(program.values)) if depends_on(program, result, i)}
    skipped = ("score", "batch", "head", "query", "key", "constant", "literal", "size")
    return [v.op for i, v in enumerate(program.values) if i in kept and v.op not in skipped]


def depends_on(program, result, index):
    pending = [program.results[result]]
    while pending:
        current = pending.pop()
        if current == index:
            return True
        pending += program.values[current].args
    return False


def constant(program, index):
    value = program.values[index]
    return value.param("value") if value.op == "constant" else None


@pytest.mark.quick("alibi", "t5_buckets")
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_function_written_twice_is_one_program(name):
    make, arrays = SCORE_FUNCTIONS[name]
    first, second = score_program(make(*arrays)), score_program(make(*arrays))
    assert first == second and hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first


def test_other_functions_are_other_programs():
    programs = [score_program(make(*arrays)) for make, arrays in SCORE_FUNCTIONS.values()]
    programs += [mask_program(make(*arrays)) for make, arrays in MASK_FUNCTIONS.values()]
    assert len({program.structure for program in programs}) == len(programs)


def test_the_order_of_statements_does_not_matter():
    def first(s, b, h, q, k):
        near = TABLE[h, 0]
        far = TABLE[h, 1]
        return s + near * far

    def second(s, b, h, q, k):
        far = TABLE[h, 1]
        near = TABLE[h, 0]
        return s + near * far

    assert score_program(first) == score_program(second)


@pytest.mark.parametrize("other", [2.5, 7.0, -3.0, -0.0])
def test_numbers_are_literals_outside_of_the_structure(other):
    def scaled(number):
        return score_program(lambda s, b, h, q, k: s * number + jnp.cos(number * s))

    assert scaled(0.25).structure == scaled(other).structure
    assert scaled(0.25).literals == (0.25,) and scaled(other).literals == (other,)
    assert math.copysign(1, scaled(other).literals[0]) == math.copysign(1, other)


@pytest.mark.parametrize("number", [0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
def test_special_numbers_are_constants(number):
    program = score_program(lambda s, b, h, q, k: jnp.where(q < k, s, number))
    assert program.literals == ()
    found = [v.param("value") for v in program.values if v.op == "constant"]
    assert any(n == number or (n != n and number != number) for n in found)


def test_divisors_and_shifts_are_constants():
    program = score_program(lambda s, b, h, q, k: s / 32 + (q // 5) + (k % 7) + (q << 3) + q * 11)
    constants = [v.param("value") for v in program.values if v.op == "constant"]
    assert sorted(constants) == [1 / 32, 3, 5, 7, 32]
    assert program.literals == (11,)


def test_lengths_are_sizes_and_new_lengths_are_the_same_structure():
    def learned(length):
        table = jnp.zeros((4, 2 * length))
        return score_program(lambda s, b, h, q, k: s + table[h, q - k + length])

    assert learned(5).structure == learned(64).structure
    assert learned(5).literals == (5,)
    square = jnp.zeros((6, 6)), jnp.zeros((6, 9))
    first, second = (score_program(lambda s, b, h, q, k, t=t: s + t[q - k, k - q]) for t in square)
    assert first == second
    sizes = {v.params for v in first.values if v.op == "size"}
    assert sizes == {(("array", 0), ("dim", 0)), (("array", 0), ("dim", 1))}


def test_a_number_that_equals_a_length_is_that_size():
    program = score_program(lambda s, b, h, q, k: s + TABLE[h, k] * jnp.where(q - k < 9, 2.0, 3.0))
    assert program.literals == (3.0, 2.0)
    assert Value("size", "int32", (), (("array", 0), ("dim", 1))) in program.values


def test_indices_that_are_never_negative_are_used_as_they_are():
    program = score_program(lambda s, b, h, q, k: s + TABLE[h, k] + TABLE[q // 2 % 4, 3])
    indices = [[program.values[i].op for i in program.values[r].args] for r in program.reads]
    assert indices == [["head", "key"], ["rem", "literal"]]


@pytest.mark.quick
def test_a_table_indexed_twice_is_one_read():
    def chained(s, b, h, q, k):
        return s + TABLE[h][q - k] + TABLE[:, q - k][h] + TABLE.T[q - k, h]

    program, arrays = traced_score_function(chained)
    # The transpose depends on no argument, so it is an array of its own.
    assert [array.shape for array in arrays] == [(4, 9), (9, 4)] and arrays[0] is TABLE
    assert len(program.reads) == 2


def test_what_depends_on_no_argument_is_computed_outside():
    def function(s, b, h, q, k):
        inside = jax.nn.softplus(TABLE).sum(0)
        _, ordered = jax.lax.scan(lambda sum, x: (sum + x, sum), 0.0, jnp.sort(inside))
        return s + jnp.asarray(ordered)[q] * jnp.linalg.norm(TABLE)

    program, arrays = traced_score_function(function)
    assert [array.shape for array in arrays] == [(9,), ()]
    assert ops(program) == ["read", "read", "mul", "add"]


def test_the_derivative_of_a_sum_is_one():
    for function in (
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k: s + TABLE[h, q] * (k - q),
        lambda s, b, h, q, k: TABLE[h, q - k] + s,
        lambda s, b, h, q, k: -(-s * 1 - 0),
    ):
        program = score_program(function)
        assert constant(program, program.results[1]) == 1.0
    program = score_program(lambda s, b, h, q, k: s + TABLE[h, 0] * (k - q))
    assert ops(program, 2) == ["sub", "convert_element_type"]
    program = score_program(lambda s, b, h, q, k: TABLE[h, 0])
    assert [constant(program, i) for i in program.results[1:]] == [0.0, 1.0]


def test_forward_and_derivative_share_values():
    program = score_program(lambda s, b, h, q, k: jnp.exp(s * TABLE[h, 0]))
    assert [value.op for value in program.values].count("exp") == 1
    assert ops(program, 1) == ["read", "mul", "exp", "mul"]


def test_dependence():
    program = score_program(
        lambda s, b, h, q, k: s + TABLE[h, q - k] + TABLE[0, TABLE.shape[1] - 1]
    )
    found = [program.dependence(read) for read in program.reads]
    assert found == [{"head", "query", "key"}, set()]
    assert program.dependence(program.results[0]) == {"score", "head", "query", "key"}


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint16, np.int32, np.uint32])
def test_integers_wrap_around_as_in_their_dtype(dtype):
    info = np.iinfo(dtype)
    array = jax.device_put(np.array([info.min, info.max, 3, 100], dtype))

    def function(b, h, q, k):
        x, y = array[q], array[k]
        bits = jax.lax.population_count(x) + jax.lax.clz(~y) + (x >> 1) + (y << 2)
        shifted = jax.lax.shift_right_logical(x, jnp.asarray(3, dtype))
        return (x * y - x + bits + shifted) % 7 < (x + y).astype(np.uint8)

    rows, columns = np.arange(4)[:, None], np.arange(4)
    program, arrays = traced_mask_function(function)
    # Passed as an argument, because XLA computes clz of negative constants wrongly.
    got = jax.jit(lambda *arrays: evaluate(program, None, 0, 0, rows, columns, arrays))(*arrays)
    want = jax.jit(lambda: everywhere(function, 0, 0, rows, columns))()
    np.testing.assert_array_equal(got, want)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds", None])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8, np.bool_])
def test_what_indices_out_of_range_read(mode, dtype):
    array = integers(1, 2, 4, 5, dtype=np.int32).astype(dtype)

    def function(s, b, h, q, k):
        read = array.at[q - 3, k - 2].get(mode=mode)
        row = array.at[q - 6].get(mode=mode)
        return s + read.astype(np.float32) + row[k % 5].astype(np.float32)

    if mode == "promise_in_bounds":  # JAX's result is not defined there
        rows, columns = np.arange(6, 7)[:, None], np.arange(2, 7)
    else:
        rows, columns = np.arange(12)[:, None], np.arange(12)
    program, arrays = traced_score_function(function)
    got = jax.jit(lambda: evaluate(program, 0.0, 0, 0, rows, columns, arrays))()
    want = jax.jit(lambda: everywhere(function, jnp.float32(0), 0, 0, rows, columns))()
    np.testing.assert_array_equal(got, want)
    modes = {program.values[read].param("mode") for read in program.reads}
    assert modes == {"fill" if mode == "fill" else "clip"}


def test_slices_of_any_kind_are_reads_or_choices():
    table = normal(3, 12, 6)

    def function(s, b, h, q, k):
        block = jax.lax.dynamic_slice(table, (q, k), (2, 3))  # clamped as a whole
        rows = table[jnp.stack([q, k, h]), 1]
        chosen = jnp.stack([s, s * 2, s * 3])[h]
        filled = rows.at[k - 1].get(mode="fill", fill_value=-7.0)
        padded = jnp.pad(block[0], (1, 1)).cumsum()[::-1]
        small = jnp.argmax(block) + jnp.argmin(rows)
        return jnp.where(small > 3, filled, chosen) + jnp.einsum("ij,j->", block, padded[1:4])

    program, arrays = traced_score_function(function)
    assert len(arrays) == 1
    rows, columns = np.arange(13)[:, None, None], np.arange(8)[:, None]
    heads = np.arange(3)
    got = jax.jit(lambda: evaluate(program, 0.5, 0, heads, rows, columns, arrays))()
    want = jax.jit(lambda: everywhere(function, jnp.float32(0.5), 0, heads, rows, columns))()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_derivative_rules_of_the_user_are_kept():
    @jax.custom_vjp
    def straight_through(x, y):
        return jnp.round(x) + y * 0

    straight_through.defvjp(lambda x, y: (straight_through(x, y), x), lambda x, g: (3 * g, g * x))

    @jax.custom_jvp
    def clipped(x):
        return jnp.minimum(x, 2)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 5 * tangents[0]))

    program, _ = traced_score_function(
        lambda s, b, h, q, k: straight_through(s, TABLE[h, 1]) + clipped(TABLE[h, 2])
    )

    def value(score, table):
        return evaluate(program, score, 0, 1, 0, 0, [table])

    assert value(1.4, TABLE) == 1 + min(float(TABLE[1, 2]), 2)
    by_score, by_table = jax.jit(jax.grad(value, (0, 1)))(1.4, TABLE)
    assert by_score == 3
    assert by_table[1, 1] == pytest.approx(1.4) and by_table[1, 2] == 5


def test_the_gradient_at_a_kink_is_that_of_jax():
    program = score_program(lambda s, b, h, q, k: jax.nn.relu(s) + jnp.maximum(s, 0))
    gradient = jax.grad(lambda s: evaluate(program, s, 0, 0, 0, 0, []))(0.0)
    assert gradient == jax.grad(lambda s: jax.nn.relu(s) + jnp.maximum(s, 0))(0.0) == 0.5


def test_python_numbers_and_constant_results():
    assert mask_program(lambda b, h, q, k: True).values == (
        Value("constant", "bool", (), (("value", True),)),
    )
    program = score_program(lambda s, b, h, q, k: 2.0)
    assert program.literals == (2.0,) and program.values[0].dtype == "float32"
    assert evaluate(program, np.zeros((2, 3)), 0, 0, 0, 0, []).tolist() == [[2.0] * 3] * 2


def test_numbers_in_lists_are_literals_or_arrays():
    program, arrays = traced_score_function(
        lambda s, b, h, q, k: s * jnp.array([0.5, 0.25])[1] + jnp.array([3.0, 4.0])[h]
    )
    assert program.literals == (0.25,)
    assert [array.tolist() for array in arrays] == [[3.0, 4.0]]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_of_device_code_is_one_of_lax(name):
    """Primitives that ``is_supported`` accepts are traced, so JAX must be able to evaluate them."""
    assert is_supported(name) == (name != "round_even")  # round, with a parameter
    if is_supported(name):
        (dtype, form), *_ = OPERATIONS[name].forms.items()
        operands = [np.array(1, dtype)] * len(set(re.findall(r"{\d}", form)))
        result = apply(Value(name, "float32", (), (("rounding_method", 1),)), operands)
        assert result.shape == ()


def cube_root(x):
    """Newton's method."""

    def solve(function, guess):
        return jax.lax.fori_loop(0, 12, lambda _, y: y - (y**3 - x) / (3 * y**2), guess)

    return jax.lax.custom_root(lambda y: y**3 - x, x, solve, lambda slope, y: y / slope(1.0))


def scanned(s, b, h, q, k):
    def step(total, x):
        return total * x + s, total

    last, totals = jax.lax.scan(step, 0.0, TABLE[:3, q] + s, reverse=True)
    return last + jnp.asarray(totals)[h]


JNP_FUNCTIONS = {
    "norm": lambda s, b, h, q, k: s - jnp.linalg.norm(TABLE[:3, q] - TABLE[1:, k] + 1),
    "nonzero": lambda s, b, h, q, k: s * jnp.nonzero(jnp.array([0, 3, 0, 4]), size=2)[0][k % 2],
    "select": lambda s, b, h, q, k: jnp.select([q < k, q == k], [s, 2 * s], 3 * s),
    "searchsorted": lambda s, b, h, q, k: (
        s * jnp.searchsorted(jnp.array([2, 5]), q, method="compare_all")
    ),
    "search": lambda s, b, h, q, k: jnp.where(
        jnp.searchsorted(ENDS, q, side="right") == jnp.searchsorted(ENDS, k, side="right"), s, -9.0
    ),
    "interpolation": lambda s, b, h, q, k: jnp.interp(q / 2, jnp.arange(4.0), TABLE[h, :4]),
    "digitize": lambda s, b, h, q, k: s * jnp.digitize(q + k, ENDS),
    "exponent": lambda s, b, h, q, k: jnp.ldexp(jnp.frexp(s)[0] * jnp.frexp(TABLE[h, k])[0], q - k),
    "root": lambda s, b, h, q, k: cube_root(jnp.abs(s) + 1) + cube_root(TABLE[h, k] ** 2 + 1),
    "loop": lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x * TABLE[h, i] + s, 1.0),
    "map": lambda s, b, h, q, k: jax.lax.map(lambda x: x * s, TABLE[:, q]).sum(),
    "polynomial": lambda s, b, h, q, k: jnp.polyval(TABLE[h, :4], s),
    "scan": scanned,
    "softmax": lambda s, b, h, q, k: s * jax.nn.softmax(TABLE[:, q])[h],
    "one_hot": lambda s, b, h, q, k: s * (jax.nn.one_hot(h, 4) @ TABLE[:, 0]),
    "isin": lambda s, b, h, q, k: jnp.where(jnp.isin(q, jnp.array([1, 3, 4])), s, 0.0),
    "vmap": lambda s, b, h, q, k: s + jax.vmap(lambda i: TABLE[h, i] * s)(jnp.arange(3) + q).sum(),
    "rows": lambda s, b, h, q, k: s + TABLE[[0, 1], q].sum() + TABLE[h, ::2][k // 2],
    "name": lambda s, b, h, q, k: checkpoint_name(s * 2, "x"),
    "divmod": lambda s, b, h, q, k: jnp.divmod(q, 3)[1] + jnp.divmod(s, 2.0)[0] + jnp.fmod(s, 3.0),
    "gelu": lambda s, b, h, q, k: jax.nn.gelu(s, approximate=False) + jax.nn.elu(s),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", JNP_FUNCTIONS)
def test_functions_of_jnp(name):
    """Their values and their derivatives by the score."""
    function = JNP_FUNCTIONS[name]
    program, arrays = traced_score_function(function)
    rows, columns = np.arange(6)[:, None], np.arange(9)

    @functools.partial(jax.jit, static_argnums=0)
    def with_derivative(function, scores):
        values, transposed = jax.vjp(function, scores)
        return values, *transposed(jnp.ones_like(values))

    scores = 2 * normal(30, 6, 9)
    got = with_derivative(lambda s: evaluate(program, s, 0, 2, rows, columns, arrays), scores)
    want = with_derivative(lambda s: everywhere(function, s, 0, 2, rows, columns), scores)
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=5e-6)
