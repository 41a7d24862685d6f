"""Which Hopper kernels serve float32 and large head dims."""

import pytest
from problems import ctas, key_tiles, problem, row_tiles

from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import PACKED, AskedBias
from jax_memeff.codegen.kernels.sm90.forward import Tile
from jax_memeff.codegen.kernels.sm90.large_dim_backward import FmhaBwdLargeDimSm90
from jax_memeff.codegen.strategy import PLAIN, Sizes, Strategy

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("head_dim", "features", "tile"),
    [
        (64, {}, (128, 128, 2)),
        (64, {"bias": AskedBias("32")}, (128, 64, 2)),
        (80, {"mask": "causal"}, (128, 64, 2)),
        (128, {"mask": "window", "segments": True, "boolean": True, "packed": True}, (128, 64, 2)),
        (128, {"bias": AskedBias("32"), "dropout": True, "soft_cap": True}, (128, 64, 1)),
        (128, {"bias": AskedBias("32", "columns")}, (128, 64, 2)),
    ],
)
def test_float32_forwards_are_split_into_float16_parts_on_hopper(head_dim, features, tile):
    spec = select.select(problem(dtype="f32", head_dim=head_dim, arch="sm_90a", **features))
    assert (spec.kernel.stem, spec.tensor_maps) == ("sm90/f16x3_forward", ())
    assert isinstance(spec.tile, Tile)
    assert (spec.tile.query, spec.tile.key, spec.tile.stages) == tile
    halve, main = spec.entry_points
    assert (halve.name, main.name) == (f"{spec.name}_split", spec.name)
    query, key, _ = tile
    operands = row_tiles(64) + 2 * (key // 64) * key_tiles(key)
    assert ctas(spec) == [operands, row_tiles(query, packed=spec[PACKED])]
    assert (halve.grid.most_per_sm, main.grid.most_per_sm) == (0, 1)
    source = emit.source(spec)
    assert "using Element = memeff::F16x3;" in source
    assert "ForwardMaps" not in source
    assert f"Kernel::kSharedBytes == {main.shared_bytes});" in source


@pytest.mark.parametrize(
    "features",
    [
        {"arch": "sm_90"},
        {"direction": "backward", "bias": AskedBias("32")},
        {"dtype": "tf32"},
        {"head_dim": 129},
        {"head_dim": 66},
        {"broadcast_batch": True},
    ],
    ids=str,
)
def test_other_float32_calls_are_not_split_into_float16_parts(features):
    asked = problem(**{"dtype": "f32", "head_dim": 64, "arch": "sm_90a", **features})
    assert select.select(asked).family == "sm80"


@pytest.mark.parametrize("strategy", [PLAIN, Strategy(mma_sync=True)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"head_dim": 96, "mask": "causal"},
        {"head_dim": 128, "value_dim": 40, "mask": "window", "soft_cap": True},
        {"packed": True, "dropout": True},
        {"segments": True, "boolean": True},
        {"head_dim": 66},
        {"head_dim": 129},
        {"broadcast_batch": True},
    ],
    ids=str,
)
def test_both_directions_of_a_float32_call_sum_scores_alike(features, strategy):
    """P = exp(S - logsumexp) has the difference between the two sums of S as a relative error."""
    asked = {"dtype": "f32", "head_dim": 64, "arch": "sm_90a", **features}
    forward, backward = (
        select.select(problem(direction, **asked), strategy)
        for direction in ("forward", "backward")
    )
    assert forward.family == backward.family


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        ({}, "sm80"),
        ({"queries": 16}, "sm80"),
        ({"queries": 17}, "sm90"),
        ({"key_heads": 16}, "sm90"),
        ({"batch": 2}, "sm90"),
        ({"query_tokens": 4, "key_tokens": 16384}, "sm90"),
    ],
    ids=str,
)
def test_float32_calls_that_read_keys_once_do_not_split_them(sizes, family):
    usual = {"batch": 4, "queries": 1, "keys": 4096, "heads": 32, "key_heads": 32}
    found = Sizes(**{**usual, **sizes})
    for direction in ("forward", "backward"):
        asked = problem(direction, "f32", 128, arch="sm_90a")
        assert select.select(asked, select.choose(asked, found, 132)).family == family


@pytest.mark.parametrize(
    ("needs_grad", "owners"),
    [
        (("query", "key", "value"), ["dq", "dkdv"]),
        (("query",), ["dq"]),
        (("key",), ["dkdv"]),
        (("value",), ["dkdv"]),
    ],
)
def test_a_3xfp16_backward_owns_its_gradients(needs_grad, owners):
    """So it has no sums, whose order would have to be fixed for deterministic results."""
    features = {"deterministic": True, "mask": "causal"}
    asked = problem("backward", "f32", 128, arch="sm_90a", needs_grad=needs_grad, **features)
    spec = select.select(asked)
    assert spec.kernel.stem == "sm90/f16x3_backward" and not spec.deterministic_dq
    names = [entry.name.removeprefix(f"{spec.name}_") for entry in spec.entry_points]
    assert names == ["split", "preprocess", *owners]


def test_a_3xfp16_kernel_says_that_it_supports_no_broadcast_batch():
    for direction in ("forward", "backward"):
        asked = problem(direction, "f32", arch="sm_90a", broadcast_batch=True)
        explained = select.explain(asked)
        refused = [reasons for spec, reasons in explained if "f16x3" in spec.kernel.stem]
        reason = "it splits its operands once for each batch index of the call"
        assert refused and all(reason in reasons for reasons in refused)


@pytest.mark.parametrize(
    ("dims", "features", "padded"),
    [
        ((264, 264), {}, (320, 384)),
        ((320, 8), {"mask": "window", "soft_cap": True}, (320, 384)),
        ((384, 384), {"packed": True}, (384, 384)),
        ((512, 512), {"segments": True, "boolean": True, "row_maxima": True}, (512, 512)),
        ((64, 512), {"sinks": True, "broadcast_batch": True}, (448, 512)),
        ((576, 512), {"mask": "causal", "positions": True}, (576, 512)),
        ((320, 520), {"soft_cap": True}, (768, 768)),
        ((584, 768), {"packed": True}, (768, 768)),
        ((1024, 8), {"mask": "window", "segments": True}, (1024, 1024)),
    ],
    ids=str,
)
def test_large_head_dims_on_hopper(dims, features, padded):
    asked = problem("forward", "f16", *dims, arch="sm_90a", **features)
    spec = select.select(asked)
    assert spec.kernel.stem == "sm90/large_dim_forward"
    assert (spec.padded_head_dim, spec.padded_value_dim) == padded
    (main,) = spec.entry_points
    # Above 576 columns two CTAs divide them.
    assert main.cluster == (2 if max(padded) > 576 else 1)
    assert ctas(spec) == [main.cluster * row_tiles(64, packed=spec[PACKED])]
    # No kernel splits the keys of large head dims, so calls with few rows take the same one.
    assert select.select_all(asked) == [spec]


@pytest.mark.parametrize(
    "features",
    [
        {"arch": "sm_90"},
        {"dtype": "f32"},
        {"head_dim": 1032},
        {"value_dim": 1032},
        {"head_dim": 300},
        {"dropout": True},
        {"bias": AskedBias("16")},
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_other_large_head_dims_are_computed_in_column_chunks(direction, features):
    dims = {"head_dim": 320, "value_dim": 320, "arch": "sm_90a"}
    asked = problem(**{"direction": direction, **dims, **features})
    assert select.select(asked).kernel.stem.startswith("sm80/large_dim")


@pytest.mark.parametrize(
    ("dims", "features", "padded"),
    [
        ((264, 264), {}, (320, 320)),
        ((320, 8), {"mask": "window", "soft_cap": True}, (320, 320)),
        ((384, 328), {"packed": True, "mask": "causal"}, (384, 384)),
        ((512, 512), {"segments": True, "boolean": True}, (512, 512)),
        ((64, 512), {"sinks": True, "broadcast_batch": True}, (512, 512)),
        ((576, 512), {"mask": "causal", "positions": True, "soft_cap": True}, (576, 512)),
    ],
    ids=str,
)
def test_hopper_backward_of_large_head_dims_has_clusters(dims, features, padded):
    """Three CTAs own 128 queries, and two own 64 keys. Rings of panels hold two blocks or more of
    the CTAs that sum a gradient.
    """
    asked = problem("backward", head_dim=dims[0], value_dim=dims[1], arch="sm_90a", **features)
    spec = select.select(asked)
    assert (spec.padded_head_dim, spec.padded_value_dim) == padded
    kernel = spec.kernel
    assert isinstance(kernel, FmhaBwdLargeDimSm90)
    _, dq, dkdv = spec.entry_points
    packed = spec[PACKED]
    assert ctas(spec)[1:] == [3 * row_tiles(128, packed), 2 * key_tiles(64, packed)]
    assert (dq.cluster, dkdv.cluster) == (3, 2)
    scores, out = (dim // 64 for dim in padded)
    assert 2 * scores <= kernel.stages(spec, "queries")[0] <= 3 * scores
    assert out < kernel.stages(spec, "queries")[1]
    assert 2 * max(scores, out) <= kernel.stages(spec, "keys")[0] <= 3 * min(scores, out)


def test_hopper_backward_of_large_head_dims_has_two_kernels():
    """They own their gradients, so there are neither dq sums nor a postprocess kernel."""
    spec = select.select(problem("backward", head_dim=192, value_dim=128, arch="sm_90a"))
    source = emit.source(spec)
    assert [entry.name.removeprefix(spec.name) for entry in spec.entry_points] == [
        "_preprocess",
        "_dq",
        "_dkdv",
    ]
    rows, keys = row_tiles(spec.tile.query), key_tiles(spec.tile.key)
    assert ctas(spec) == [rows, rows, keys]
    assert [entry.takes_maps for entry in spec.entry_points] == [False, True, True]
    for entry in spec.entry_points[1:]:
        assert f"::kSharedBytes == {entry.shared_bytes});" in source
    only_value = problem("backward", head_dim=256, arch="sm_90a", needs_grad={"value"})
    spec = select.select(only_value)
    assert ctas(spec) == [row_tiles(spec.tile.query), key_tiles(spec.tile.key)]
