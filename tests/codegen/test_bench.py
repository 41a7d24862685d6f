"""``python -m jax_memeff bench`` on a CPU."""

import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import environment, run

from jax_memeff import cli
from jax_memeff._command import bench as command
from jax_memeff._command.bench import CUDNN, OURS, XLA, Figure
from jax_memeff._command.cases import programs
from jax_memeff._command.cases.case import Case

__all__ = ["environment"]

CALL = "--batch 2 --seq 40 --heads 4 --key-heads 2 --head-dim 16 --dtype f32"


@pytest.fixture(autouse=True)
def functions(monkeypatch):
    own = types.SimpleNamespace(
        blocks=lambda b, h, q, k: (q // 8 + k // 8) % 2 == 0,
        heads=lambda b, h, q, k: abs(q - k) < 5 * (h + 1) + b,
        two=lambda b, h, q, k: jnp.zeros(2),
        alibi=lambda s, b, h, q, k: s - 0.1 * abs(q - k),
    )
    monkeypatch.setitem(sys.modules, "own", own)
    monkeypatch.setattr(command, "_SECONDS", 0.05)


@pytest.fixture
def bench(capsys, tmp_path):
    """Runs the command; returns the exit code, its output and the JSON."""

    def call(arguments, short=True):
        out = tmp_path / "out.json"
        options = ["--forward-only"] if short else []
        words = f"{CALL} {arguments}".split()
        code, text = run(capsys, "bench", *words, *options, "--json", str(out))
        return code, text, json.loads(out.read_text())

    return call


def figures(document):
    return {(found["path"], found["direction"]): found for found in document["figures"]}


@pytest.mark.quick
def test_both_paths_are_timed(bench):
    code, text, document = bench("--causal", short=False)
    assert code == 0
    both = ("forward", "forward + backward")
    assert list(figures(document)) == [
        (path, direction) for direction in both for path in (OURS, XLA)
    ]
    for found in document["figures"]:
        assert len(found["samples"]) >= 3 and found["seconds"] == np.median(found["samples"])
        assert found["temporary_bytes"] > 0 and 0 <= found["difference"] < 1e-5, found
        assert f"{1e3 * found['seconds']:.4g}" in text
    assert document["call"] == {**document["call"], "B": 2, "T": 40, "K": 2, "causal": "top_left"}
    assert [line.partition(":")[0] for line in document["advice"]] == list(both)
    assert all(line in text for line in document["advice"])


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "options",
    [
        "--window 7",
        "--segments --causal",
        "--boolean",
        "--bias 32",
        "--bias 32 --bias-layout common --causal",
        "--bias 32 --bias-layout columns",
        "--bias 32 --bias-layout rows",
        "--mask-function own:blocks",
        "--mask-function own:heads --boolean --segments",
        "--value-dim 24 --causal",
        "--value-dim 8",
        "--queries 24 --causal",
        "--seq 300 --batch 1",
    ],
)
def test_jax_nn_gets_a_mask_where_it_lacks_an_argument(bench, options):
    """Both paths agree with the definition, in their gradients, too."""
    code, _, document = bench(options, short=False)
    assert code == 0
    for found in document["figures"]:
        assert found["reason"] == "" and found["difference"] < 1e-5, found


def mask_of_jax_nn(case):
    mask = programs._mask_of_jax_nn(case, {})
    assert mask is not None
    return mask


def test_a_mask_function_is_broadcast_over_what_it_does_not_read():
    case = Case(B=2, N=4, K=2, T=6, S=7, H=8, mask_function="own:blocks")
    assert mask_of_jax_nn(case).shape == (1, 1, 6, 7)
    case = Case(B=2, N=4, K=2, T=6, S=7, H=8, mask_function="own:heads")
    mask = mask_of_jax_nn(case)
    assert mask.shape == (2, 4, 6, 7)
    for b, h, q, k in itertools.product(range(2), range(4), range(6), range(7)):
        assert mask[b, h, q, k] == (abs(q - k) < 5 * (h + 1) + b)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ("--soft-cap", "soft cap"),
        ("--dropout", "dropout"),
        ("--dropout --soft-cap", "dropout and no soft cap"),
        ("--score-function own:alibi", "function of the scores"),
    ],
)
def test_what_jax_nn_lacks_is_said(bench, options, lacking):
    code, text, document = bench(options)
    ours, peer = document["figures"]
    assert code == 0 and ours["samples"] and not peer["samples"]
    assert peer["reason"] == f"jax.nn has no {lacking}" and peer["reason"] in text
    assert document["advice"] == [
        f"forward: only jax-memeff can run this call here: jax.nn has no {lacking}"
    ]
    if "dropout" in options:
        assert ours["difference"] is None
    else:
        assert ours["difference"] < 1e-5


def test_scores_that_do_not_fit_are_not_computed(bench, monkeypatch):
    scores = 4 * 2 * 4 * 640 * 640
    monkeypatch.setattr(command, "_available_bytes", lambda device: scores)
    code, text, document = bench("--seq 640")
    ours, peer = document["figures"]
    assert code == 0 and ours["samples"]
    assert "its scores take 0.0 GiB, 0.0 GiB are available" in text and not peer["samples"]


def test_a_program_that_does_not_fit_is_not_run(bench, monkeypatch):
    """XLA needs the scores and more; the path in plain JAX needs a part of them."""
    monkeypatch.setattr(command, "_available_bytes", lambda device: 1.2 * 4 * 2 * 4 * 640 * 640)
    code, text, document = bench("--seq 640", short=False)
    reasons = [found["reason"] for found in document["figures"] if found["path"] == XLA]
    assert code == 0 and all(reason.startswith("it takes ") for reason in reasons), reasons
    assert "are available" in text


def test_arrays_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", *CALL.split(), "--batch", "1000000", "--seq", "100000"])
    assert raised.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the arrays of this call take" in said and "pass a smaller --batch" in said


@pytest.mark.parametrize("at", ["compiling", "running"])
def test_a_path_that_fails_has_the_reason_in_its_row(bench, monkeypatch, at):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

    def failing(case, implementation, gradients):
        def program(arrays):
            if at == "compiling":
                fail()
            jax.debug.callback(fail)
            return {"out": arrays["query"]}

        return program

    monkeypatch.setattr(programs, "of_jax_nn", failing)
    code, text, document = bench("")
    said = {"compiling": "RESOURCE_EXHAUSTED: Out of memory", "running": "INTERNAL: "}[at]
    assert code == 0 and said in document["figures"][1]["reason"] and said in text
    assert document["figures"][0]["samples"] and not document["figures"][1]["samples"]
    monkeypatch.setattr(programs, "trained", failing)
    code, _, document = bench("")
    assert code == 1
    assert "forward: jax-memeff cannot run this call: " in document["advice"][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--heads 0", "argument --heads: expected an integer of at least 1, got '0'"),
        ("--seq -5", "argument --seq: expected an integer of at least 1, got '-5'"),
        ("--batch 2.5", "argument --batch: expected an integer of at least 1, got '2.5'"),
        ("--heads 3", "--heads must be a multiple of --key-heads, got 3 and 2"),
        ("--bias-layout rows", "--bias-layout rows needs --bias"),
        ("--bias 16", "a 16-bit bias with float32 inputs has no kernel"),
        ("--dtype f64", "expected one of f16, bf16, f32, tf32"),
        ("--mask-function own:no", "--mask-function own:no: "),
        ("--mask-function own:two", "--mask-function own:two: "),
        ("--varlen", "unrecognized arguments: --varlen"),
        ("--json /dev/null/out", "argument --json: /dev/null/out cannot be written: Not a dir"),
    ],
)
def test_a_call_that_cannot_be_is_refused(capsys, options, said):
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", *CALL.split(), *options.split()])
    assert raised.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_one_product_of_tf32_is_a_precision(bench):
    code, _, document = bench("--dtype tf32")
    assert code == 0 and all(found["samples"] for found in document["figures"])


def test_the_head_dim_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--seq", "40"])
    assert "bench needs --head-dim" in " ".join(capsys.readouterr().err.split())


def figure(path, samples=(), memory=None, reason="", difference=None):
    return Figure(path, "forward", list(samples), memory, difference, reason)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [figure(OURS, [1, 1, 4], 30), figure(CUDNN, [1.8, 1.8, 7.2], 100)],
            "jax-memeff is 1.8 x as fast as jax.nn cudnn; jax-memeff takes 0.3 x its temporary "
            "memory",
        ),
        (
            [figure(OURS, [2], 50), figure(CUDNN, [1], 100), figure(XLA, [1.5], 10)],
            "jax.nn is faster here: jax.nn cudnn is 2 x as fast as jax-memeff; jax-memeff takes "
            "0.5 x its temporary memory",
        ),
        ([figure(OURS, [1.01]), figure(XLA, [1])], "jax-memeff is as fast as jax.nn xla"),
        (
            [figure(OURS, [1]), figure(CUDNN, reason="no"), figure(XLA, reason="too large")],
            "only jax-memeff can run this call here: no; too large",
        ),
        (
            [figure(OURS, reason="no kernel"), figure(XLA, [1])],
            "jax-memeff cannot run this call: no kernel",
        ),
        (
            [figure(OURS, [1], difference=float("nan")), figure(XLA, [2], difference=1e-3)],
            "the results of jax-memeff are wrong, they differ by nan: python -m jax_memeff verify "
            "tells more",
        ),
        (
            [figure(OURS, [2]), figure(CUDNN, [1], difference=0.7), figure(XLA, [4])],
            "jax-memeff is 2 x as fast as jax.nn xla",
        ),
        (
            [figure(OURS, [2]), figure(XLA, [1], difference=0.7)],
            "only jax-memeff can run this call here: the results of jax.nn xla differ by 7.0e-01",
        ),
    ],
)
def test_the_advice_names_the_fastest_peer_and_admits_losses(found, said):
    assert command.advice(found) == [f"forward: {said}"]


def test_paths_take_turns(monkeypatch):
    clock, turns = itertools.count(), []
    monkeypatch.setattr(programs.time, "perf_counter", lambda: float(next(clock)))
    launches = {name: lambda name=name: turns.append(name) for name in "abc"}
    samples = programs.interleaved(launches, seconds=20, least=3, most=50)
    assert {name: len(own) for name, own in samples.items()} == dict.fromkeys("abc", 6)
    rounds = ["".join(turns[i : i + 3]) for i in range(3, len(turns), 3)]
    assert rounds == ["abc", "acb", "bac", "bca", "cab", "cba"]


def test_a_wrong_result_is_told_in_json():
    wrong = figure(OURS, [1, 2, 3], difference=float("inf"))
    (record,) = command.document(Case(), [wrong])["figures"]
    assert (record["difference"], record["is_right"], record["seconds"]) == (None, False, 2)
