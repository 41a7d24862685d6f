"""Why a kernel does not fit, in words that name the remedy."""

import argparse
import dataclasses

import pytest
from problems import problem

from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import FEATURES, AskedBias
from jax_memeff.codegen.problem import REQUIRED_DIRECTIONS
from jax_memeff.errors import UnsupportedError


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_makes_kernels_of_its_own_and_says_why_others_do_not_fit(feature):
    # Only a backward has sums, and sinks change a backward only if it computes their gradient.
    direction = "backward" if feature.name == "deterministic" else "forward"
    plain = problem(direction, head_dim=64)
    without = select.select(plain)
    for alone in feature.alone:
        asked = dataclasses.replace(plain, features=alone)
        spec = select.select(asked)
        assert spec[feature] != without[feature]
        assert spec.name != without.name and emit.source(spec) != emit.source(without)
        assert feature.words(asked[feature]) in str(asked)
        assert select.spec_reasons(without, asked) and select.spec_reasons(spec, plain)
    parser = argparse.ArgumentParser()
    feature.add_flags(parser)
    assert feature.from_flags(parser.parse_args([])) == feature.off == plain[feature]


@pytest.mark.parametrize("direction", REQUIRED_DIRECTIONS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "window", "lengths": True},
        {"segments": True, "boolean": True, "soft_cap": True, "dropout": True},
        {"bias": AskedBias("32", "common")},
        {"bias": AskedBias("16", "rows", 2)},
        {"packed": True, "mask": "causal"},
        {"head_dim": 20, "value_dim": 200},
        {"head_dim": 7, "value_dim": 7},
        {"head_dim": 320},
        {"dtype": "f32"},
    ],
    ids=str,
)
def test_every_rejected_kernel_of_every_family_has_its_reasons(direction, changes):
    """These are the kernels before the chosen one; no kernel repeats a reason."""
    asked = problem(direction, arch="sm_90a", **changes)
    explained = select.explain(asked)
    families = {spec.family for spec, _ in explained}
    assert families == {"sm80", "sm90"}
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
    assert select.unsupported_reasons(spec, asked) == [
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
    (reason,) = select.spec_reasons(large, problem(head_dim=64, arch="sm_86"))
    assert "bytes of shared memory, and a block on sm_86 has 50176 when 2 share an SM" in reason


def test_when_specs_alone_refuse_the_error_lists_them(monkeypatch):
    monkeypatch.setattr(select, "_each_reason", lambda *_: iter(["it is Tuesday"]))
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
