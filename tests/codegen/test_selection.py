"""Which kernel and tile serve a problem."""

import dataclasses
import itertools
from typing import Any

import pytest
from problems import PARTS, access, is_large, problem

from jax_memeff.codegen import emit, gpu, select, strategy
from jax_memeff.codegen.features import BIAS, FUNCTIONS, AskedBias, AskedPages
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.kernels.common.base import LARGE_DIM
from jax_memeff.codegen.kernels.sm80.base import MmaTile
from jax_memeff.codegen.kernels.sm80.split import Tile as SplitTile
from jax_memeff.codegen.problem import REQUIRED_DIRECTIONS
from jax_memeff.codegen.spec import SPEC_DTYPES
from jax_memeff.codegen.strategy import Sizes, Strategy
from jax_memeff.errors import UnsupportedError


def query_rows(*call: Any) -> strategy.QueryRows | None:
    return select.choose(*call).query_rows


_FUNCTION = FUNCTIONS.support[0].problems[0]["functions"]


def test_few_query_rows_split_the_keys():
    few = Strategy(query_rows="16")
    spec = select.select(problem(), few)
    assert isinstance(spec.tile, SplitTile)
    assert spec.kernel.splits_keys and spec.tile.query == 16
    source = emit.source(spec)
    for line in (
        "#include <kernels/sm80/split.cuh>",
        f"static constexpr int kStages = {spec.tile.stages};",
        f"static constexpr int kKeyWarps = {spec.tile.key_warps};",
        "using Kernel = memeff::FmhaForwardSplitSm80<Config>;",
        "using Combine = memeff::FmhaForwardCombine<Config>;",
        f"static_assert(Combine::kThreads == {spec.entry_points[1].threads});",
    ):
        assert line in source
    names = [entry.name for entry in spec.entry_points]
    assert names == [spec.name, f"{spec.name}_combine"]
    assert select.select(problem(), Strategy(query_rows="64")).tile.query == 64
    assert not select.select(problem()).kernel.splits_keys
    (reason,) = select.spec_reasons(spec, problem())
    assert reason.startswith("it splits the keys")
    (reason,) = select.spec_reasons(spec, problem(), Strategy(query_rows="64"))
    assert reason == "its tile has 16 rows, not 64"


@pytest.mark.parametrize(
    ("features", "packs"),
    [
        ({}, True),
        ({"mask": "window", "lengths": True, "soft_cap": True}, True),
        ({"bias": AskedBias("16")}, False),
        ({"segments": True}, False),
        ({"boolean": True}, False),
        ({"dropout": True}, False),
        ({"functions": _FUNCTION}, False),
        ({"functions": _FUNCTION, "packed": True, "pages": AskedPages(64)}, True),
    ],
)
def test_heads_of_a_group_share_a_tile(features, packs):
    asked = problem(**features)
    assert select.select(asked, Strategy(query_rows="16")).pack_gqa == packs
    four, sixteen = (
        Sizes(batch=64, queries=4, keys=4096, heads=32, key_heads=heads) for heads in (8, 2)
    )
    assert query_rows(asked, four, 132) == "16"
    assert query_rows(asked, sixteen, 132) == ("64" if packs else "16")


@pytest.mark.parametrize(
    ("asked", "filled"),
    [
        ({}, {"128": (256,), "256": (193, 197)}),
        ({"soft_cap": True}, {"256": (193, 197, 256)}),
        ({"mask": "causal"}, {"128": (65, 128, 193, 197, 256, 577, 640)}),
        ({"mask": "causal", "soft_cap": True}, {}),
        (
            {"mask": "causal", "bias": AskedBias("16")},
            {"128": (65, 128, 193, 197, 256, 577, 640)},
        ),
        ({"bias": AskedBias("16"), "sinks": True}, {"128": (193, 197, 256)}),
        ({"mask": "window"}, {}),
        ({"boolean": True}, {}),
        ({"head_dim": 56, "value_dim": 40}, {"128": (256,), "256": (193, 197)}),
        ({"head_dim": 64, "value_dim": 32}, {}),
        ({"head_dim": 24}, {"256": (193, 197, 256)}),
        ({"head_dim": 32}, {"256": (193, 197, 256)}),
        ({"head_dim": 32, "mask": "causal", "dropout": True}, {"256": (193, 197, 256)}),
        ({"head_dim": 32, "mask": "window"}, {}),
        ({"head_dim": 32, "sinks": True}, {}),
        ({"head_dim": 128}, {}),
    ],
    ids=str,
)
def test_queries_that_fill_a_tile(asked, filled):
    """Other numbers of queries have tiles of 192 rows, or were not measured."""
    lengths = (65, 128, 129, 192, 193, 197, 256, 257, 512, 576, 577, 640, 641, 2048)
    found = {}
    for queries in lengths:
        sizes = Sizes(batch=64, queries=queries, keys=queries, heads=16, key_heads=16)
        own = problem(arch="sm_90a", **{"head_dim": 64, **asked})
        if rows := query_rows(own, sizes, 132):
            found[rows] = (*found.get(rows, ()), queries)
    assert found == filled


@pytest.mark.parametrize(
    ("asked", "rows"), [({}, "128"), ({"dropout": True}, None), ({"head_dim": 32}, None)], ids=str
)
def test_long_keys_have_no_tile_of_256_rows(asked, rows):
    sizes = Sizes(batch=64, queries=197, keys=4097, heads=16, key_heads=16)
    own = problem(arch="sm_90a", **{"head_dim": 64, **asked})
    assert query_rows(own, sizes, 132) == rows


def test_row_counts_of_split_kernels():
    def rows(batch, queries, heads, group, keys=1024, multiprocessors=132, **asked):
        key_heads = heads // group
        sizes = Sizes(batch=batch, queries=queries, keys=keys, heads=heads, key_heads=key_heads)
        return query_rows(problem(**asked), sizes, multiprocessors)

    assert [rows(64, queries, 8, 1) for queries in (1, 16, 17, 64, 65)] == [
        "16", "16", "64", "64", None,
    ]  # fmt: skip
    # Five draft tokens: groups of 4 and of 8 heads share a tile, and 4 heads do not.
    assert [rows(16, 5, heads, heads // 8, 8192) for heads in (32, 64)] == ["32", "64"]
    assert rows(16, 5, 32, 4, 8192, segments=True) == "16"
    # Five tokens of 32 heads fill 3 tiles; each head by itself would have one, mostly empty.
    assert [rows(16, queries, 32, 32, 8192) for queries in (5, 512)] == ["64", None]
    # A few tiles leave a GPU idle, however long they are.
    assert rows(1, 1024, 8, 1) == "64" and rows(1, 8192, 8, 1) is None

    # On Hopper a few tiles of 64 rows fill the GPU, or have few keys to go through.
    hopper: dict[str, Any] = {"arch": "sm_90a"}
    assert [rows(1, queries, 8, 1, **hopper) for queries in (16, 17, 1024, 1025)] == [
        "16", "consumer_groups", "consumer_groups", None,
    ]  # fmt: skip
    assert [rows(1, 128, 8, 1, keys, **hopper) for keys in (1024, 32768)] == [
        "consumer_groups",
        "64",
    ]
    assert rows(1, 1024, 8, 1, 32768, **hopper) == "consumer_groups"
    # With consumer groups heads cannot share a tile, so a group of 8 splits its keys instead.
    assert [rows(2, 20, 8, group, 1200, **hopper) for group in (1, 8)] == ["consumer_groups", "64"]
    # A GPU with fewer multiprocessors is full with fewer tiles.
    assert rows(1, 1024, 8, 1, multiprocessors=58) is None
    # Packed sequences do not split their keys.
    assert rows(4, 128, 8, 1, 32768, packed=True, **hopper) == "consumer_groups"
    assert rows(4, 128, 8, 1, packed=True) is None


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "features", [{}, {"bias": AskedBias("16")}, {"bias": AskedBias("32")}], ids=str
)
@pytest.mark.parametrize("arch", PARTS)
@pytest.mark.parametrize("direction", REQUIRED_DIRECTIONS)
def test_every_pair_of_head_dims_has_a_kernel(arch, direction, features):
    # Dims are padded to multiples of 32: the largest and the smallest dims of each multiple.
    sizes = [size for end in range(32, 257, 32) for size in (end - 24, end)]
    for head_dim, value_dim in itertools.product(sizes, repeat=2):
        dims = {"head_dim": head_dim, "value_dim": value_dim}
        spec = select.select(problem(direction, "f16", **dims, arch=arch, **features))
        assert head_dim <= spec.padded_head_dim and value_dim <= spec.padded_value_dim
        assert spec.shared_bytes <= gpu.of(arch).max_shared_bytes
        assert spec.threads * spec.tile.blocks_per_sm <= 1024
        # From sm_80 on the system reserves 1 KB of shared memory for each CTA.
        system = 0 if arch == "sm_75" else 1024
        shared = spec.tile.blocks_per_sm * (spec.shared_bytes + system)
        assert shared <= gpu.of(arch).max_shared_bytes + system


@pytest.mark.parametrize(
    ("dims", "alignment"),
    [((7, 7), 2), ((66, 64), 4), ((64, 66), 4), ((100, 72), 8), ((24, 56), 16), ((1, 256), 2)],
)
@pytest.mark.parametrize("direction", REQUIRED_DIRECTIONS)
def test_rows_begin_at_what_the_dims_allow(direction, dims, alignment):
    asked = problem(direction, "f16", *dims)
    spec = select.select(asked)
    assert spec.alignment == asked.alignment == alignment
    assert f"kAlignment = {alignment};" in emit.source(spec)
    assert (f"_align{alignment}_" in spec.name) == (alignment < 16)
    aligned = dataclasses.replace(spec, alignment=16)
    reasons = [f"it moves 16 bytes at a time, and rows begin at multiples of {alignment}"]
    assert select.spec_reasons(aligned, asked) == (reasons if alignment < 16 else [])


@pytest.mark.rotating(3)
@pytest.mark.parametrize("arch", PARTS[1:])
@pytest.mark.parametrize("direction", REQUIRED_DIRECTIONS)
@pytest.mark.parametrize("dtype", ["f32", "tf32"])
def test_every_pair_of_float32_head_dims_has_a_kernel(arch, direction, dtype):
    # A backward with 99 KB has no tile for most pairs with more columns.
    certain = 128 if (arch, direction) == ("sm_86", "backward") else 256
    for head_dim, value_dim in itertools.product((*range(1, 256, 15), 128, 256, 257), repeat=2):
        spec = select.select(problem(direction, dtype, head_dim, value_dim, arch))
        if is_large(spec):
            assert max(head_dim, value_dim) > certain
        else:
            assert max(head_dim, value_dim) <= 256
        assert head_dim <= spec.padded_head_dim and value_dim <= spec.padded_value_dim
        assert spec.shared_bytes <= gpu.of(arch).shared_bytes(spec.tile.blocks_per_sm)


def test_float32_names_how_it_is_multiplied():
    for dtype, element in (("f32", "memeff::Tf32x3"), ("tf32", "memeff::Tf32")):
        spec = select.select(problem(dtype=dtype, head_dim=64, bias=AskedBias("32")))
        assert spec.name.startswith(f"fmha_fwd_{dtype}_d64_")
        assert f"using Element = {element};" in emit.source(spec)
        assert "using BiasElement = float;" in emit.source(spec)


@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm_80", "f16"), ("sm_75", "f16"), ("sm_86", "f32"), ("sm_90a", "tf32")]
)
@pytest.mark.parametrize("direction", REQUIRED_DIRECTIONS)
@pytest.mark.parametrize(
    "features", [{}, {"packed": True}, {"bias": AskedBias("16")}, {"bias": AskedBias("32")}]
)
def test_large_dim_kernels_support_packed_sequences_and_biases(arch, dtype, direction, features):
    if dtype != "f16" and "bias" in features:
        features = {"bias": AskedBias("32")}  # float32 inputs have no other bias
    spec = select.select(problem(direction, dtype, 257, 8, arch, **features))
    assert is_large(spec)
    assert spec[BIAS] is None or access(spec) == "elements"
    assert "elements" not in spec.name  # the only way in which large-dim kernels read a bias
    broadcast = problem(direction, "f16", 257, 8, arch, bias=AskedBias("16", "columns"))
    assert access(select.select(broadcast)) == "columns"


def test_large_dim_kernels_serve_problems_without_a_tile():
    asked = problem("backward", "f16", 256, arch="sm_75", bias=AskedBias("16"))
    assert is_large(select.select(asked))
    assert not is_large(select.select(dataclasses.replace(asked, head_dim=192, value_dim=192)))


def test_every_tile_has_a_reason():
    for kernel, arch, dtype in itertools.product(KERNELS, PARTS, SPEC_DTYPES):
        for row in kernel.rows(problem(kernel.direction, dtype, arch=arch)):
            assert len(row.tile.reason) > 3
            assert isinstance(row.tile, MmaTile) == (kernel.family == "sm80")


def test_row_maxima_are_those_of_a_forward_that_does_not_split_the_keys():
    asked = problem(head_dim=64, row_maxima=True)
    sizes = Sizes(batch=1, queries=1, keys=4096, heads=8, key_heads=8)
    assert select.choose(problem(head_dim=64), sizes, 132).query_rows == "16"
    assert select.choose(asked, sizes, 132) == strategy.PLAIN
    on_hopper = dataclasses.replace(asked, arch="sm_90a")
    assert select.choose(on_hopper, sizes, 132).query_rows == "consumer_groups"
    reasons = [
        why for spec, why in select.explain(asked, Strategy("16")) if spec.kernel.splits_keys
    ]
    assert reasons and all("merges no maxima" in "; ".join(why) for why in reasons)
    backward = problem("backward", head_dim=64)
    assert select.select(dataclasses.replace(backward, features={"row_maxima": True})) == (
        select.select(backward)
    )


ONLY_LARGE_DIM = {
    ("sm_75", "f16", "backward", 256),
    ("sm_86", "f32", "backward", 192),
    ("sm_86", "f32", "backward", 256),
}
"""Dims for which shared memory is too small."""


@pytest.mark.parametrize(
    "features", [{}, {"bias": AskedBias("32")}, {"soft_cap": True, "dropout": True}]
)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_tuned_dims_are_not_padded_further(dtype, features):
    """Without this test a tile that does not fit would silently pad its problems further."""
    sm80_only = [arch for arch in PARTS if arch != gpu.WGMMA_ARCH]
    for arch, direction in itertools.product(sm80_only, REQUIRED_DIRECTIONS):
        for dims in select.TUNED_DIMS:
            asked = problem(direction, dtype, *dims, arch, **features)
            if not select.family_reasons(asked):
                spec = select.select(asked)
                is_large_dim = (arch, dtype, direction, max(dims)) in ONLY_LARGE_DIM
                expected = (LARGE_DIM, LARGE_DIM) if is_large_dim else dims
                assert (spec.padded_head_dim, spec.padded_value_dim) == expected


@pytest.mark.quick
def test_selection_is_the_first_without_reasons():
    asked = problem("backward", head_dim=32, value_dim=256, arch="sm_80")
    explained = select.explain(asked)
    padded = [(spec.padded_head_dim, spec.padded_value_dim) for spec, _ in explained]
    assert padded == sorted(padded)  # tiles of the same dims keep the order of their table
    fitting = [spec for spec, reasons in explained if not reasons]
    assert select.select(asked) == fitting[0]
    refused = {spec.name: reasons for spec, reasons in explained}
    assert refused["fmha_bwd_bf16_d32v256_32x64_sm80"] == ["8 warps cannot share its 32x32 dq"]


def test_closure_takes_dims_that_are_not_tuned():
    names = {spec.name for spec in select.closure("sm_80", dtypes=["f16"], dims=[(80, 40)])}
    features = "window_varlen_positions_vmap_segments_boolean_softcap_dropout_bias32_sinks_rowmax"
    assert f"fmha_fwd_f16_d96v64_128x32_{features}_sm80" in names
    with pytest.raises(UnsupportedError, match="head_dim is 70000"):
        list(select.closure("sm_80", dims=[(70000, 64)]))


def test_tiles_that_queries_fill():
    def rows(queries, head_dim=64, **features):
        asked = problem(head_dim=head_dim, value_dim=head_dim, arch="sm_90a", **features)
        sizes = Sizes(batch=64, queries=queries, keys=queries, heads=12, key_heads=12)
        return select.select(asked, select.choose(asked, sizes, 132)).tile.query

    lengths = (128, 192, 193, 197, 256, 257, 512)
    assert [rows(queries) for queries in lengths] == [192, 192, 256, 256, 128, 192, 192]
    assert [rows(queries, 32) for queries in lengths] == [192, 192, 256, 256, 256, 192, 192]
    assert rows(197, mask="causal") == 128
    # Plain calls with 48 columns have only tiles of 192 rows.
    assert [rows(197, head_dim, bias=AskedBias("16")) for head_dim in (24, 40, 56)] == [256] * 3
    assert [rows(197, head_dim) for head_dim in (24, 40, 56)] == [256, 192, 256]
    others = ("packed", "positions", "broadcast_batch", "sinks")
    for head_dim in (32, 64):
        assert {rows(197, head_dim, **{name: True}) for name in others} == {192}


def test_batch_invariant_steps_over_long_keys_divide_segments():
    pages = AskedPages(64, is_invariant=True)
    asked = problem(arch="sm_90a", packed=True, pages=pages)

    def rows(batch, queries, keys):
        sizes = Sizes(batch=batch, queries=queries, keys=keys, heads=32, key_heads=8)
        return query_rows(asked, sizes, 132)

    assert rows(4, 1, 65536) == "16"
    assert rows(1, 1, 4096) == "64"  # a segment for each SM
    assert rows(64, 1, 65536) == "64"  # the tiles fill the GPU
    assert rows(4, 5, 65536) == "64"  # 20 rows
    step, prompt = (select.select(asked, Strategy(query_rows=tile)) for tile in ("16", "64"))
    assert (step.tile.query, prompt.tile.query) == (16, 64)
    assert step.tile.key == prompt.tile.key  # the bits depend on the KV blocks
