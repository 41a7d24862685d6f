"""Spec → source: pure Python, without jax, a compiler or a GPU."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
from problems import PARTS, access, problem

from jax_memeff import config
from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import emit, features, gpu, select
from jax_memeff.codegen.features import AskedBias
from jax_memeff.codegen.features.bias import gradient
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.toolchain import compile as compiler

ROOT = Path(__file__).parents[2]


GOLDEN = ROOT / "tests/golden"


FORWARD = """\
#include <kernels/sm80/forward.cuh>

struct Config {
  using Element = cutlass::bfloat16_t;
  static constexpr int kHeadDim = 192;
  static constexpr int kValueDim = 128;
  static constexpr int kTileQuery = 64;
  static constexpr int kTileKey = 64;
  static constexpr int kWarps = 4;
  static constexpr int kBlocksPerSm = 2;
  static constexpr bool kStageRegisters = false;
  static constexpr int kColumnWarps = 1;
  static constexpr int kAlignment = 16;
  static constexpr auto kMask = memeff::MaskKind::causal;
  static constexpr bool kPacked = false;
  static constexpr int kPageSize = 0;
  static constexpr bool kFloat8Pages = false;
  static constexpr int kSegmentKeys = 0;
  static constexpr bool kPositions = false;
  static constexpr bool kBroadcastBatch = false;
  static constexpr bool kSegments = false;
  static constexpr bool kBoolean = false;
  static constexpr bool kSoftCap = true;
  static constexpr bool kScoreFunction = false;
  static constexpr bool kMaskFunction = false;
  static constexpr bool kFunctionGradient = false;
  static constexpr bool kDropout = false;
  static constexpr bool kBias = false;
  static constexpr bool kSinks = false;
  static constexpr bool kRowMaxima = false;
  using Params = memeff::ForwardParams;
  static constexpr bool kTokenGrid = false;
  static constexpr bool kBlockMask = false;
};

using Kernel = memeff::FmhaForwardSm80<Config>;
static_assert(Kernel::kThreads == 128);
static_assert(Kernel::kSharedBytes == 65536);
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Config::kBlocksPerSm)
fmha_fwd_bf16_d192v128_64x64_causal_softcap_sm80(const __grid_constant__ memeff::ForwardParams params) {
  memeff::let_next_kernel_start();
  memeff::wait_for_kernel_before();
  Kernel::run(params);
}
"""  # noqa: E501


@functools.cache
def closure(arch):
    """The closure of ``select``, computed once: it takes three seconds."""
    return list(select.closure(arch))


@pytest.mark.parametrize("arch", PARTS)
def test_table_is_the_golden_one(arch, monkeypatch):
    specs = closure(arch)
    monkeypatch.setattr(select, "closure", {arch: specs}.get)
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
    (reason,) = select.spec_reasons(every, problem("backward", head_dim=64, needs_grad=needs_grad))
    assert reason.startswith("it computes the gradients of query, key, value, not of ")


@pytest.mark.parametrize("layout", ["full", "common", "columns"])
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
    reasons = select.spec_reasons(constant, asked)
    assert reasons == [f"its bias gradient is none, not {layout}"]


def test_a_broadcast_bias_has_the_forward_of_a_full_one():
    full, shared = (
        select.select(problem(bias=AskedBias("16", layout))) for layout in ("full", "common")
    )
    assert full == shared


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_rows_of_a_bias_that_are_not_aligned_are_read_by_words(alignment):
    asked = problem(bias=AskedBias("16", alignment=alignment))
    spec = select.select(asked)
    assert access(spec) == "words" and spec.name.endswith("bias16words_sm80")
    assert spec == select.select(problem(bias=AskedBias("16", alignment=2)))
    (reason,) = select.spec_reasons(select.select(problem(bias=AskedBias("16"))), asked)
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
        specs = closure(arch)
        # The order is fixed, because no two have the same key.
        keys = [spec.sort_key for spec in specs]
        assert keys == sorted(keys) and len(set(keys)) == len(keys)
        assert len({spec.name for spec in specs}) == len({emit.source(spec) for spec in specs})
        # sm_75 has float16 only. Some float32 backwards from head dim 192 on are large-dim kernels.
        count = {"sm_75": 311, "sm_86": 1142, "sm_90": 1265, "sm_90a": 1875}.get(arch, 1268)
        assert len(set(specs)) == len(specs) == count


@pytest.mark.parametrize("needs_grad", [("bias",), ("query", "bias"), ("value", "bias")])
def test_the_bias_gradient_of_large_dims_is_in_dkdv_or_in_a_dbias_kernel(needs_grad):
    asked = problem("backward", "f16", 264, bias=AskedBias("16", "common"), needs_grad=needs_grad)
    spec = select.select(asked)
    names = [entry.name.removeprefix(f"{spec.name}_") for entry in spec.entry_points]
    query = ["dq"] * ("query" in needs_grad)
    assert names == ["preprocess", *query, "dkdv", "dbias_postprocess"]
    ordered = {**dict(asked.features), "deterministic": True}
    spec = select.select(dataclasses.replace(asked, features=ordered))
    names = [entry.name.removeprefix(f"{spec.name}_") for entry in spec.entry_points]
    assert names == ["preprocess", *query, *(["dkdv"] * ("value" in needs_grad)), "dbias"]


def test_arrays_of_features_are_listed_once():
    roles = [operand.role for operand in features.operands()]
    assert len(set(roles)) == len(roles) and {"query", "bias", "query_lengths"} <= set(roles)
    broadcast = {operand.role for operand in features.operands() if operand.broadcast_by_vmap}
    captured = {"captured", "mask_captured"}
    assert broadcast == {"key", "value", "bias", "boolean", "bits", "key_lists", "sinks", *captured}


@pytest.mark.quick
def test_kernels_are_paired_with_device_files():
    folder = ROOT / "codegen"
    for kernel in KERNELS:
        assert (folder / kernel.device_file).is_file()
        assert type(kernel).__module__.endswith(f".kernels.{kernel.stem.replace('/', '.')}")


def test_resources_of_a_log_in_the_order_of_the_names():
    log = """\
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Used 10 registers"""
    assert compiler.parse(log, ["first", "second", "third"]) == [
        compiler.Resource("first", 10, 0, 0, 0),
        compiler.Resource("second", 255, 8, 12, 1024),
    ]
    (warning,) = compiler.warnings(log)
    assert "(C7510)" in warning


@pytest.mark.quick
def test_architectures():
    assert [archs.of_capability(*pair) for pair in ((7, 5), (9, 0), (10, 0), (12, 0))] == [
        "sm_75", "sm_90a", "sm_100a", "sm_120",
    ]  # fmt: skip
    assert gpu.of("sm_100a") is gpu.of("sm_90")
    assert gpu.of("sm_120") is gpu.of("sm_89") is gpu.of("sm_131")


def test_ptx_has_the_kernels_of_its_architecture():
    """PTX must run on later GPUs, so it cannot use instructions that only Hopper has."""
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


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_header_asserts_the_fields_that_a_feature_fills(direction):
    """The host compiler checks the offsets, because NVRTC 13.0 has no ``offsetof``."""
    fields = select.select(problem(direction, dropout=True)).params_fields
    header = (ROOT / "ffi/include/memeff/params.h").read_text()
    asserted = re.findall(r"^MEMEFF_FIELD\((\S+), (\d+)\);$", header, re.MULTILINE)
    assert [(field.path, str(field.offset)) for field in fields] == asserted
    assert not select.select(problem(direction)).params_fields
