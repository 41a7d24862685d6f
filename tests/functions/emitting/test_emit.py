"""The device code of programs: its dependencies, where it evaluates values, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import example_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_programs import ALIBI, DOCUMENTS, GOLDEN, SOURCES, TABLE, constant
from random_programs import programs

from jax_memeff._functions.trace import traced_mask_function, traced_score_function
from jax_memeff.codegen.functions import emit, operations
from jax_memeff.codegen.functions.nodes import MOST_DIMS
from jax_memeff.codegen.functions.operations import OPERATIONS
from jax_memeff.codegen.functions.program import CapturedType, Program, Value
from jax_memeff.codegen.functions.regions import block_sizes, constant_along_diagonals

pytestmark = pytest.mark.quick

BUCKETS = jnp.asarray(np.arange(16, dtype=np.int32) // 2)
SCORE, QUERY = Value("score", "float32"), Value("query", "int32")
HEAD, KEY = Value("head", "int32"), Value("key", "int32")


def value_of(*values: Value, arrays=(), precise: bool = False) -> str:
    """The body of value() of a program whose result is its last value."""
    program = Program(values, (len(values) - 1,), tuple(arrays))
    return body(emit.source(program, "F", precise=precise), "value")


def body(source: str, function: str) -> str:
    """The statements of a member function."""
    found = re.search(rf" {function}\([^{{]*\) {{\n(.*?)^  }}", source, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_the_known_ones(name):
    """``python tests/functions/emitting/example_programs.py`` rewrites them."""
    assert example_programs.source(name) == (GOLDEN / name).read_text()


def test_only_the_structure_is_in_the_source():
    other = TABLE._replace(literals=(30.0, 4095))
    assert other != TABLE and other.structure == TABLE.structure
    sources = [emit.source(program, "F", precise=False) for program in (TABLE, other)]
    assert sources[0] == sources[1]
    assert "4095" not in sources[1] and "30.0" not in sources[1]


def test_values_are_kept_at_the_level_of_their_arguments():
    source = emit.source(DOCUMENTS, "F", precise=True)
    assert [
        body(source, f"of_{level}").count("load<int>") for level in ("head", "row", "column")
    ] == [*(1, 1, 1)]
    assert "load" not in body(source, "value") and "clamp_index" not in body(source, "value")
    assert "kUsesScore = false;" in source and "kDependsOnBatch = true;" in source


def test_cheap_values_take_no_registers():
    shifted = value_of(
        SCORE,
        QUERY,
        constant("int32", 3),
        Value("add", "int32", (1, 2)),
        KEY,
        Value("lt", "bool", (4, 3)),
        constant("float32", 0.0),
        Value("select_n", "float32", (5, 0, 6)),
    )
    assert "wrapping_add(query, 3)" in shifted
    costly = value_of(
        SCORE,
        QUERY,
        Value("convert_element_type", "float32", (1,)),
        Value("tanh", "float32", (2,)),
        Value("add", "float32", (0, 3)),
    )
    assert "tanh" not in costly and "of_row.v" in costly


def test_a_read_of_row_and_column_keeps_the_address_of_the_row():
    read = Value("read", "float32", (1, 2), (("array", 0), ("mode", "clip")))
    program = Program(
        (SCORE, QUERY, KEY, read, Value("add", "float32", (0, 3))),
        (4,),
        (CapturedType("float32", 2),),
    )
    source = emit.source(program, "F", precise=True)
    assert "stride<0, 0>()" in body(source, "of_row") and "stride" not in body(source, "value")
    assert "clamp_index(key" in body(source, "value")


def test_reads_per_element_can_be_staged():
    """A kernel may have staged them for a whole tile. Values of a head stay in registers."""
    source = emit.source(TABLE, "F", precise=True)
    assert "arrays.template read<0>(v" in body(source, "value")
    assert "read<0>" in body(source, "read_values")
    assert "read<0>" not in emit.source(ALIBI, "F", precise=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda q, k: (k - q).astype("float32"), ["arrays.difference(key, query)"]),
        (lambda q, k: 1.0 * (q - k), ["arrays.difference(key, query)", "0.0f - v"]),
        (lambda q, k: abs(q - k) * 0.5, ["arrays.difference(key, query)", "fabsf(v"]),
        (lambda q, k: jnp.floor((k - q) * 0.5), ["float(v"]),  # exact before a jump
        (lambda q, k: 1.0 * (k - 2 * q), ["float(v"]),
    ],
)
def test_kernels_can_provide_the_difference_of_key_and_query(function, expected):
    program, _ = traced_score_function(lambda s, b, h, q, k: s + function(q, k))
    text = body(emit.source(program, "F", precise=False), "value")
    assert all(part in text for part in expected)
    assert ("arrays.difference" in text) == ("arrays.difference" in expected[0])


_RATE = jnp.ones(4)
_PLUS = "arrays.plus_scaled_difference(score, "


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: s + _RATE[h] * (k - q), [_PLUS, "key, query)"]),
        (lambda s, b, h, q, k: s - (k - q) * _RATE[h], [_PLUS + "v", "= -of_head."]),
        (lambda s, b, h, q, k: s - 0.5 * (q - k), [_PLUS]),
        (lambda s, b, h, q, k: s + _RATE[h] * (k - q) / 3 * 0.1, [_PLUS]),
        (lambda s, b, h, q, k: _RATE[h] * (k - q) - s, ["arrays.scaled_difference(", "- score"]),
        (lambda s, b, h, q, k: s + _RATE[q] * (k - q), ["arrays.difference("]),  # of a row
    ],
)
def test_kernels_can_add_a_multiple_of_the_difference(function, expected):
    program, _ = traced_score_function(function)
    text = body(emit.source(program, "F", precise=False), "value")
    assert all(part in text for part in expected), text
    assert "scaled_difference" in text or expected[0] == "arrays.difference("
    assert "scaled_difference" not in emit.source(program, "F", precise=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: s + _RATE[h] * (k - q), True),
        (lambda s, b, h, q, k: s - (q - k) / 32 * _RATE[b], True),
        (lambda s, b, h, q, k: s + 0.5 * (k - q), True),
        (lambda s, b, h, q, k: 2 * s + _RATE[h] * (k - q), False),
        (lambda s, b, h, q, k: s + _RATE[h] * (k - q) + 1, False),
        (lambda s, b, h, q, k: s - _RATE[h] * abs(k - q), False),
        (lambda s, b, h, q, k: s + _RATE[k] * (k - q), False),
        (lambda s, b, h, q, k: s + s * (k - q), False),
    ],
)
def test_a_linear_function_has_a_slope(function, expected):
    program, _ = traced_score_function(function)
    source = emit.source(program, "F", precise=False)
    assert ("static float slope(Arrays const& arrays, OfHead const& of_head)" in source) == expected
    assert emit.is_linear(program, precise=False) == expected
    assert not emit.is_linear(program, precise=True)


def test_what_an_operation_with_jumps_depends_on_is_exact():
    """A rounding error before a floor() would become an error of 1 after it, and kernels that fuse
    operations differently would disagree.
    """
    scaled = (
        SCORE,
        Value("tanh", "float32", (0,)),
        constant("float32", 49.0),
        Value("mul", "float32", (1, 2)),
        Value("add", "float32", (3, 0)),
    )
    smooth = value_of(*scaled)
    assert "tanh_approx(score)" in smooth and "__fmul_rn" not in smooth
    jumping = value_of(*scaled, Value("floor", "float32", (4,)))
    assert "tanhf(score)" in jumping
    assert "__fmul_rn(v1, 49.0f)" in jumping and "__fadd_rn(v3, score)" in jumping


def test_jumps_of_derivatives_need_no_exact_values():
    program, _ = traced_score_function(lambda s, b, h, q, k: jnp.abs(jnp.tanh(s)))
    source = emit.source(program, "F", precise=False)
    assert "tanh_approx" in body(source, "value") and "tanhf" not in source
    assert ">= 0.0f" in body(source, "derivative")
    program, _ = traced_score_function(lambda s, b, h, q, k: jnp.sign(jnp.tanh(s)))
    assert "tanhf" in body(emit.source(program, "F", precise=False), "value")


@pytest.mark.parametrize(
    ("divisor", "precise", "jumps", "expected"),
    [
        (8.0, True, True, "score * 0x1p-3f"),
        (-0.5, True, False, "score * (-0x1p+1f)"),
        (49.0, True, False, "score / 49.0f"),
        (49.0, False, True, "score / 49.0f"),
        (49.0, False, False, "score * 0x1.4e5e0ap-6f"),
        (0.0, True, False, "score / 0.0f"),
        (2.0**-127, True, False, "score / 0x1p-127f"),
        (2.0**127, True, False, "score / 0x1p+127f"),
    ],
)
def test_divisions_by_constants(divisor, precise, jumps, expected):
    values = [SCORE, constant("float32", divisor), Value("div", "float32", (0, 1))]
    if jumps:
        values.append(Value("floor", "float32", (2,)))
    assert f"= {expected};" in value_of(*values, precise=precise)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (lambda q, k: q - k + 7, True),
        (lambda q, k: q + 3 - k, True),
        (lambda q, k: (k + 1) + -1 * q, True),
        (lambda q, k: jnp.clip(jnp.abs(k - q) // 4, 0, 9), True),
        (lambda q, k: (q.astype("uint32") - k.astype("uint32")).astype("int32"), True),
        (lambda q, k: BUCKETS[q - k], True),
        (lambda q, k: 3, True),
        (lambda q, k: q, False),
        (lambda q, k: q + k, False),
        (lambda q, k: 2 * q - k, False),
        (lambda q, k: q % 8 - k % 8, False),
        (lambda q, k: BUCKETS[q] - BUCKETS[k], False),
        (lambda q, k: (q * 0.5).astype("int32") - (k * 0.5).astype("int32"), False),
        (lambda q, k: q * q - k * q, False),
    ],
)
def test_reads_that_are_constant_along_diagonals(index, expected):
    table = jnp.zeros((2, 16))
    program, _ = traced_score_function(lambda s, b, h, q, k: s + table[h, index(q, k)])
    constant = constant_along_diagonals(program)
    (read,) = program.float_reads
    assert constant[read] == expected
    assert not constant[program.results[0]]


@pytest.mark.parametrize(
    ("bits", "sizes"), [(6, {64}), (30, {2**30}), (31, set()), (2**31 - 1, set()), (-1, set())]
)
def test_a_shift_divides_into_blocks(bits, sizes):
    program, _ = traced_mask_function(lambda b, h, q, k: q >> 2 == k >> bits)
    assert block_sizes(program, "key") == sizes


def test_derivatives_that_are_1_are_known():
    assert "kConstantDerivative = true;" in emit.source(ALIBI, "F", precise=True)
    assert "kConstantDerivative = false;" in emit.source(TABLE, "F", precise=True)
    assert "Derivative" not in emit.source(DOCUMENTS, "F", precise=True)


@jax.custom_jvp
def with_slope(x, z):
    """x, with a derivative that is NaN where the exponential overflows."""
    return x


@with_slope.defjvp
def _slope(primals, tangents):
    x, z = primals
    return x, jnp.where(z < 0, 0 * jnp.exp(z * z), 1) * tangents[0]


@pytest.mark.parametrize(
    ("term", "finite"),
    [
        (lambda x, q, k: x, True),
        (lambda x, q, k: x * (q - k) / 32, True),
        (lambda x, q, k: jnp.where(q < k, x * abs(q - k), -x), True),
        (lambda x, q, k: x / (q - k), False),
        (lambda x, q, k: x * jnp.sqrt((q - k).astype("float32")), False),
        (lambda x, q, k: x * x, False),
        (lambda x, q, k: with_slope(x, (q - k).astype("float32")), False),
        (lambda x, q, k: x * q.astype("float32") ** 4, False),
    ],
)
def test_finite_derivatives_are_known(term, finite):
    slopes = jnp.ones(4)
    program, _ = traced_score_function(lambda s, b, h, q, k: s + term(slopes[h], q, k))
    fact = f"kReadDerivativesAreFinite[] = {{{str(finite).lower()}}};"
    assert fact in emit.source(program, "F", precise=True)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Value("lgamma", "float32", (0,)), "'lgamma' is unknown"),
        (Value("tanh", "float64", (0,)), "'float64' is unknown"),
        (Value("add", "bool", (1, 1)), "'bool' is unknown"),
        (Value("round", "float32", (0,)), "'rounding_method' is unknown"),
        (Value("constant", "int32", (), (("value", 2**31),)), "32 bits, got 2147483648"),
        (Value("read", "float32", (), (("array", 0), ("mode", "wrap"))), "one index for each of 1"),
    ],
)
def test_programs_without_device_code_are_refused(value, reason):
    flag = constant("bool", True)
    with pytest.raises(ValueError, match=reason):
        value_of(SCORE, flag, value, arrays=[CapturedType("float32", 1)])


def test_captured_arrays_fit_into_their_view():
    view = (Path(__file__).parents[3] / "ffi/include/memeff/params.h").read_text()
    assert f"kMostDims = {MOST_DIMS + 1};" in view
    read = Value("read", "float32", (0,) * 6, (("array", 0), ("mode", "clip")))
    with pytest.raises(ValueError, match="at most 5 dims, got 6: join dims"):
        value_of(QUERY, read, arrays=[CapturedType("float32", 6)])


@pytest.mark.parametrize(
    "value",
    [
        Value("constant", "float32", (), (("value", "0; evil()"),)),
        Value("constant", "int32", (), (("value", "0; evil()"),)),
        Value("literal", "float32", (), (("index", "0>() + evil<0"),)),
        Value("size", "int32", (), (("array", "0>() + evil<0"), ("dim", 0))),
        Value("read", "float32", (0,), (("array", 0), ("fill_value", "evil()"), ("mode", "fill"))),
        Value("evil()", "float32", (0,)),
    ],
)
def test_no_text_of_a_program_reaches_the_source(value):
    with pytest.raises(ValueError):
        value_of(QUERY, value, arrays=[CapturedType("float32", 1)])


def test_sources_consist_of_known_words():
    """Sources of random programs contain only words of the tables, numbered variables and
    numbers.
    """
    forms = [form for operation in OPERATIONS.values() for form in operation.forms.values()]
    forms += [form for o in OPERATIONS.values() for form in (o.exact, o.approximate)]
    forms += [*operations.CONVERSIONS.values(), *operations.BITCASTS.values()]
    files = [example_programs.source(name) for name in SOURCES] + [Path(emit.__file__).read_text()]
    files += [
        (Path(emit.__file__).parent / f"{name}.py").read_text() for name in ("nodes", "ranges")
    ]
    word, number = re.compile(r"\b[A-Za-z_]\w*"), re.compile(r"\b0x[0-9a-f.]+p[+-]\d+f\b")
    known = set(word.findall(" ".join(forms + files)))
    for program in programs(200, seed=1):
        source = number.sub("", emit.source(program, "F", precise=False))
        words = set(word.findall(source))
        variables = {found for found in words if re.fullmatch(r"(v|r|read)\d+", found)}
        assert words - variables - {"F"} <= known


def test_approximations_are_documented():
    page = (Path(__file__).parents[3] / "docs/guide/precision.md").read_text()
    for name, operation in OPERATIONS.items():
        if operation.approximate:
            assert f"| `{name}` | {operation.bound} |" in page
