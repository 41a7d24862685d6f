"""Which Hopper kernels serve a problem, and their launches."""

import dataclasses
import itertools
from typing import Any

import pytest
from problems import SIZES, ctas, key_tiles, problem, row_tiles

from jax_memeff.codegen import emit, gpu, select
from jax_memeff.codegen.features import BOOLEAN, SEGMENTS, AskedBias
from jax_memeff.codegen.features.bias import gradient
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.functions.program import CapturedType, Program, Value
from jax_memeff.codegen.kernels.sm90 import backward
from jax_memeff.codegen.kernels.sm90.base import dbias_bytes_and_stages
from jax_memeff.codegen.kernels.sm90.forward import FmhaFwdSm90
from jax_memeff.codegen.kernels.sm90.two_kernel_backward import FmhaBwdTwoKernelSm90
from jax_memeff.codegen.strategy import Sizes, Strategy, ceil_div

pytestmark = pytest.mark.quick


def test_few_work_tiles_use_consumer_groups_on_hopper():
    few = Strategy(query_rows="consumer_groups")
    spec = select.select(problem(arch="sm_90a"), few)
    assert isinstance(spec.kernel, FmhaFwdSm90)
    assert (spec.kernel.consumer_groups(spec), spec.kernel.consumers(spec)) == (2, 2)
    assert (spec.tile.query, spec.threads) == (64, 384)
    assert "static constexpr int kConsumerGroups = 2;" in emit.source(spec)
    assert "_groups_" not in select.select(problem(arch="sm_90a")).name
    (reason,) = select.spec_reasons(spec, problem(arch="sm_90a"))
    assert reason.startswith("its consumer groups are for few work tiles")
    # Head dims without such a tile split their keys, unless sequences are packed.
    wider = {"head_dim": 256, "value_dim": 256, "arch": "sm_90a"}
    assert select.select(problem(**wider), few).kernel.splits_keys
    assert select.select(problem(**wider, packed=True), few).family == "sm90"


@pytest.mark.parametrize(
    ("arch", "head_dim"), [("sm_80", 64), ("sm_90a", 64), ("sm_90a", 256), ("sm_90a", 320)]
)
def test_grids_have_the_tiles_that_tokens_of_packed_sequences_fill(arch, head_dim):
    packed: dict[str, Any] = {"arch": arch, "head_dim": head_dim, "packed": True}
    needs_grad = ("query", "key", "value", "bias")
    for bias, counts_tokens in (
        (None, True),
        (AskedBias("16", "common"), arch == "sm_90a" and head_dim < 320),  # in a kernel of its own
        (AskedBias("16", "full"), False),  # zeros beyond the lengths
    ):
        asked = problem("backward", **packed, bias=bias, needs_grad=needs_grad)
        spec = select.select(asked)
        assert (f"kTokenGrid = {str(counts_tokens).lower()};") in emit.source(spec)
        for tiles, tile in ((row_tiles, spec.tile.query), (key_tiles, spec.tile.key)):
            assert any(grid % tiles(tile, packed=True) == 0 for grid in ctas(spec)) == counts_tokens
            assert any(grid % tiles(tile) == 0 for grid in ctas(spec)) != counts_tokens


def test_few_kv_blocks_use_split_q():
    few = Strategy(split_q=True)
    hopper: dict[str, Any] = {"arch": "sm_90a"}
    spec = select.select(problem("backward", **hopper), few)
    assert spec.split_q and "_splitq_" in spec.name
    rows, keys = row_tiles(spec.tile.query), key_tiles(spec.tile.key)
    assert ctas(spec) == [rows, keys, rows]
    assert [entry.grid.splits for entry in spec.entry_points] == ["", "each", ""]
    assert "static constexpr bool kSplitQ = true;" in emit.source(spec)
    assert not select.select(problem("backward", arch="sm_90a")).split_q
    (reason,) = select.spec_reasons(spec, problem("backward", arch="sm_90a"))
    assert reason.startswith("several of its CTAs share a KV block (split-Q)")
    whole = select.select(problem("backward", **hopper))
    (reason,) = select.spec_reasons(whole, problem("backward", **hopper), few)
    assert reason.startswith("each of its CTAs owns a KV block")
    needs_grad = ("query", "bias")
    others: tuple[dict[str, Any], ...] = (
        {"deterministic": True},
        {"needs_grad": ("query",)},
        {"head_dim": 256, "value_dim": 256},
        {"bias": AskedBias("16", "full"), "needs_grad": needs_grad},
        {"bias": AskedBias("16", "columns"), "needs_grad": needs_grad},
    )
    for owned in others:
        assert not select.select(problem("backward", **hopper, **owned), few).split_q
    ordered = problem("backward", **hopper, deterministic=True, mask="causal")
    assert select.select(ordered, few).split_q
    dbias_kernel: dict[str, Any] = {
        "bias": AskedBias("16", "common"),
        "needs_grad": ("query", "key", "bias"),
    }
    assert select.select(problem("backward", **hopper, **dbias_kernel), few).split_q


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ({}, 2),
        ({"heads": 4}, 4),
        ({"heads": 4, "queries": 512}, 2),
        ({"heads": 4, "queries": 511}, 1),
        ({"heads": 2, "key_heads": 1, "queries": 511}, 3),
        ({"heads": 1, "keys": 77, "queries": 32768}, 32),
        ({"batch": 2}, 1),
        ({"keys": 1057}, 1),
    ],
    ids=str,
)
def test_q_splits_fill_the_gpu_and_have_enough_q_blocks(sizes, shares):
    heads = sizes.get("heads", 8)
    usual = {"batch": 1, "queries": 1024, "keys": 1024, "heads": heads, "key_heads": heads}
    assert backward.q_splits("none", Sizes(**{**usual, **sizes}), 132) == shares


GROUPED = {
    "batch": 8,
    "queries": 4096,
    "keys": 4096,
    "heads": 32,
    "key_heads": 4,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({}, 4),
        ({"batch": 9}, 4),
        ({"batch": 9, "head_dim": 64}, 2),
        ({"queries": 1024}, 2),
        ({"queries": 512}, 1),
        ({"key_heads": 8}, 2),
        ({"key_heads": 8, "head_dim": 64}, 1),
        ({"key_heads": 16}, 1),
        ({"heads": 24}, 2),
        ({"heads": 20}, 1),
        ({"query_tokens": 32768, "key_tokens": 32768}, 4),
    ],
    ids=str,
)
def test_ctas_that_order_additions_divide_more_groups(sizes, splits):
    found = Sizes(**{**GROUPED, **sizes})
    assert backward.q_splits("causal", found, 132, deterministic=True) == splits
    assert backward.q_splits("none", found, 132, deterministic=True) == 1
    assert 2 * splits <= max(2, found.group)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({}, 4),
        ({"batch": 9}, 2),
        ({"queries": 512}, 2),
        ({"queries": 128}, 1),
        ({"key_heads": 2}, 4),
        ({"heads": 24}, 1),
        ({"heads": 24, "batch": 4}, 2),
        ({"heads": 20}, 1),
        ({"key_heads": 8, "batch": 2}, 2),
        ({"key_heads": 8}, 1),
        ({"key_heads": 16, "batch": 1}, 1),
        ({"heads": 28, "batch": 1, "head_dim": 64}, 2),
        ({"heads": 16, "batch": 1, "head_dim": 64}, 2),
        ({"heads": 16, "batch": 2, "head_dim": 64}, 1),
        ({"query_tokens": 32768, "key_tokens": 32768}, 4),
        ({"query_tokens": 4096, "key_tokens": 4096}, 2),
        ({"query_tokens": 2048, "key_tokens": 2048}, 1),
    ],
    ids=str,
)
def test_ctas_divide_the_query_heads_of_large_groups_under_causal_masks(sizes, splits):
    """The partial sums of dk and dv then need at most as much memory as the sums of dq."""
    found = Sizes(**{**GROUPED, **sizes})
    assert backward.q_splits("causal", found, 132) == splits
    assert 2 * splits <= max(2, found.group)
    assert backward.q_splits("window", found, 132) == 1


@pytest.mark.parametrize(
    ("heads", "length", "causal", "full"),
    [(4, 4096, 2, 1), (2, 4096, 4, 2), (8, 2048, 2, 1), (8, 1024, 2, 2), (16, 1024, 1, 1)],
)
def test_few_causal_kv_blocks_with_many_q_blocks_get_two_ctas_for_each_sm(
    heads, length, causal, full
):
    few = Sizes(batch=1, queries=length, keys=length, heads=heads, key_heads=heads)
    assert backward.q_splits("causal", few, 132) == causal
    assert backward.q_splits("none", few, 132) == full
    assert backward.q_splits("causal", few, 132, deterministic=True) == 1


def test_hopper_kernels_come_first_and_give_reasons():
    """sm_90 without the letter has no wgmma. The sm80 family serves what the sm90 family lacks."""
    plain = problem(mask="causal", arch="sm_90a")
    assert select.select(plain).family == "sm90"
    assert select.select(dataclasses.replace(plain, arch="sm_90")).family == "sm80"
    biased = problem(
        "backward", head_dim=256, arch="sm_90a", bias=AskedBias("16"), needs_grad=("bias",)
    )
    assert select.select(biased).family == "sm80"
    refused = [reasons for spec, reasons in select.explain(biased) if spec.family == "sm90"]
    reason = "it computes the gradient of this bias only with that of the query"
    assert reason in itertools.chain(*refused)
    assert select.select(dataclasses.replace(biased, needs_grad=("query", "bias"))).family == "sm90"


@pytest.mark.parametrize(
    ("head_dim", "bias", "pairs"), [(64, "32", 4), (128, "16", 6), (128, "32", 4), (256, "32", 4)]
)
def test_hopper_has_a_dbias_kernel_for_broadcast_biases(head_dim, bias, pairs):
    needs_grad = ("query", "key", "value", "bias")
    asked = problem(
        "backward",
        head_dim=head_dim,
        arch="sm_90a",
        bias=AskedBias(bias, "common"),
        needs_grad=needs_grad,
    )
    spec = select.select(asked)
    assert (spec.family, gradient(spec)) == ("sm90", "dbias_kernel")
    assert dbias_bytes_and_stages(spec)[1] == pairs
    *_, recompute = spec.entry_points
    side = max(spec.tile.query, spec.tile.key)
    assert (recompute.grid.most_per_sm, recompute.takes_maps) == (1, True)
    of_bias = dataclasses.replace(SIZES, bias_gradient=(3, 2))
    squares = ceil_div(SIZES.queries, side) * ceil_div(SIZES.keys, side)
    assert recompute.grid.ctas(of_bias) == 3 * 2 * squares
    assert recompute.shared_bytes <= gpu.SM90.shared_bytes(blocks=1)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "bias", "buffers"),
    [
        (192, 128, None, (3, 2)),
        (192, 192, None, (3, 1)),
        (256, 128, None, (3, 1)),
        (256, 256, None, (2, 2)),
        (192, 128, "16", (3, 2)),
        (192, 192, "16", (2, 2)),
        (256, 256, "16", (2, 1)),
        (256, 256, "32", (2, 2)),  # which TMA does not copy
    ],
)
def test_the_dkdv_kernel_has_as_many_buffers_as_fit(head_dim, value_dim, bias, buffers):
    asked = {"bias": bias and AskedBias(bias)}
    spec = select.select(problem("backward", "bf16", head_dim, value_dim, "sm_90a", **asked))
    assert isinstance(spec.kernel, FmhaBwdTwoKernelSm90)
    _, found = spec.kernel.dkdv_bytes_and_buffers(spec)
    assert dataclasses.astuple(found) == buffers
    assert spec.shared_bytes <= gpu.SM90.shared_bytes(blocks=1)
    assert f"kQBlockStages = {buffers[0]};" in emit.source(spec)


@pytest.mark.parametrize(
    ("bias", "changes", "tma"),
    [
        (AskedBias("16", "common"), {}, True),
        (AskedBias("16", "full"), {}, True),
        (AskedBias("16", "common", alignment=8), {}, False),
        (AskedBias("32", "common"), {}, False),
        (AskedBias("16", "columns"), {}, False),
        (AskedBias("16", "common"), {"head_dim": 256}, True),
        (AskedBias("16", "full"), {"head_dim": 256}, True),
        (AskedBias("16", "common"), {"direction": "forward", "needs_grad": ()}, False),
        (AskedBias("16", "common"), {"arch": "sm_80"}, False),
    ],
)
def test_hopper_copies_a_bias_with_aligned_rows_by_tma(bias, changes, tma):
    needs_grad = ("query", "key", "value", "bias")
    asked = problem("backward", arch="sm_90a", bias=bias, needs_grad=needs_grad)
    spec = select.select(dataclasses.replace(asked, **changes))
    assert spec.tma_bias == tma
    assert ("bias" in [box.name for box in spec.tensor_maps]) == tma
    assert f"kTmaBias = {str(tma).lower()};" in emit.source(spec)


@pytest.mark.parametrize(
    ("head_dim", "features", "family"),
    [
        (64, {"segments": True, "mask": "window", "soft_cap": True, "dropout": True}, "sm90"),
        (64, {"segments": True, "boolean": True, "soft_cap": True, "dropout": True}, "sm90"),
        (64, {"segments": True, "bias": AskedBias("32"), "soft_cap": True}, "sm90"),
        (64, {"boolean": True, "bias": AskedBias("32")}, "sm90"),
        (80, {"boolean": True, "bias": AskedBias("16")}, "sm80"),
        (128, {"segments": True, "mask": "causal", "soft_cap": True}, "sm90"),
        (128, {"segments": True, "bias": AskedBias("16"), "dropout": True}, "sm90"),
        (128, {"segments": True, "boolean": True, "dropout": True}, "sm90"),
        (128, {"segments": True, "soft_cap": True, "dropout": True}, "sm80"),
        (128, {"boolean": True, "soft_cap": True}, "sm80"),
        (192, {"segments": True, "boolean": True, "packed": True}, "sm90"),
        (192, {"boolean": True, "soft_cap": True, "dropout": True}, "sm90"),
        (256, {"segments": True, "boolean": True, "dropout": True}, "sm90"),
        (256, {"segments": True, "mask": "causal", "soft_cap": True}, "sm90"),
        (256, {"mask": "causal", "soft_cap": True, "dropout": True}, "sm80"),
    ],
)
def test_hopper_backward_supports_masks_if_registers_suffice(head_dim, features, family):
    spec = select.select(problem("backward", head_dim=head_dim, arch="sm_90a", **features))
    assert spec.family == family
    assert spec[SEGMENTS] == features.get("segments", False)
    assert spec[BOOLEAN] == features.get("boolean", False)


def test_hopper_source_takes_tensor_maps():
    spec = select.select(problem("backward", head_dim=64, arch="sm_90a"))
    source = emit.source(spec)
    assert "const __grid_constant__ memeff::BackwardMaps maps" in source
    assert "memeff::FmhaBackwardPreprocess<Config, memeff::BackwardTilesSm90<Config>>" in source
    assert [box.name for box in spec.tensor_maps][:3] == ["query", "key", "value"]
    preprocess, main, postprocess = spec.entry_points
    # The producer is a warpgroup of the main kernel alone.
    assert preprocess.threads == postprocess.threads == main.threads - 128


def divided(rows: int, columns: int) -> AskedFunctions:
    """``array[q // rows, k // columns]``, as lists of KV blocks are."""
    values = (
        Value("query", "int32"),
        Value("constant", "int32", (), (("value", rows),)),
        Value("div", "int32", (0, 1)),
        Value("key", "int32"),
        Value("constant", "int32", (), (("value", columns),)),
        Value("div", "int32", (3, 4)),
        Value("read", "bool", (2, 5), (("array", 0), ("mode", "clip"))),
    )
    return AskedFunctions(None, Program(values, (6,), (CapturedType("bool", 2),)))


@pytest.mark.parametrize(
    ("head_dim", "block", "tile"),
    [
        (64, (128, 128), (128, 128)),
        (64, (256, 64), (128, 128)),
        (64, (64, 64), (192, 128)),
        (64, (100, 128), (192, 128)),
        (192, (128, 128), (128, 64)),
        (192, (128, 48), (128, 112)),
        (256, (64, 64), (128, 64)),
        (256, (64, 60), (128, 80)),
    ],
    ids=str,
)
def test_tiles_do_not_cut_the_blocks_of_a_mask_function(head_dim, block, tile):
    """This holds if its blocks are multiples of 64; no tile fits other blocks."""
    asked = problem(head_dim=head_dim, arch="sm_90a", functions=divided(*block))
    spec = select.select(asked)
    assert (spec.tile.query, spec.tile.key) == tile
