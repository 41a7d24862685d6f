"""Functions of scores and masks in the kernels: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import functions_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions_case import Case
from test_score_mod import value_and_gradients

import jax_memeff
from jax_memeff import Mask
from jax_memeff._cuda import functions

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""The allowed relative error in the Frobenius norm."""

B, T, S, N, K = 2, 150, 170, 4, 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A call of several tiles with the entry ``functions`` of ``FUNCTIONS``."""

    functions: str
    head_dim: int = 64
    dtype: str = "bfloat16"
    deterministic: bool = False

    def __str__(self) -> str:
        words = [self.functions, f"H{self.head_dim}", self.dtype]
        return "-".join([*words, *(["deterministic"] if self.deterministic else [])])

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(11)
        shapes: dict[str, tuple[int, ...]] = {"query": (B, T, N, self.head_dim)}
        shapes |= dict.fromkeys(("key", "value"), (B, S, K, self.head_dim))
        drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        own = {name: rng.standard_normal(shape) for name, shape in _SHAPES.items()}
        found = {name: x.astype(jnp.dtype(self.dtype)) for name, x in drawn.items()}
        names = FUNCTIONS[self.functions][0]
        return found | {name: own[name].astype(np.float32) for name in names}

    def ours(self, arrays: Any) -> tuple[jax.Array, jax.Array]:
        _, score, mask = FUNCTIONS[self.functions]
        return jax_memeff.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score_mod=None if score is None else score(arrays),
            mask=mask(),
            return_residual=True,
            deterministic_backward=self.deterministic,
        )

    def defined(self, arrays: Any) -> tuple[jax.Array, jax.Array]:
        """Output and logsumexp by their definition, in the dtype of the arrays."""
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        key, value = (jnp.repeat(x, N // K, 2) for x in (key, value))
        _, score, mask = FUNCTIONS[self.functions]
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * self.head_dim**-0.5
        if score is not None:
            index = jnp.meshgrid(*map(jnp.arange, scores.shape), indexing="ij")
            flat = (x.ravel() for x in (scores, *index))
            scores = jax.vmap(score(arrays))(*flat).reshape(scores.shape)
        scores = jnp.where(mask().as_array(*scores.shape), scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse[..., None]), value)
        return out, lse.swapaxes(1, 2)


_SHAPES = {
    "slopes": (N,),
    "table": (N, T + S),
    "rows": (B, T),
    "columns": (S,),
    "gain": (N,),
    "buckets": (16, N),
    "pairs": (3, 3),
}
_LISTS = np.random.default_rng(12).integers([0, -1], [3, 4], (1, N, 3, 2))
_COUNTS = np.random.default_rng(13).integers(1, 4, (1, N, 3))
_SMALL_LISTS = np.array([[1, 0], [2, 0], [0, 1], [1, 3], [4, 0], [5, -1]])
DOCUMENTS = np.arange(T + S) // 70
FUNCTIONS: dict[str, tuple[tuple[str, ...], Any, Any]] = {
    "alibi": (
        ("slopes",),
        lambda a: lambda s, b, h, q, k: s + a["slopes"][h] * (k - q) / 32,
        Mask.causal,
    ),
    "table": (
        ("table", "rows", "columns"),
        lambda a: (
            lambda s, b, h, q, k: s + a["table"][h, q - k + S] + a["rows"][b, q] * a["columns"][k]
        ),
        lambda: Mask.window(60, 20),
    ),
    "gain": (
        ("gain",),
        lambda a: lambda s, b, h, q, k: 3 * jnp.tanh(s * a["gain"][h] / 3),
        lambda: Mask.function(lambda b, h, q, k: (q - k) % 3 <= h),
    ),
    # The gradient is 0 but for that of the logsumexp, and that of a distance is a small difference.
    "rows": (
        ("gain", "slopes"),
        lambda a: (
            lambda s, b, h, q, k: (
                s + a["gain"][h] - jnp.log1p(jnp.exp(a["slopes"][h])) * jnp.minimum(abs(q - k), 7)
            )
        ),
        lambda: Mask.lengths(key=np.array([90, S])),
    ),
    # Many elements of a tile read one element of the arrays.
    "buckets": (
        ("buckets", "pairs"),
        lambda a: (
            lambda s, b, h, q, k: (
                s
                + a["buckets"][jnp.clip((q - k) // 8 + 8, 0, 15), h]
                + a["pairs"][jnp.asarray(DOCUMENTS)[q], jnp.asarray(DOCUMENTS)[k]]
            )
        ),
        Mask.causal,
    ),
    # NaN for queries beyond the last one; its tile has such rows.
    "ends": (
        ("gain", "columns"),
        lambda a: (
            lambda s, b, h, q, k: (
                s * jnp.sqrt((T - q).astype(s.dtype) / T)
                + a["gain"][h] * a["columns"][k] * jnp.sqrt((T - q).astype(s.dtype) / T)
            )
        ),
        lambda: Mask.window(60, 20),
    ),
    # Each column of a row reads another element.
    "columns": (
        ("table", "columns"),
        lambda a: lambda s, b, h, q, k: s + a["table"][h, q - k + S] * a["columns"][k],
        lambda: Mask.window(60, 20),
    ),
    "documents": (
        (),
        None,
        lambda: Mask.causal() | Mask.function(lambda b, h, q, k: q // 40 == k // 40),
    ),
    "listed blocks": ((), None, lambda: Mask.kv_blocks(_LISTS, _COUNTS, block_size=64)),
    "listed small blocks": (
        ("gain",),
        lambda a: lambda s, b, h, q, k: s * a["gain"][h],
        lambda: Mask.window(90, 9) & Mask.kv_blocks(_SMALL_LISTS, block_size=25),
    ),
}
"""The arrays that the functions read, the score function, and the mask."""

ROW_SUMS = {
    "alibi": ("slopes",),
    "buckets": ("buckets", "pairs"),
    "rows": ("gain", "slopes"),
    "table": ("rows",),
}
"""The arrays to whose elements whole rows add, in functions without approximate operations."""

ROW_SUM_TOLERANCE = 1e-4
"""For 16-bit calls and arrays of 32 bits. With delta from the output, errors are above 1e-3."""

EMULATED: list[tuple[str, Case | Tiles]] = [
    ("sm_80", Tiles("table")),
    ("sm_80", Tiles("rows")),
    ("sm_80", Tiles("rows", 320, "float16", deterministic=True)),
    ("sm_90a", Tiles("rows")),
    ("sm_90a", Tiles("rows", 128, "float16", deterministic=True)),
    ("sm_80", Tiles("gain", 320)),
    ("sm_80", Tiles("alibi", dtype="float32", deterministic=True)),
    ("sm_90a", Tiles("table", deterministic=True)),
    ("sm_80", Tiles("buckets", deterministic=True)),
    ("sm_80", Tiles("table", 320, deterministic=True)),
    ("sm_90a", Tiles("gain", 128, "float16", deterministic=True)),
    ("sm_90a", Tiles("alibi")),
    ("sm_90a", Tiles("table", 128)),
    ("sm_80", Tiles("table", 320)),
    ("sm_90a", Tiles("buckets")),
    ("sm_80", Tiles("buckets", dtype="float32")),
    ("sm_75", Tiles("buckets", dtype="float16")),
    ("sm_90a", Tiles("ends")),
    ("sm_80", Tiles("ends")),
    ("sm_80", Tiles("ends", 320)),
    ("sm_90a", Tiles("gain", 128)),
    ("sm_90a", Tiles("gain", 256, "float16")),
    ("sm_90a", Tiles("documents", dtype="float32")),
    ("sm_80", Tiles("listed blocks", dtype="float32")),
    ("sm_90a", Tiles("listed small blocks", 192)),
    ("sm_90a", Case("packed", "elements", "prefix", 2, "bfloat16", dropout=True, soft_cap=2.0)),
    ("sm_80", Case("packed", "table", "ends", N, "float32", bias=True, sinks=True)),
    ("sm_90a", Case("vmap", "alibi", "lengths", 2, "bfloat16", sinks=True)),
    ("sm_90a", Case("packed", "table", "lengths", 2, "bfloat16", deterministic=True)),
    ("sm_80", Case("vmap", "elements", "causal", 2, "float32", dropout=True, deterministic=True)),
    ("sm_80", Case("vmap", "gain", "prefix", N, "float32", bias=True)),
    ("sm_90a", Case("dense", "roots", "not", N, "bfloat16", dropout=True)),
]


def cotangents_of(case: Case | Tiles) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    if isinstance(case, Tiles):
        shapes: Any = (B, T, N, case.head_dim), (B, T, N)
    else:
        rows = functions_case.B, functions_case.T, functions_case.N
        twice = (2,) if case.layout == "vmap" else ()
        shapes = (*twice, *rows, functions_case.Hv), (*twice, *rows)
    return tuple(
        rng.standard_normal(shape).astype(case.dtype).astype(np.float64) for shape in shapes
    )


def program(case: Case | Tiles) -> Any:
    cotangents = cotangents_of(case)
    return jax.jit(lambda arrays: value_and_gradients(case.ours, arrays, cotangents))


def lower(case: Case | Tiles, arch: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch)
    return program(case).lower(jax.tree.map(jnp.asarray, case.arrays()))


def emulated(case: Case | Tiles, arch: str, seed: int = 0) -> Any:
    """Results and gradients. Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, arch)
    emulator.configure(arch, seed=seed)
    return jax.tree.map(np.asarray, lowered.compile()(jax.tree.map(jnp.asarray, case.arrays())))


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    calls = [(call["case"], call["arch"]) for call in selected if {"case", "arch"} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


def exact(case: Case | Tiles) -> Any:
    """Results and gradients by the definition, in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arrays = {name: jnp.asarray(x.astype(np.float64)) for name, x in case.arrays().items()}
        function = case.defined
        if isinstance(case, Case) and case.layout == "vmap":
            function = lambda arrays: functions_case.vmapped(case.defined, arrays)  # noqa: E731
        want = jax.jit(lambda arrays: value_and_gradients(function, arrays, cotangents_of(case)))
        return jax.tree.map(np.asarray, want(arrays))


@pytest.fixture
def assert_matches(assert_close):
    """``assert_matches(case, got)`` compares results and gradients with the definition."""

    def compare(case: Case | Tiles, got: Any) -> None:
        want = exact(case)
        assert_close(got, want, TOLERANCES[case.dtype])
        if isinstance(case, Tiles) and case.dtype != "float32":
            for name in ROW_SUMS.get(case.functions, ()):
                assert_close(got[1][name], want[1][name], ROW_SUM_TOLERANCE)

    return compare


@pytest.mark.rotating(5)
@pytest.mark.parametrize(("arch", "case"), EMULATED, ids=str)
@pytest.mark.usefixtures("lowered")
def test_emulated_kernels(arch, case, machine, assert_matches):
    assert_matches(case, machine.submit(emulated, case, arch).result(timeout=600))


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("sm_90a", Tiles("table", deterministic=True)),
        ("sm_80", Tiles("buckets", deterministic=True)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("lowered")
def test_deterministic_sums_do_not_depend_on_the_order_of_blocks(arch, case, machine):
    runs = [machine.submit(emulated, case, arch, seed).result(timeout=600) for seed in (1, 2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


def exact_gradient(beyond: float, inside: float) -> np.ndarray:
    """The gradient of a table in fixed point. The output's gradient has the given numbers in one
    row and in the rows that the lengths exclude.
    """
    emulator.configure("sm_80")
    lengths = np.array([100, T])
    arrays = Tiles("table").arrays()
    out_gradient = np.ones((B, T, N, 64), np.float32)
    out_gradient[1, 5] = inside
    out_gradient[0, 100:] = beyond
    value = arrays["value"].copy()
    value[0, 100:] = beyond

    def loss(query: jax.Array, table: jax.Array) -> jax.Array:
        out = jax_memeff.dot_product_attention(
            query,
            arrays["key"],
            value,
            score_mod=lambda s, b, h, q, k: s + table[h, q - k + S],
            mask=Mask.lengths(lengths, lengths),
            deterministic_backward=True,
        )
        return jnp.vdot(out, out_gradient.astype(out.dtype))

    return np.asarray(jax.jit(jax.grad(loss, (0, 1)))(arrays["query"], arrays["table"])[1])


@pytest.mark.rotating(3)
def test_rows_beyond_the_lengths_do_not_scale_exact_sums(machine):
    runs = [machine.submit(exact_gradient, beyond, 1.0) for beyond in (0.0, 1e30, np.nan)]
    want, *found = (run.result(timeout=600) for run in runs)
    assert np.linalg.norm(want) > 0.1
    for own in found:
        np.testing.assert_array_equal(own, want)


def test_exact_sums_of_nan_are_nan(machine):
    found = machine.submit(exact_gradient, 0.0, np.nan).result(timeout=600)
    # Row 5 of batch index 1 reads elements 5 - k + S of keys up to its length, T.
    assert np.isnan(found[:, 5 - T + 1 + S : 5 + 1 + S]).all()
    # Elements that only other rows read are finite.
    assert np.isfinite(found[:, 5 + 1 + S : 5 + 64 + S]).all()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if FUNCTIONS[name][0]])
@pytest.mark.parametrize("head_dim", [64, 320])
def test_kernels_sum_gradients(name, head_dim, monkeypatch, fake_compiler):
    """XLA sums no gradients."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")

    def in_jax(*leaves: Any, **static: Any):
        raise AssertionError("XLA computes gradients of captured arrays")

    monkeypatch.setattr(functions, "captured_gradients", in_jax)
    case = Tiles(name, head_dim)
    loss = lambda arrays: case.ours(arrays)[0].astype(jnp.float32).sum()  # noqa: E731
    traced = jax.jit(jax.grad(loss)).trace(case.arrays())
    traced.lower(lowering_platforms=("cuda",))
    assert len(fake_compiler) == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("function", "dtype", "expected"),
    [
        ("alibi", "bfloat16", True),
        ("alibi", "float32", False),
        ("rows", "float16", True),
        ("columns", "bfloat16", False),
        ("documents", "bfloat16", False),
    ],
)
def test_only_sums_over_rows_take_delta_from_the_scores(
    arch, function, dtype, expected, monkeypatch, fake_compiler
):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    case = Tiles(function, dtype=dtype)
    loss = lambda arrays: case.ours(arrays)[0].astype(jnp.float32).sum()  # noqa: E731
    jax.jit(jax.grad(loss)).trace(case.arrays()).lower(lowering_platforms=("cuda",))
    (backward,) = (spec for spec, _ in fake_compiler if spec.direction == "backward")
    names = [entry.name for entry in backward.entry_points]
    assert (f"{backward.name}_delta" in names) == expected


ON_GPU: list[Case | Tiles] = [
    *(
        Tiles(name, head_dim, dtype, deterministic)
        for name in FUNCTIONS
        for head_dim in (64, 128, 256, 320)
        for dtype in ("bfloat16", "float16", "float32")
        for deterministic in (False, True)
    ),
    *(
        case
        for seed in range(4)
        for case in functions_case.sample(seed)
        if case.layout in ("dense", "packed", "vmap") and case.dtype != "float64"
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernels(case, assert_matches):
    found = program(case)(jax.tree.map(jnp.asarray, case.arrays()))
    assert_matches(case, jax.tree.map(np.asarray, found))
