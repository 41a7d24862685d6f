"""``offsets`` of ``paged_attention``: parts of the keys whose positions are those of the whole."""

import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import Paging, paged_attention, paging

import jax_memeff
from jax_memeff import Mask, Offsets

PAGE, PREFIX, HEADS = 16, 48, (4, 2)
LENGTHS, COUNTS = (200, 49, 77, 130), (1, 1, 9, 30)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"local_window_size": (60, 0)},
    "freed prefix": {"local_window_size": (60, 0)},
    "traced window": {"mask": "traced"},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s + 0.01 * (h + 1) * (k - q)},
    "mask function": {"mask": Mask.function(lambda b, h, q, k: (q - k) % 3 != h % 3)},
    "excluded window": {"mask": ~Mask.window(30, 0)},
}


def batch(lengths=LENGTHS, counts=COUNTS, dtype="float32", seed=0) -> Paging:
    """Sequences whose first ``PREFIX`` keys are in the pages of the first one."""
    made = paging(
        np.random.default_rng(seed),
        lengths,
        counts,
        page_size=PAGE,
        heads=HEADS,
        dims=(64, 64),
        dtype=jnp.dtype(dtype),
        max_pages=-(-max(lengths) // PAGE),
    )
    made.table[:, : PREFIX // PAGE] = made.table[0, : PREFIX // PAGE]
    return made


def batch_of(feature: str, counts: tuple[int, ...] = COUNTS, dtype: str = "float32") -> Paging:
    if feature != "freed prefix":
        return batch(counts=counts, dtype=dtype)
    # No window reaches the prefix.
    made = batch((200, 149, 177, 330), counts, dtype)
    for pool in (made.key_pages, made.value_pages):
        pool[made.table[0, : PREFIX // PAGE]] = np.nan
    return made


def given(feature: str, left: Any) -> dict[str, Any]:
    arguments = dict(FEATURES[feature])
    if arguments.get("mask") == "traced":
        arguments["mask"] = Mask.window(left, None)
    return {**arguments, "return_residual": True, "max_query_length": max(COUNTS)}


def whole(feature: str, starts: Any, query: Any, *pool: Any, left: Any = 40, **more: Any) -> Any:
    arguments = given(feature, left) | more
    return paged_attention(query, *pool, query_starts=starts, **arguments)


def in_parts(feature: str, starts: Any, query: Any, *pool: Any, left: Any = 40, **more: Any) -> Any:
    """The shared prefix, and the rest of each sequence, merged."""
    *pages, table, lengths = pool
    arguments = given(feature, left) | more
    pages_of_prefix = PREFIX // PAGE
    prefix = paged_attention(
        query,
        *pages,
        table[:, :pages_of_prefix],
        jnp.full_like(lengths, PREFIX),
        query_starts=starts,
        offsets=Offsets(query=lengths - PREFIX),
        **arguments,
    )
    rest = paged_attention(
        query,
        *pages,
        table[:, pages_of_prefix:],
        lengths - PREFIX,
        query_starts=starts,
        offsets=Offsets(query=PREFIX, key=np.full(len(lengths), PREFIX)),
        **arguments,
    )
    return jax_memeff.merge_attention([prefix, rest])


def assert_equal(found: Any, expected: Any, tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), np.asarray(theirs, np.float64), tolerance, tolerance
        )


@pytest.mark.rotating(3)
@pytest.mark.quick
@pytest.mark.parametrize("feature", FEATURES)
def test_a_shared_prefix_is_merged(feature):
    made = batch_of(feature)
    calls = [jax.jit(functools.partial(call, feature)) for call in (whole, in_parts)]
    expected, found = (call(made.starts, *made.arguments) for call in calls)
    assert_equal(found, expected, 1e-5)


def test_one_offset_for_all_heads_of_a_shard():
    made = batch()
    query, *pages, table, lengths = made.arguments
    arguments = {
        "score_mod": lambda s, b, h, q, k: s + 0.1 * h + 0.01 * b * (k - q),
        "query_starts": made.starts,
    }
    expected = paged_attention(query, *pages, table, lengths, **arguments)
    found = paged_attention(
        query[:, 2:],
        *(pool[:, :, 1:] for pool in pages),
        table,
        lengths,
        offsets=Offsets(head=2, num_heads=4),
        **arguments,
    )
    np.testing.assert_allclose(found, expected[:, 2:], 1e-5, 1e-5)


def test_offsets_beyond_the_largest_position_are_clamped():
    made = batch()
    query, *pool = made.arguments
    far = jnp.full(len(LENGTHS), 2**31 - 1)
    out, lse = paged_attention(
        query,
        *pool,
        query_starts=made.starts,
        offsets=Offsets(query=far),
        local_window_size=(2**20, 0),
        return_residual=True,
    )
    assert not out.any() and (np.asarray(lse) == -np.inf).all()


def test_bad_offsets():
    query, *pool = batch().arguments
    with pytest.raises(TypeError, match=r"offsets must be jax_memeff.Offsets"):
        paged_attention(query, *pool, query_starts=batch().starts, offsets=48)
    with pytest.raises(TypeError, match=r"offsets.query must be an int or .*shape \(\) or \(4,\)"):
        offsets = Offsets(query=np.zeros(3, np.int32))
        paged_attention(query, *pool, query_starts=batch().starts, offsets=offsets)
    with pytest.raises(ValueError, match=r"offsets.key must be >= 0, got -1"):
        paged_attention(query, *pool, query_starts=batch().starts, offsets=Offsets(key=-1))


KERNELS = [
    ("sm_80", "bfloat16", "window", COUNTS),
    ("sm_80", "float16", "causal", (1, 1, 1, 1)),
    ("sm_90a", "bfloat16", "window", (1, 1, 1, 1)),
    ("sm_90a", "bfloat16", "causal", COUNTS),
    ("sm_80", "bfloat16", "freed prefix", COUNTS),
    ("sm_90a", "bfloat16", "freed prefix", COUNTS),
    ("sm_90a", "bfloat16", "freed prefix", (1, 1, 1, 1)),
    ("sm_90a", "float16", "score_mod", COUNTS),
    ("sm_90a", "bfloat16", "traced window", COUNTS),
]


def lower(arch: str, dtype: str, feature: str, counts: tuple[int, ...]) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=3, seed=len(feature))
    made = batch_of(feature, counts, dtype)
    call = functools.partial(in_parts, feature, implementation="cuda")
    return jax.jit(call).lower(*map(jnp.asarray, (made.starts, *made.arguments)))


def emulated(*call: Any) -> Any:
    """Runs in the process of ``machine``."""
    arch, dtype, feature, counts = call
    lowered = emulator.lowered(lower, *call)
    emulator.configure(arch, multiprocessors=3, seed=1)
    made = batch_of(feature, counts, dtype)
    run = lowered.compile()
    return jax.tree.map(np.asarray, run(*map(jnp.asarray, (made.starts, *made.arguments))))


def expected(dtype: str, feature: str, counts: tuple[int, ...]) -> Any:
    made = batch_of(feature, counts, dtype)
    query, *pages, table, lengths = made.arguments
    exact = [jnp.asarray(x, jnp.float32) for x in (query, *pages)]
    return jax.jit(functools.partial(whole, feature))(made.starts, *exact, table, lengths)


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    names = ("arch", "dtype", "feature", "counts")
    calls = [tuple(map(call.get, names)) for call in selected if {*names} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(4)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "dtype", "feature", "counts"), KERNELS)
def test_kernels_merge_a_shared_prefix(arch, dtype, feature, counts, machine):
    found = machine.submit(emulated, arch, dtype, feature, counts).result(timeout=600)
    assert_equal(found, expected(dtype, feature, counts), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("feature", "counts"), [(f, c) for f in FEATURES for c in (COUNTS, (1,) * 4)]
)
def test_kernels_on_a_gpu_merge_a_shared_prefix(feature, counts):
    made = batch_of(feature, counts, "bfloat16")
    call = jax.jit(functools.partial(in_parts, feature, implementation="cuda"))
    found = call(*map(jnp.asarray, (made.starts, *made.arguments)))
    assert_equal(found, expected("bfloat16", feature, counts), 2e-2)
