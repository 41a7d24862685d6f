"""Programs of random functions compute the functions and their derivatives."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from score_functions import BATCH, COLUMNS, HEADS, ROWS, everywhere, integers, positions

from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_score_function

SHAPE = (BATCH, HEADS, ROWS, COLUMNS)
TABLES = {
    "distance": normal(1, HEADS, 21),
    "row": normal(2, ROWS),
    "pair": normal(3, 9, 11),
    "scalar": normal(4),
    "vector": normal(5, 3),
}
INTEGERS = {"bucket": integers(6, 9, 20), "small": integers(7, 100, 12, dtype=np.int8)}
MODES = ("clip", "fill", None)

UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "logistic": jax.nn.sigmoid,
    "square": lambda x: x * x / (1 + x * x),
    "softplus": jax.nn.softplus,
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "root": lambda x: jnp.sqrt(x * x + 0.5),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log": lambda x: jnp.log1p(x * x),
    "erf": jax.scipy.special.erf,
    "power": lambda x: jnp.clip(x, -2, 2) ** 3,
    "real_power": lambda x: (jnp.abs(x) + 0.1) ** 1.5,
    "atan": jnp.arctan,
    "jit": jax.jit(lambda x: x * 0.5 + 1),
    "stop": lambda x: jax.lax.stop_gradient(x) * 0.1 + x,
}
INTEGER = {
    "sub": lambda x, y: x - y,
    "add": lambda x, y: x + y,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "mul": lambda x, y: x * y,
    "xor": lambda x, y: x ^ (y & 5),
    "div": lambda x, y: x // 3 + y // 4,
    "mod": lambda x, y: x % 5 - y % 3,
    "shift": lambda x, y: (x << 1) + (y >> 1),
    "where": lambda x, y: jnp.where(x < y, x, 2 * y),
}


class Drawn:
    """A random function that draws the same numbers in each call."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, tables, score, batch, head, query, key):
        draw = random.Random(self.seed)
        floats, ints = [score, score * 0.3], [batch, head, query, key]
        for _ in range(3):
            op = INTEGER[draw.choice(sorted(INTEGER))]
            ints.append(op(draw.choice(ints), draw.choice(ints)))
        ints.append(INTEGERS["bucket"][draw.choice(ints) % 20])
        ints.append(INTEGERS["small"].at[draw.choice(ints)].get(mode="clip").astype(jnp.int32) % 7)
        for _ in range(8):
            floats.append(self.step(draw, tables, floats, ints))
        return sum(floats[-3:]) + 0.1 * score

    def step(self, draw, tables, floats, ints):
        x, y = draw.choice(floats), draw.choice(floats)
        i, j = draw.choice(ints), draw.choice(ints)
        kind = draw.randrange(7)
        if kind <= 1:
            return UNARY[draw.choice(sorted(UNARY))](x)
        if kind == 2:
            return draw.choice([x * 0.5 + y, x - y * 0.25, jnp.maximum(x, y), x / (1 + y * y)])
        if kind == 3:
            return jnp.where(i < j, x, y * draw.choice([0.0, 1.0, 0.7]))
        if kind == 4:
            return x + 0.01 * jnp.clip(i, -50, 50) * y
        if kind == 5:
            return self.read(draw, tables, i, j)
        stacked = jnp.stack([x, y, self.read(draw, tables, i, j)])
        return draw.choice([stacked.sum(), stacked @ tables["vector"], stacked[i % 3]])

    def read(self, draw, tables, i, j):
        mode = draw.choice(MODES)
        kind = draw.randrange(5)
        if kind == 0:
            return tables["distance"][i % HEADS, j]
        if kind == 1:  # fill gives NaN beyond the ends, so indices must be in bounds
            return tables["row"].at[i].get(mode=mode, fill_value=0.25)
        if kind == 2:
            return tables["pair"][i % 9][j]
        if kind == 3:
            return jax.lax.dynamic_slice(tables["pair"], (i, j), (2, 2)).sum()
        return tables["scalar"] * tables["vector"][i % 3]


@pytest.mark.rotating(5)
@pytest.mark.parametrize("seed", range(24))
def test_random_functions(seed, request, assert_close):
    dtype = "float64" if seed % 2 else "float32"
    if dtype == "float64":
        request.getfixturevalue("x64")
    function = Drawn(seed)
    scores = (2 * normal(50 + seed, *SHAPE)).astype(dtype)
    cotangent = normal(150 + seed, *SHAPE).astype(dtype)
    tables = {name: table.astype(dtype) for name, table in TABLES.items()}

    def gradients(attend):
        def loss(tables, scores):
            out = attend(tables, scores)
            return jnp.vdot(out, cotangent), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(tables, scores)

    def traced(tables, scores):
        def closed(*arguments):
            return function(tables, *arguments)

        program, arrays = traced_score_function(closed, dtype)
        return evaluate(program, scores, *positions(), arrays)

    def direct(tables, scores):
        return everywhere(lambda *arguments: function(tables, *arguments), scores, *positions())

    got, want = gradients(traced), gradients(direct)
    assert np.isfinite(want[1]).all()
    assert_close(got, want, 5e-6 if dtype == "float32" else 1e-13)
