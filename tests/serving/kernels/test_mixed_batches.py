"""Prompts and decode steps in one call: two kernels that share an output, on the emulated machine
and on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import TOLERANCES
from paging import paged_attention

PAGE_SIZE, MAX_PAGES, TOKENS, LONGEST = 16, 10, 400, 150
PAST = 2**31 - 1
# Starts and lengths. Each token is in a prompt, in a step, or in a gap that one kernel clears.
BATCHES = {
    "steps, a prompt, and padding": ([0, 1, 2, 3, 93, 93, 93], [160, 70, 9, 100, 0, 0]),
    "a prompt among steps": ([0, 1, 2, 132, 133, 134, 400], [60, 5, 150, 160, 0, 0]),
    "padding after steps": ([0, 100, 101, 102, 103, 105, 106], [130, 30, 40, 160, 17, 1]),
    "prompts only": ([0, 100, 200, 250, 300, 390, 400], [100, 160, 50, 60, 90, 10]),
    "steps only": ([0, 1, 2, 3, 4, 5, 6], [10, 160, 0, 40, 100, 80]),
    "no tokens": ([0, 0, 0, 0, 0, 0, 0], [0, 3, 160, 0, 5, 7]),
    "fewer tokens than queries": ([20, 22, 122, 124, 254, 256, 399], [1, 50, 0, 20, 1, 3]),
    "lengths out of range": (
        [0, 130, 131, 261, 262, 263, 264],
        [PAST, -5, 10**6, -PAST - 1, 40, 0],
    ),
    "starts out of range": ([-9, 5, 3, 160, PAST, -PAST - 1, 7], [90, 50, 160, 160, 160, 160]),
    "descending starts": ([400, 300, 200, 100, 50, 10, 0], [160] * 6),
    "longer than the longest": ([0, 1, 390, 391, 392, 393, 394], [160, 160, 30, 20, 10, 40]),
}
PROGRAMS = [
    ("sm_90a", (4, 2), (128, 128)),
    ("sm_80", (4, 2), (64, 64)),
    ("sm_90a", (2, 2), (64, 64)),
    ("sm_90a", (16, 1), (576, 512)),
    ("sm_80", (2, 1), (264, 264)),  # twice the heads would take ten seconds more
]
SEQUENCES = 6


@functools.cache
def arrays(heads: tuple[int, int], dims: tuple[int, int]) -> tuple[Any, ...]:
    """A query, pools of keys and values, and a table, which does not list the last page, of NaN."""
    rng = np.random.default_rng(0)
    pools = rng.standard_normal((2, 32, PAGE_SIZE, heads[1], dims[0]))
    pools[:, -1] = np.nan
    query = jnp.asarray(rng.standard_normal((TOKENS, heads[0], dims[0])), "bfloat16")
    table = rng.integers(0, 31, (SEQUENCES, MAX_PAGES)).astype(np.int32)
    values = None if dims[0] == 576 else jnp.asarray(pools[1, ..., : dims[1]], "bfloat16")
    return query, jnp.asarray(pools[0], "bfloat16"), values, jnp.asarray(table)


def lowered(arch: str | None, heads: Any, dims: Any, implementation: Any) -> Any:
    """A program for all batches."""
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)

    def call(query, keys, values, table, lengths, starts):
        return paged_attention(
            query,
            keys,
            values,
            table,
            lengths,
            query_starts=starts,
            max_query_length=LONGEST,
            value_dim=dims[1] if values is None else None,
            return_residual=True,
            implementation=implementation,
        )

    sizes = [jax.ShapeDtypeStruct((SEQUENCES + more,), jnp.int32) for more in (0, 1)]
    return jax.jit(call).lower(*arrays(heads, dims), *sizes)


def results(arch: str | None, heads: Any, dims: Any, implementation: Any) -> dict[str, Any]:
    """The output and the logsumexp of each batch."""
    if arch is None:
        program = lowered(arch, heads, dims, implementation)
    else:
        program = emulator.lowered(lowered, arch, heads, dims, implementation)
        emulator.configure(arch, multiprocessors=5)
    run = program.compile()
    found = {}
    for name, (starts, lengths) in BATCHES.items():
        given = (jnp.asarray(np.array(x, np.int32)) for x in (lengths, starts))
        out = run(*arrays(heads, dims), *given)
        found[name] = [np.asarray(x, np.float32) for x in out]
    return found


def assert_equal(found: dict[str, Any], heads: Any, dims: Any, assert_close: Any) -> None:
    """The results are those of plain JAX, and 0 and -inf in tokens of no sequence."""
    wanted = results(None, heads, dims, "xla")
    for name, (out, lse) in found.items():
        want_out, want_lse = wanted[name]
        valid = np.isfinite(want_lse)
        np.testing.assert_array_equal(np.isneginf(lse), ~valid, err_msg=name)
        assert not out[~valid].any(), name
        assert_close(out, want_out, TOLERANCES["bfloat16"])
        assert_close(lse[valid], want_lse[valid], TOLERANCES["bfloat16"])


@pytest.mark.rotating(5)
@pytest.mark.parametrize(("arch", "heads", "dims"), PROGRAMS, ids=str)
def test_emulated(arch, heads, dims, machine, assert_close):
    found = machine.submit(results, arch, heads, dims, "cuda").result(900)
    assert_equal(found, heads, dims, assert_close)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(("heads", "dims"), sorted({own[1:] for own in PROGRAMS}), ids=str)
def test_kernels(heads, dims, assert_close):
    assert_equal(results(None, heads, dims, "cuda"), heads, dims, assert_close)
