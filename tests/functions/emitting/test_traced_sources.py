"""Functions that are traced, differentiated and compiled by g++ agree with JAX."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import compiled_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import BATCH_INDEX, POINT, Case, Evaluated
from random_programs import VMAP

from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_mask_function, traced_score_function

POINTS = 40
HEADS, LENGTH = 5, 12
INDICES = ("batch", "head", "query", "key")


class Function(NamedTuple):
    """A function of arrays, and then of a score and indices; the dims of the arrays; its
    tolerance.
    """

    make: Callable[..., Any]
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tolerance: float = 1e-6  # relative, of the precise forms


def t5_bucket(distance):
    """32 buckets: exact below 8, logarithmic up to 128 (Raffel et al., https://arxiv.org/abs/1910.10683)."""
    size = jnp.abs(distance)
    scaled = 8 + (jnp.log(jnp.maximum(size, 1) / 8) / jnp.log(128 / 8) * 8).astype("int32")
    return jnp.where(distance > 0, 16, 0) + jnp.where(size < 8, size, jnp.minimum(scaled, 15))


def hashed(query, key):
    return (query.astype("uint32") * jnp.uint32(2654435761) ^ key.astype("uint32")) >> 7


def of_small_integers(score, number, query, key):
    """Floats that saturate, an integer that wraps around, an arithmetic shift and a quotient."""
    saturated = (100 * score).astype("int8"), (number * 300).astype("uint8")
    wrapped = (query * 37).astype("uint8")
    shifted = jax.lax.shift_right_arithmetic(wrapped, jnp.uint8(2))
    quotient = jax.lax.div(-query.astype("uint32"), -(key + 1).astype("uint32"))
    return sum(x.astype("float32") for x in (*saturated, wrapped, shifted, quotient))


SCORES = {
    "small integers": Function(
        lambda numbers: lambda s, b, h, q, k: s + of_small_integers(s, numbers[q], q, k),
        (("float32", (LENGTH,)),),
    ),
    "alibi": Function(
        lambda slopes: lambda s, b, h, q, k: s + slopes[h] * (k - q), (("float32", (HEADS,)),)
    ),
    "table": Function(
        lambda table: lambda s, b, h, q, k: s + table[h, q - k + LENGTH],
        (("bfloat16", (HEADS, 2 * LENGTH)),),
    ),
    "cap": Function(lambda: lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)),
    "t5": Function(
        lambda table: lambda s, b, h, q, k: s + table[t5_bucket(k - q), h],
        (("float32", (32, HEADS)),),
    ),
    "distance": Function(
        lambda places, width: (
            lambda s, b, h, q, k: (
                s - jnp.sqrt(1e-3 + jnp.sum((places[q] - places[k]) ** 2)) / width[h]
            )
        ),
        (("float32", (LENGTH, 3)), ("float16", (HEADS,))),
    ),
    "gate": Function(
        lambda gate: lambda s, b, h, q, k: s * jax.nn.sigmoid(gate[b, k]) + jax.nn.relu(gate[b, q]),
        (("float32", (4, LENGTH)),),
    ),
    "kerple": Function(
        lambda p: lambda s, b, h, q, k: s - p[0, h] * jnp.log1p(p[1, h] ** 2 * jnp.abs(q - k)),
        (("float32", (2, HEADS)),),
    ),
    "inverse": Function(  # infinite on the diagonal, with a sign
        lambda: lambda s, b, h, q, k: jnp.exp(-1.0 / (q - k)) * s
    ),
    "power": Function(
        lambda p: (
            lambda s, b, h, q, k: (
                jnp.where(q >= k, s, -1e9)
                + jnp.exp(-p[h]) * (1.0 + jnp.abs(q - k)) ** (-(p[h] ** 2))
            )
        ),
        (("float32", (HEADS,)),),
    ),
}

MASKS = {
    "documents": Function(
        lambda documents: lambda b, h, q, k: (documents[q] == documents[k]) & (q - k < 4),
        (("int32", (LENGTH,)),),
    ),
    "prefix": Function(
        lambda prefix: lambda b, h, q, k: (q >= k) | (k < prefix[b]), (("int16", (4,)),)
    ),
    "dilated": Function(lambda: lambda b, h, q, k: ((q - k) % 3 == 0) | (k // 4 == q // 4)),
    "hashed": Function(lambda: lambda b, h, q, k: hashed(q, k) % 5 < 2),
}


def points() -> np.ndarray:
    random = np.random.default_rng(0)
    found = np.zeros(POINTS, POINT)
    found["score"] = random.normal(size=POINTS) * 20
    for name, size in (("batch", 4), ("head", HEADS), ("query", LENGTH), ("key", LENGTH)):
        found[name] = random.integers(0, size, POINTS)
    return found


def arrays_of(function: Function) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [
        random.integers(0, 9, (VMAP, *dims)).astype(dtype)
        if "int" in dtype
        else np.asarray(jnp.asarray(random.normal(size=(VMAP, *dims)) / 2, dtype))
        for dtype, dims in function.arrays
    ]


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[Case, Evaluated]]:
    """All functions, compiled as one library."""
    cases = {}
    for table, trace in ((SCORES, traced_score_function), (MASKS, traced_mask_function)):
        for name, function in table.items():
            arrays = arrays_of(function)
            own = [jnp.asarray(array[BATCH_INDEX]) for array in arrays]
            program, captured = trace(function.make(*own))
            order = [next(i for i, x in enumerate(own) if x is array) for array in captured]
            cases[name] = Case(program, True, [arrays[i] for i in order])
    evaluated = compiled_programs.evaluate(list(cases.values()), points())
    return {name: (cases[name], found) for name, found in zip(cases, evaluated, strict=True)}


def in_jax(function: Function) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The values at all points, and the derivatives of their sum by scores and arrays, in
    float64.
    """
    with jax.enable_x64(True):
        arrays = [jnp.asarray(array[BATCH_INDEX].astype("f8")) for array in arrays_of(function)]
        given = points()
        indices = [jnp.asarray(given[name]) for name in INDICES]

        def total(scores, arrays):
            values = jax.vmap(function.make(*arrays))(scores, *indices)
            return values.sum(), values

        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
        (_, values), (scores, of_arrays) = run(jnp.asarray(given["score"], "f8"), arrays)
        return np.asarray(values), np.asarray(scores), [np.asarray(x) for x in of_arrays]


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", SCORES)
def test_score_functions_and_their_derivatives(compiled, name):
    function = SCORES[name]
    case, found = compiled[name]
    results = found.results.view("f4")
    values, scores, of_arrays = in_jax(function)
    close(results[:, 0], values, function.tolerance)
    close(results[:, 1], scores, function.tolerance)
    sums = [np.zeros(array[0].size) for array in case.arrays]
    for number, read in enumerate(case.program.float_reads):
        target = sums[case.program.values[read].param("array")]
        np.add.at(target, found.offsets[:, number], results[:, 2 + number].astype("f8"))
    assert len(sums) == len(of_arrays)
    for got, want in zip(sums, of_arrays, strict=True):
        close(got.reshape(want.shape), want, function.tolerance)


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions(compiled, name):
    case, found = compiled[name]
    own = [jnp.asarray(array[BATCH_INDEX]) for array in case.arrays]
    given = points()
    want = jax.vmap(MASKS[name].make(*own))(*(given[name] for name in INDICES))
    np.testing.assert_array_equal(found.results[:, 0].astype(bool), want)
    assert 0 < np.count_nonzero(want) < POINTS


SIDE = 130
WEIGHTS = np.random.default_rng(0).uniform(0.5, 2, SIDE).astype(np.float32)

IN_NUMPY = SimpleNamespace(
    floor=np.floor,
    fmod=np.fmod,
    sqrt=np.sqrt,
    square=np.square,
    # Products from the first power of two on, as lax.integer_pow multiplies them.
    power_3=lambda x: x * (x * x),
    power_5=lambda x: x * ((x * x) * (x * x)),
    power_minus_2=lambda x: 1 / (x * x),
)
IN_JAX = SimpleNamespace(
    floor=jnp.floor,
    fmod=jnp.fmod,
    sqrt=jnp.sqrt,
    square=jnp.square,
    power_3=lambda x: x**3,
    power_5=lambda x: x**5,
    power_minus_2=lambda x: x**-2,
)

# Functions whose results XLA would round differently than IEEE 754 does. They take a namespace of
# functions, the float32 positions of query and key, and the float32 weights of both.
ROUNDED: dict[str, Callable[[Any, Any, Any, Any, Any], Any]] = {
    "quotient": lambda xp, q, k, a, b: b / a,
    "quotient of positions": lambda xp, q, k, a, b: q / (k + 1),
    "quotient by a number": lambda xp, q, k, a, b: (q - k) / 49,
    "floor of a quotient": lambda xp, q, k, a, b: xp.floor((q - k) / 0.7),
    "quotient of quotients": lambda xp, q, k, a, b: (a / b) / (b / (q + 1)),
    "quotient by a quotient": lambda xp, q, k, a, b: a / (b / (k + 3)),
    "quotient by two numbers": lambda xp, q, k, a, b: a * b / 3.3 / 0.7,
    "quotient by large numbers": lambda xp, q, k, a, b: (a * 1e38) / (b * 1e38),
    "quotient by a root": lambda xp, q, k, a, b: b / xp.sqrt(a),
    "product of roots": lambda xp, q, k, a, b: xp.sqrt(a) * xp.sqrt(a) + 0 * k,
    "product with numbers": lambda xp, q, k, a, b: a * b * 0.1 * 0.3,
    "sum with numbers": lambda xp, q, k, a, b: a * b + 0.1 + 0.3,
    "difference with numbers": lambda xp, q, k, a, b: a - b - 0.1 - 0.3,
    "product in a sum": lambda xp, q, k, a, b: a * b + b * q,
    "product in a difference": lambda xp, q, k, a, b: 0.3 * q - 0.1 * k,
    "negative product in a sum": lambda xp, q, k, a, b: -(a * b) + b,
    "common factor": lambda xp, q, k, a, b: a * (q + k) + b * (q + k),
    "square in a sum": lambda xp, q, k, a, b: xp.square(a - b) - a,
    "power in a sum": lambda xp, q, k, a, b: xp.power_3(a) + xp.power_5(b),
    "negative power": lambda xp, q, k, a, b: b * xp.power_minus_2(a),
    "remainder": lambda xp, q, k, a, b: xp.fmod(q * b, a),
}


def rounded_in_numpy(name: str) -> np.ndarray:
    """The function of all pairs in NumPy: float32[SIDE, SIDE]."""
    positions = np.arange(SIDE, dtype=np.float32)
    pairs = positions[:, None], positions[None, :], WEIGHTS[:, None], WEIGHTS[None, :]
    found = ROUNDED[name](IN_NUMPY, *pairs)
    assert found.dtype == np.float32
    return np.broadcast_to(found, (SIDE, SIDE))


def is_rounded(name: str, weights: Any, table: Any) -> Callable[..., Any]:
    """A mask function: whether the function has the bits of ``rounded_in_numpy`` for a pair.

    Args:
        weights: ``WEIGHTS``, as an array of JAX.
        table: ``rounded_in_numpy(name)``, as an array of JAX.
    """

    def holds(b: Any, h: Any, q: Any, k: Any) -> Any:
        positions = q.astype(jnp.float32), k.astype(jnp.float32)
        return ROUNDED[name](IN_JAX, *positions, weights[q], weights[k]) == table[q, k]

    return holds


# The tests' programs are compiled without most optimizations, and these are the subject here.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def is_rounded_everywhere(name: str) -> bool:
    """Whether a compiled program of JAX rounds the function of all pairs as NumPy does."""

    def mask(weights: Any, table: Any) -> jax.Array:
        program, arrays = traced_mask_function(is_rounded(name, weights, table))
        places = jnp.arange(SIDE)
        return evaluate(program, None, 0, 0, places[:, None], places[None, :], arrays)

    arrays = jax.device_put(WEIGHTS), jax.device_put(rounded_in_numpy(name))
    return bool(np.asarray(jax.jit(mask).lower(*arrays).compile(OPTIMIZED)(*arrays)).all())


@pytest.mark.rotating(3)
@pytest.mark.quick("quotient", "square in a sum")
@pytest.mark.parametrize("name", ROUNDED)
def test_xla_rounds_as_ieee_754_says(name):
    assert is_rounded_everywhere(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUNDED)
def test_xla_rounds_as_ieee_754_says_on_a_gpu(name):
    assert is_rounded_everywhere(name)


def test_kernels_round_as_ieee_754_says():
    cases = []
    for name in ROUNDED:
        table = jnp.asarray(rounded_in_numpy(name))
        program, arrays = traced_mask_function(is_rounded(name, jnp.asarray(WEIGHTS), table))
        own = [np.broadcast_to(array, (VMAP, *array.shape)).copy() for array in arrays]
        cases.append(Case(program, False, own))
    given = np.zeros(1000, POINT)
    for name in ("query", "key"):
        given[name] = np.random.default_rng(len(name)).integers(0, SIDE, 1000)
    evaluated = compiled_programs.evaluate(cases, given)
    wrong = {
        name: 1000 - np.count_nonzero(found.results[:, 0])
        for name, found in zip(ROUNDED, evaluated, strict=True)
    }
    assert not any(wrong.values()), wrong
