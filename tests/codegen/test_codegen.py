"""Problem → spec → source: pure Python, without jax, a compiler or a GPU."""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from jax_memeff import config
from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import emit, features, gpu, select, strategy, support
from jax_memeff.codegen.features import BIAS, FEATURES, AskedBias
from jax_memeff.codegen.features.bias import gradient
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.kernels.families import LARGE_DIM, MmaTile
from jax_memeff.codegen.kernels.fmha_fwd_split_sm80 import Tile as SplitTile
from jax_memeff.codegen.problem import DIRECTIONS, Problem
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import SPEC_DTYPES
from jax_memeff.codegen.strategy import Strategy
from jax_memeff.codegen.toolchain import resources
from jax_memeff.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
PARTS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_90a")

FORWARD = """\
#include <memeff/kernels/fmha_fwd_sm80.cuh>

struct Config {
  using Element = cutlass::bfloat16_t;
  static constexpr int kHeadDim = 192;
  static constexpr int kValueDim = 128;
  static constexpr int kTileQuery = 128;
  static constexpr int kTileKey = 64;
  static constexpr int kWarps = 8;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kStageRegisters = false;
  static constexpr int kAlignment = 16;
  static constexpr auto kMask = memeff::MaskKind::causal;
  static constexpr bool kVarlen = false;
  static constexpr bool kPositions = false;
  static constexpr bool kBroadcastBatch = false;
  static constexpr bool kSegments = false;
  static constexpr bool kBoolean = false;
  static constexpr bool kSoftCap = true;
  static constexpr bool kDropout = false;
  static constexpr bool kBias = false;
  static constexpr bool kSinks = false;
  static constexpr bool kRowMaxima = false;
  static constexpr bool kBlockMask = false;
};

using Kernel = memeff::FmhaForwardSm80<Config>;
static_assert(Kernel::kThreads == 256);
static_assert(Kernel::kSharedBytes == 90112);
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Config::kBlocksPerSm)
fmha_fwd_bf16_d192v128_128x64_causal_softcap_sm80(const __grid_constant__ memeff::ForwardParams params) {
  memeff::let_next_kernel_start();
  memeff::wait_for_kernel_before();
  Kernel::run(params);
}
"""  # noqa: E501


def problem(
    direction: Any = "forward",
    dtype: Any = "bf16",
    head_dim: int = 128,
    value_dim: int | None = None,
    arch: str = "sm_90",
    needs_grad: Any = (),
    sequence: Any = None,
    **asked: Any,
) -> Problem:
    """``asked`` are features."""
    value_dim = head_dim if value_dim is None else value_dim
    return Problem(direction, dtype, head_dim, value_dim, arch, asked, needs_grad, sequence)


def access(spec):
    """The way in which kernels read a bias."""
    assert spec[BIAS] is not None
    return spec[BIAS].access


def is_large(spec):
    return "large_dim" in spec.kernel.stem


@pytest.mark.parametrize("arch", PARTS)
def test_table_is_the_golden_one(arch):
    file = GOLDEN / f"kernels_{arch}.txt"
    assert select.table(arch) == file.read_text(), (
        f"the table of kernels changed. When that was meant: python -m jax_memeff kernels "
        f"--arch {arch} > tests/golden/{file.name}"
    )


@pytest.mark.quick
def test_source_is_exactly_this():
    spec = select.select(problem(head_dim=192, value_dim=128, mask="causal", soft_cap=True))
    assert emit.source(spec) == FORWARD


def test_backward_source_has_three_kernels():
    spec = select.select(problem("backward", "f16", mask="window"))
    source = emit.source(spec)
    names = [entry.name for entry in spec.entry_points]
    assert names == [f"{spec.name}_preprocess", spec.name, f"{spec.name}_postprocess"]
    positions = [source.index(f"{name}(const __grid_constant__") for name in names]
    assert positions == sorted(positions)
    assert source.count("memeff::BackwardParams params") == 3
    assert "using Element = cutlass::half_t;" in source
    assert "kMask = memeff::MaskKind::window;" in source
    assert f"static_assert(Kernel::kSharedBytes == {spec.shared_bytes});" in source


@pytest.mark.parametrize("needs_grad", [("query",), ("value", "key"), ("value",)])
def test_backward_computes_only_needed_gradients(needs_grad):
    spec = select.select(problem("backward", head_dim=64, needs_grad=needs_grad))
    source = emit.source(spec)
    for name in ("query", "key", "value"):
        is_needed = str(name in needs_grad).lower()
        assert f"static constexpr bool k{name.capitalize()}Gradient = {is_needed};" in source
    # The postprocess rounds the sums of dq.
    assert ("_postprocess(" in source) == ("query" in needs_grad) == (len(spec.entry_points) == 3)
    every = select.select(problem("backward", head_dim=64))
    assert spec.name != every.name
    (reason,) = support.spec_reasons(every, problem("backward", head_dim=64, needs_grad=needs_grad))
    assert reason.startswith("it computes the gradients of query, key, value, not of ")


@pytest.mark.parametrize("layout", ["full", "shared", "columns"])
@pytest.mark.parametrize("bits", ["16", "32"])
def test_bias_and_its_gradient(bits, layout):
    needs_grad = ("query", "key", "value", "bias")
    asked = problem("backward", bias=AskedBias(bits, layout), needs_grad=needs_grad)
    spec = select.select(asked)
    source = emit.source(spec)
    assert f"using BiasElement = {'float' if bits == '32' else 'cutlass::bfloat16_t'};" in source
    access = "columns" if layout == "columns" else "vectors"
    assert f"kBiasAccess = memeff::BiasAccess::{access};" in source
    assert f"kBiasGradient = memeff::BiasGradient::{layout};" in source
    # A gradient that is summed is rounded at the end; a full one is written directly.
    assert (spec.entry_points[-1].name == f"{spec.name}_dbias_postprocess") == (layout != "full")
    constant = select.select(problem("backward", bias=AskedBias(bits, layout)))
    assert "kBiasGradient = memeff::BiasGradient::none;" in emit.source(constant)
    reasons = support.spec_reasons(constant, asked)
    assert reasons == [f"its bias gradient is none, not {layout}"]


def test_a_broadcast_bias_has_the_forward_of_a_full_one():
    full, shared = (
        select.select(problem(bias=AskedBias("16", layout))) for layout in ("full", "shared")
    )
    assert full == shared


def test_few_query_rows_split_the_keys():
    few = Strategy(query_rows="16")
    spec = select.select(problem(), few)
    assert isinstance(spec.tile, SplitTile)
    assert spec.kernel.splits_keys and spec.tile.query == 16
    source = emit.source(spec)
    for line in (
        "#include <memeff/kernels/fmha_fwd_split_sm80.cuh>",
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
    (reason,) = support.spec_reasons(spec, problem())
    assert reason.startswith("it splits the keys")
    (reason,) = support.spec_reasons(spec, problem(), Strategy(query_rows="64"))
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
    ],
)
def test_heads_of_a_group_share_a_tile(features, packs):
    asked = problem(**features)
    assert select.select(asked, Strategy(query_rows="16")).pack_heads == packs
    four, sixteen = (
        Sizes(batch=64, queries=4, keys=4096, heads=32, key_heads=heads) for heads in (8, 2)
    )
    assert strategy.query_rows(asked, four, 132) == "16"
    assert strategy.query_rows(asked, sixteen, 132) == ("64" if packs else "16")


def test_row_counts_of_split_kernels():
    def rows(batch, queries, heads, group, keys=1024, multiprocessors=132, **asked):
        key_heads = heads // group
        sizes = Sizes(batch=batch, queries=queries, keys=keys, heads=heads, key_heads=key_heads)
        return strategy.query_rows(problem(**asked), sizes, multiprocessors)

    assert [rows(64, queries, 8, 1) for queries in (1, 16, 17, 64, 65)] == [
        "16", "16", "64", "64", None,
    ]  # fmt: skip
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
    # Heads that share a tile where keys are split would each have one of their own.
    assert [rows(2, 20, 8, group, 1200, **hopper) for group in (1, 8)] == ["consumer_groups", "64"]
    # A GPU with fewer multiprocessors has tiles enough sooner.
    assert rows(1, 1024, 8, 1, multiprocessors=58) is None
    # Packed sequences do not split their keys.
    assert rows(4, 128, 8, 1, 32768, varlen=True, **hopper) == "consumer_groups"
    assert rows(4, 128, 8, 1, varlen=True) is None


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_rows_of_a_bias_that_are_not_aligned_are_read_by_words(alignment):
    asked = problem(bias=AskedBias("16", alignment=alignment))
    spec = select.select(asked)
    assert access(spec) == "words" and spec.name.endswith("bias16words_sm80")
    assert spec == select.select(problem(bias=AskedBias("16", alignment=2)))
    (reason,) = support.spec_reasons(select.select(problem(bias=AskedBias("16"))), asked)
    assert reason == "it reads a bias by vectors, not by words"
    for layout in ("columns", "rows"):
        broadcast = problem(bias=AskedBias("16", layout, alignment))
        assert access(select.select(broadcast)) == layout


def test_a_bias_with_one_number_per_row_needs_no_shared_memory():
    plain = select.select(problem(head_dim=64, dropout=True))
    spec = select.select(problem(head_dim=64, dropout=True, bias=AskedBias("32", "rows")))
    assert spec.shared_bytes == plain.shared_bytes
    bias = AskedBias("16", "rows")
    backward = problem("backward", bias=bias, needs_grad=("query", "bias"))
    assert gradient(select.select(backward)) == "none"


def test_run_time_values_do_not_change_the_source():
    plain = problem(head_dim=128)
    others = [
        problem(head_dim=104),
        problem(sequence=4096),
        problem(lengths=True),
    ]
    assert {emit.source(select.select(other)) for other in [plain, *others]} == {
        emit.source(select.select(plain))
    }


def test_equal_specs_have_equal_sources_and_names_differ_with_the_source():
    for arch in PARTS:
        specs = list(select.closure(arch))
        assert specs == list(select.closure(arch))
        assert len({spec.name for spec in specs}) == len({emit.source(spec) for spec in specs})
        # float16 only on sm_75; some float32 backwards from head dim 192 on are large-dim kernels.
        count = {"sm_75": 307, "sm_86": 1134, "sm_90a": 1229}.get(arch, 1260)
        assert len(set(specs)) == len(specs) == count


@pytest.mark.parametrize(
    "features", [{}, {"bias": AskedBias("16")}, {"bias": AskedBias("32")}], ids=str
)
@pytest.mark.parametrize("arch", PARTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_pair_of_head_dims_has_a_kernel(arch, direction, features):
    # Dims are padded to multiples of 32: each of those and the one after the one before.
    sizes = [size for end in range(32, 257, 32) for size in (end - 24, end)]
    for head_dim, value_dim in itertools.product(sizes, repeat=2):
        dims = {"head_dim": head_dim, "value_dim": value_dim}
        spec = select.select(problem(direction, "f16", **dims, arch=arch, **features))
        assert head_dim <= spec.padded_head_dim and value_dim <= spec.padded_value_dim
        assert spec.shared_bytes <= gpu.of(arch).max_shared_bytes
        assert spec.threads * spec.tile.blocks_per_sm <= 1024
        # Every block on an SM also takes 1 KB for the system, from sm_80 on.
        system = 0 if arch == "sm_75" else 1024
        shared = spec.tile.blocks_per_sm * (spec.shared_bytes + system)
        assert shared <= gpu.of(arch).max_shared_bytes + system


@pytest.mark.parametrize(
    ("dims", "alignment"),
    [((7, 7), 2), ((66, 64), 4), ((64, 66), 4), ((100, 72), 8), ((24, 56), 16), ((1, 256), 2)],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_begin_at_what_the_dims_allow(direction, dims, alignment):
    asked = problem(direction, "f16", *dims)
    spec = select.select(asked)
    assert spec.alignment == asked.alignment == alignment
    assert f"kAlignment = {alignment};" in emit.source(spec)
    assert (f"_align{alignment}_" in spec.name) == (alignment < 16)
    aligned = dataclasses.replace(spec, alignment=16)
    reasons = [f"it moves 16 bytes at a time, and rows begin at multiples of {alignment}"]
    assert support.spec_reasons(aligned, asked) == (reasons if alignment < 16 else [])


@pytest.mark.parametrize("arch", PARTS[1:])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["f32", "tf32"])
def test_every_pair_of_float32_head_dims_has_a_kernel(arch, direction, dtype):
    widest = 128 if (arch, direction) == ("sm_86", "backward") else 256
    for head_dim, value_dim in itertools.product((*range(1, 256, 15), 128, 256, 257), repeat=2):
        spec = select.select(problem(direction, dtype, head_dim, value_dim, arch))
        assert is_large(spec) == (max(head_dim, value_dim) > widest)
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
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "features", [{}, {"varlen": True}, {"bias": AskedBias("16")}, {"bias": AskedBias("32")}]
)
def test_large_dim_kernels_support_packed_sequences_and_biases(arch, dtype, direction, features):
    if dtype != "f16" and "bias" in features:
        features = {"bias": AskedBias("32")}  # float32 inputs have no other
    spec = select.select(problem(direction, dtype, 257, 8, arch, **features))
    assert is_large(spec)
    assert spec[BIAS] is None or access(spec) == "elements"
    assert "elements" not in spec.name  # large-dim kernels read them in no other way
    broadcast = problem(direction, "f16", 257, 8, arch, bias=AskedBias("16", "columns"))
    assert access(select.select(broadcast)) == "columns"


def test_large_dim_kernels_serve_problems_without_a_tile():
    asked = problem("backward", "f16", 256, arch="sm_75", bias=AskedBias("16"))
    assert is_large(select.select(asked))
    assert not is_large(select.select(dataclasses.replace(asked, head_dim=192, value_dim=192)))


@pytest.mark.parametrize("needs_grad", [("bias",), ("query", "bias"), ("value", "bias")])
def test_the_bias_gradient_of_large_dims_is_in_dkdv_or_in_a_dbias_kernel(needs_grad):
    asked = problem("backward", "f16", 264, bias=AskedBias("16", "shared"), needs_grad=needs_grad)
    spec = select.select(asked)
    names = [entry.name.removeprefix(f"{spec.name}_") for entry in spec.entry_points]
    query = ["dq"] * ("query" in needs_grad)
    assert names == ["preprocess", *query, "dkdv", "dbias_postprocess"]
    ordered = {**dict(asked.features), "deterministic": True}
    spec = select.select(dataclasses.replace(asked, features=ordered))
    names = [entry.name.removeprefix(f"{spec.name}_") for entry in spec.entry_points]
    assert names == ["preprocess", *query, *(["dkdv"] * ("value" in needs_grad)), "dbias"]


def test_every_tile_has_a_reason():
    for kernel, arch, dtype in itertools.product(KERNELS, PARTS, SPEC_DTYPES):
        for row in kernel.rows(problem(kernel.direction, dtype, arch=arch)):
            assert len(row.tile.reason) > 3
            assert isinstance(row.tile, MmaTile) == (kernel.family == "sm80")


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_makes_kernels_of_its_own_and_says_why_others_do_not_fit(feature):
    # Only a backward has sums, and sinks change one only if it computes their gradient.
    direction = "backward" if feature.name == "deterministic" else "forward"
    plain = problem(direction, head_dim=64)
    without = select.select(plain)
    for alone in feature.alone:
        asked = dataclasses.replace(plain, features=alone)
        spec = select.select(asked)
        assert spec[feature] != without[feature]
        assert spec.name != without.name and emit.source(spec) != emit.source(without)
        assert feature.words(asked[feature]) in str(asked)
        assert support.spec_reasons(without, asked) and support.spec_reasons(spec, plain)
    parser = argparse.ArgumentParser()
    feature.add_flags(parser)
    assert feature.from_flags(parser.parse_args([])) == feature.off == plain[feature]


def test_arrays_of_features_are_listed_once():
    roles = [operand.role for operand in features.operands()]
    assert len(set(roles)) == len(roles) and {"query", "bias", "query_lengths"} <= set(roles)
    broadcast = {operand.role for operand in features.operands() if operand.broadcast_by_vmap}
    assert broadcast == {"key", "value", "bias", "boolean", "sinks"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_source_asserts_the_fields_that_a_feature_fills(direction):
    spec = select.select(problem(direction, dropout=True))
    source = emit.source(spec)
    for field in spec.params_fields:
        name = f"memeff::{direction.capitalize()}Params, {field.path}"
        assert f"static_assert(__builtin_offsetof({name}) == {field.offset});" in source
    assert len(spec.params_fields) == 5
    assert not select.select(problem(direction)).params_fields


def test_row_maxima_are_those_of_a_forward_that_does_not_split_the_keys():
    asked = problem(head_dim=64, row_maxima=True)
    sizes = Sizes(batch=1, queries=1, keys=4096, heads=8, key_heads=8)
    assert strategy.choose(problem(head_dim=64), sizes, 132).query_rows == "16"
    assert strategy.choose(asked, sizes, 132) == strategy.PLAIN
    on_hopper = dataclasses.replace(asked, arch="sm_90a")
    assert strategy.choose(on_hopper, sizes, 132).query_rows == "consumer_groups"
    reasons = [
        why for spec, why in select.explain(asked, Strategy("16")) if spec.kernel.splits_keys
    ]
    assert reasons and all("merges no maxima" in "; ".join(why) for why in reasons)
    backward = problem("backward", head_dim=64)
    assert select.select(dataclasses.replace(backward, features={"row_maxima": True})) == (
        select.select(backward)
    )


@pytest.mark.quick
def test_kernels_are_paired_with_device_files():
    folder = ROOT / "ffi/include/memeff/kernels"
    for kernel in KERNELS:
        assert (folder / f"{kernel.stem}.cuh").is_file()
        assert type(kernel).__module__.endswith(f".{kernel.stem}")


ONLY_LARGE_DIM = {
    ("sm_75", "f16", "backward", 256),
    ("sm_86", "f32", "backward", 192),
    ("sm_86", "f32", "backward", 256),
}
"""What shared memory is too small for."""


@pytest.mark.parametrize(
    "features", [{}, {"bias": AskedBias("32")}, {"soft_cap": True, "dropout": True}]
)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_tuned_dims_are_not_padded_further(dtype, features):
    """A tile that cannot be arranged would pad its problems further unnoticed."""
    sm80_only = [arch for arch in PARTS if arch != gpu.WGMMA_ARCH]
    for arch, direction in itertools.product(sm80_only, DIRECTIONS):
        for dims in select.TUNED_DIMS:
            asked = problem(direction, dtype, *dims, arch, **features)
            if not support.family_reasons(asked):
                spec = select.select(asked)
                is_large_dim = (arch, dtype, direction, max(dims)) in ONLY_LARGE_DIM
                expected = (LARGE_DIM, LARGE_DIM) if is_large_dim else dims
                assert (spec.padded_head_dim, spec.padded_value_dim) == expected


@pytest.mark.quick
def test_selection_is_the_first_without_reasons():
    asked = problem("backward", head_dim=32, value_dim=256, arch="sm_80")
    explained = select.explain(asked)
    assert [spec.sort_key for spec, _ in explained] == sorted(s.sort_key for s, _ in explained)
    fitting = [spec for spec, reasons in explained if not reasons]
    assert select.select(asked) == fitting[0]
    refused = {spec.name: reasons for spec, reasons in explained}
    assert refused["fmha_bwd_bf16_d32v256_32x64_sm80"] == ["8 warps cannot share its 32x32 dq"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "window", "lengths": True},
        {"segments": True, "boolean": True, "soft_cap": True, "dropout": True},
        {"bias": AskedBias("32", "shared")},
        {"bias": AskedBias("16", "rows", 2)},
        {"varlen": True, "mask": "causal"},
        {"head_dim": 20, "value_dim": 200},
        {"head_dim": 7, "value_dim": 7},
        {"head_dim": 320},
        {"dtype": "f32"},
    ],
    ids=str,
)
def test_every_rejected_kernel_of_every_family_has_its_reasons(direction, changes):
    """Those before the chosen one; no reason is said of a kernel twice."""
    asked = problem(direction, arch="sm_90a", **changes)
    explained = select.explain(asked)
    families = {spec.family for spec, _ in explained}
    mma_alone = asked.dtype == "f32" and direction == "backward"
    assert families == ({"sm80"} if mma_alone else {"sm80", "sm90"})
    chosen = [spec for spec, _ in explained].index(select.select(asked))
    for index, (_, reasons) in enumerate(explained):
        assert bool(reasons) if index < chosen else index > chosen or not reasons
        assert all(len(reason.split()) > 2 for reason in reasons)
        assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "sm_70"}, "sm_70 is older than sm_75"),
        ({"arch": "sm_75"}, "the tensor cores of sm_75 do not multiply bfloat16: cast to float16"),
        ({"arch": "sm_75", "dtype": "f32"}, "the tensor cores of sm_75 do not multiply float32"),
        (
            {"dtype": "f32", "bias": AskedBias("16")},
            "a 16-bit bias with float32 inputs has no kernel",
        ),
        ({"dtype": "f64"}, "float64 has no kernel"),
        ({"head_dim": 65537}, "head_dim is 65537, and the largest with a kernel is 65536"),
    ],
)
def test_unsupported_problems_name_the_remedy(changes, said):
    with pytest.raises(UnsupportedError) as raised:
        select.select(problem(**changes))
    inputs, *reasons = raised.value.reasons
    assert inputs == f"asked for: {problem(**changes)}"
    assert any(said in reason for reason in reasons)
    assert all("implementation='xla'" in reason for reason in reasons)
    assert all(reasons for _, reasons in select.explain(problem(**changes)))


def test_reasons_of_a_spec_name_what_differs():
    features = {"mask": "causal", "segments": True, "soft_cap": True, "dropout": True}
    asked = problem("backward", "f16", **features)
    spec = select.select(problem(head_dim=64))
    assert support.unsupported_reasons(spec, asked) == [
        "it is a forward kernel, not a backward one",
        "it is for bf16, not f16",
        "its mask is none, not causal",
        "it is compiled without segments",
        "it is compiled without soft cap",
        "it is compiled without dropout",
        "head_dim 128 is above its 64",
        "value_dim 128 is above its 64",
    ]
    large = dataclasses.replace(spec, tile=dataclasses.replace(spec.tile, key=2048))
    (reason,) = support.spec_reasons(large, problem(head_dim=64, arch="sm_86"))
    assert "bytes of shared memory, and a block on sm_86 has 50176 when 2 share an SM" in reason


def test_when_specs_alone_refuse_the_error_lists_them(monkeypatch):
    monkeypatch.setattr(select, "spec_reasons", lambda *_: ["it is Tuesday"])
    with pytest.raises(UnsupportedError, match="fmha_fwd_bf16_d32_128x128_sm80: it is Tuesday"):
        select.select(problem())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"direction": "sideways"},
        {"mask": "top_left"},
        {"soft_cap": 2.0},
        {"bias": "16"},
        {"no_feature": True},
        {"arch": "90"},
        {"head_dim": 0},
        {"needs_grad": ("keys",)},
    ],
)
def test_impossible_problems_raise_value_error(changes):
    with pytest.raises(ValueError, match=r"expected .* got"):
        problem(**changes)


def test_closure_takes_dims_that_are_not_tuned():
    names = {spec.name for spec in select.closure("sm_80", dtypes=["f16"], dims=[(80, 40)])}
    features = "window_varlen_positions_vmap_segments_boolean_softcap_dropout_bias32_sinks_rowmax"
    assert f"fmha_fwd_f16_d96v64_64x64_{features}_sm80" in names
    with pytest.raises(UnsupportedError, match="head_dim is 70000"):
        list(select.closure("sm_80", dims=[(70000, 64)]))


def test_resources_of_a_log_in_the_order_of_the_names():
    log = """\
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Used 10 registers"""
    assert resources.parse(log, ["first", "second", "third"]) == [
        resources.Resource("first", 10, 0, 0, 0),
        resources.Resource("second", 255, 8, 12, 1024),
    ]
    (warning,) = resources.warnings(log)
    assert "(C7510)" in warning


@pytest.mark.quick
def test_architectures():
    assert [archs.of_capability(*pair) for pair in ((7, 5), (9, 0), (10, 0), (12, 0))] == [
        "sm_75", "sm_90a", "sm_100a", "sm_120",
    ]  # fmt: skip
    assert gpu.of("sm_100a") is gpu.of("sm_90")
    assert gpu.of("sm_120") is gpu.of("sm_89") is gpu.of("sm_131")


def test_ptx_has_the_kernels_of_its_architecture():
    """Hopper's own instructions are not in PTX that later GPUs can run."""
    for arch, kernels in (("compute_80", "sm_80"), ("compute_90", "sm_90")):
        assert list(select.closure(arch, dims=[(64, 64)])) == list(
            select.closure(kernels, dims=[(64, 64)])
        )
    with pytest.raises(ValueError, match="expected the name of a GPU architecture"):
        archs.capability("compute_90a")


def test_config_reads_the_environment(monkeypatch, tmp_path):
    for name in ("JAX_MEMEFF_ARCHS", "JAX_MEMEFF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.archs() == ()
    assert config.cache_dir() == tmp_path / ".cache" / "jax_memeff"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_dir() == tmp_path / "xdg" / "jax_memeff"
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", "~/kernels")
    assert config.cache_dir() == tmp_path / "kernels"
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a, sm_80,sm_90a")
    assert config.archs() == ("sm_90a", "sm_80")
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "compute_80")
    assert config.archs() == ("compute_80",)
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "hopper")
    with pytest.raises(ValueError, match=r"expected JAX_MEMEFF_ARCHS .* got 'hopper'"):
        config.archs()
