"""``python -m jax_memeff build`` compiles the kernels of paged calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from paging import paged_attention

from jax_memeff import cli
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain.compile import Compiled

PAGES, BATCH, MAX_PAGES = 40, 4, 8


def lowered(monkeypatch: Any, tokens: int, *, heads: tuple[int, int] = (8, 2), **given: Any) -> set:
    """The kernels of a program with a given number of new tokens per sequence."""
    found = set()

    def compiled(spec: Any, arch: str) -> Compiled:
        found.add(spec)
        return Compiled(b"image", tuple(x.name for x in spec.entry_points), (), (), "", 1.0, False)

    size, dim = given.pop("page_size"), given.pop("head_dim")
    dtype = given.pop("dtype", jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((PAGES, size, heads[1], dim), dtype)
    query = jax.ShapeDtypeStruct((BATCH, tokens, heads[0], dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((BATCH, MAX_PAGES), jnp.int32)
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    values = None if "value_dim" in given else pool

    def call(query: Any, key: Any, value: Any, *where: Any) -> Any:
        return paged_attention(query, key, value, *where, implementation="cuda", **given)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile", compiled)
        patch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
        traced = jax.jit(call).trace(query, pool, values, table, lengths)
        traced.lower(lowering_platforms=("cuda",))
    return found


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("--head-dim 128 --page-size 64", {"head_dim": 128, "page_size": 64}),
        (
            "--head-dim 64 --page-size 16 --batch-invariant",
            {"head_dim": 64, "page_size": 16, "batch_invariant": True},
        ),
        (
            "--head-dim 128 --page-size 32 --float8 --key-scale heads --value-scale pages",
            {
                "head_dim": 128,
                "page_size": 32,
                "dtype": jnp.float8_e4m3fn,
                "key_scale": jnp.ones(2),
                "value_scale": jnp.ones((PAGES, 2)),
            },
        ),
        (
            "--head-dim 576 --value-dim 512 --page-size 64 --latent",
            {"head_dim": 576, "page_size": 64, "value_dim": 512, "heads": (16, 1)},
        ),
    ],
    ids=str,
)
def test_decode_steps_drafts_and_prompts_find_their_kernels(flags, given, monkeypatch, capsys):
    jobs = []

    def compile_many(asked: Any, on_done: Any) -> None:
        jobs.extend(asked)
        for spec, arch in asked:
            on_done(spec, arch, Compiled(b"", (), (), (), "", 1.0, True))

    monkeypatch.setattr(cli, "compile_many", compile_many)
    common = ["--dtype", "bf16", "--arch", "sm_90a", "--varlen", *flags.split()]
    # One token attends to all keys; several tokens need a causal mask.
    assert cli.main(["build", *common]) == 0
    assert cli.main(["build", *common, "--causal"]) == 0
    built = {spec for spec, _ in jobs}
    needed = {spec for tokens in (1, 5, 128) for spec in lowered(monkeypatch, tokens, **given)}
    assert needed and needed <= built
    assert {spec.direction for spec in built} == {"forward"}


def test_flags_of_a_pool_need_pages(capsys):
    arguments = ["build", "--dtype", "bf16", "--head-dim", "64", "--arch", "sm_80", "--float8"]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    said = "expected a page size (--page-size), because only keys in pages are float8, latent, "
    assert f"{said}scaled or batch invariant, got 0" in capsys.readouterr().err
