"""The benchmark harness on the CPU."""

import argparse
import dataclasses
import doctest
import importlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from harness import BENCHMARKS, document, modules

from jax_memeff.codegen import emit, select
from jax_memeff.codegen.features import NUMBERS, AskedBias
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.strategy import Sizes

__all__ = ["document", "modules"]


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "programs.cells",
        "first_minutes",
        "measuring.host_cost",
        "measuring.residency",
        "programs.jax_programs",
        "reporting.markdown_table",
        "overview.comparison",
        "overview.text",
        "programs.list_cells",
        "programs.peers",
        "precision",
        "reporting.precision_table",
        "reporting.results",
        "report",
        "ring",
        "server.calls",
        "server.steps",
        "server.table",
        "measuring.timing",
        "user_functions.in_jax",
        "user_functions.table",
    ],
)
def test_examples_in_docstrings(modules, name):
    failed, attempted = doctest.testmod(modules(name))
    assert attempted > 0
    assert failed == 0


def test_every_peer_has_a_figure_or_a_reason(document):
    assert len(document["cells"]) == 3
    for cell in document["cells"]:
        directions = ["forward", "forward_backward"] if cell["gradients"] else ["forward"]
        assert list(cell["results"]) == directions
        for results in cell["results"].values():
            assert list(results) == ["memeff_xla", "jax_xla", "torch_flash"]
            for name in ("memeff_xla", "jax_xla"):
                assert results[name]["seconds"] > 0, results[name]
            # On the CPU torch has no figure, installed or not.
            assert "torch" in results["torch_flash"]["error"]
            assert results["jax_xla"]["difference"] < 1e-5


def test_the_timed_program_holds_every_call(document):
    for cell in document["cells"]:
        for results in cell["results"].values():
            record = results["jax_xla"]
            assert record["calls_per_launch"] > 1
            # At least scores, softmax and output: XLA merged or dropped no call.
            assert sum(record["operations"].values()) > 3, record["operations"]


def test_dispatch_is_timed_for_both_directions(document):
    rows = document["host"]["dispatch"]
    for direction in ("forward", "forward_backward"):
        assert set(rows[direction]) == {"bare", "memeff_xla", "jax_xla"}
        assert all(row["us"] > 0 for row in rows[direction].values())


def _document(folder, script, *options, **variables):
    """Returns what a command writes on the CPU."""
    path = folder / "results.json"
    command = [sys.executable, str(BENCHMARKS / script), "--implementation", "xla"]
    command += ["--rounds", "3", *options, "--output", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


@pytest.mark.rotating(3)
def test_the_ring_is_compared_with_the_share_of_a_device(modules, tmp_path):
    options = ["--devices", "2", "--tokens", "64", "--heads", "4", "--key-heads", "2"]
    options += ["--head-dim", "8", "--dtype", "float32", "--rounds", "9", "--batch-ms", "1"]
    flags = "--xla_force_host_platform_device_count=2"
    document = _document(tmp_path, "ring.py", *options, XLA_FLAGS=flags)
    assert document["ring"]["devices"] == 2 and document["ring"]["heads"] == 4
    # Two of the four heads, with 4 H operations for each pair of query and key, half of them
    # masked.
    share = {"forward": 4 * 2 * 64**2 / 2 * 8}
    share["forward_backward"] = 3.5 * share["forward"]
    for direction, results in document["ring"]["results"].items():
        for record in results.values():
            flops = record["tflops_per_device"] * 1e12 * record["seconds"]
            assert flops == pytest.approx(share[direction])
        ratio = results["share"]["seconds"] / results["ring"]["seconds"]
        assert results["ring"]["of_one_device"] == pytest.approx(ratio)
        assert results["ring"]["difference"] < 1e-5
        assert results["ring"]["transfers"] > 0

    text = modules("report").tables(document)
    time = modules("reporting.results").time(results["ring"]["seconds"])
    assert f"|forward + backward, ring|{time}|" in text
    assert "## Ring attention on 2 devices\n\n|hd8 B1 N4/2 T64 float32 causal|" in text


@pytest.mark.rotating(3)
def test_the_steps_of_a_server_are_timed(modules, tmp_path):
    document = _document(tmp_path, "paged.py", "--steps", "tiny", "--batch-ms", "2")
    assert [step["group"] for step in document["steps"]] == [
        "decode",
        "prompts",
        "ragged",
        "latent",
    ]
    for step in document["steps"]:
        assert list(step["results"]) == list(step["calls"])
        for name, record in step["results"].items():
            if name in ("torch_flash", "flash_mla"):
                assert "error" in record
                continue
            assert record["seconds"] > 0, record
            # Pages hold the same tokens in another order, and float8 rounds them.
            limit = 0.06 if name == "float8" else 0.01
            assert record.get("difference", 0.0) < limit, (step["name"], name)
    assert all(row["us"] > 0 for row in document["host"].values())

    text = modules("report").tables(document)
    assert all(f"|{step['name']}|" in text for step in document["steps"])
    groups = {group.name: group for group in modules("overview").of_document(document)}
    assert {label for r in groups["steps"].compared() for label in r.peers} == {"jax.nn XLA"}
    assert groups["steps"].architecture == "cpu"


def test_steps_and_their_calls(modules):
    """The goals of the project are stated for these steps."""
    steps, calls = modules("server.steps"), modules("server.calls").CALLS
    found = steps.steps("decode,prompts,ragged,latent")
    assert len({(step.group, step.name) for step in found}) == len(found) == 24
    assert set().union(*(step.calls for step in found)) >= set(calls)
    with pytest.raises(ValueError, match="expected some of decode, prompts, ragged, latent"):
        steps.steps("decode,huge")
    ragged = steps.ragged()[0]
    with pytest.raises(ValueError, match="one token per sequence"):
        calls["tree"].arrays(ragged, None)
    assert calls["steps"].sequences(ragged) == range(128)
    assert calls["prompts"].rows(ragged) == slice(128, 128 + 4 * 2048)


def test_lists_of_keys_are_timed(modules, tmp_path):
    document = _document(tmp_path, "lists.py", "--cells", "tiny", "--batch-ms", "20")
    latent, grouped, dense = document["cells"]
    # 8 queries and 4 heads; the backward has five products.
    pairs = 8 * 4 * 16
    flops = {"forward": 2 * pairs * (32 + 16), "forward_backward": 2 * pairs * (4 * 32 + 3 * 16)}
    assert latent["flops"] == flops
    assert dense["flops"] == {"forward": 4 * grouped["flops"]["forward"]}
    for cell in document["cells"]:
        for direction, records in cell["results"].items():
            own = records.pop("memeff_xla")
            assert own["tflops"] * own["seconds"] == pytest.approx(cell["flops"][direction] / 1e12)
            is_compared = cell is latent and direction == "forward"
            assert list(records) == (["flash_mla"] if is_compared else [])
            assert all("error" in record for record in records.values())
            records["memeff_xla"] = {**own, "seconds": 1e-6}

    # As if on a GPU, where the peer is twice as fast.
    latent["results"]["forward"]["flash_mla"] = {"seconds": 5e-7, "difference": 1e-3}
    document["device"] = {"name": "NVIDIA H200", "platform": "gpu"}
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(document))
    report, read = modules("report"), modules("reporting.results").read(file)
    groups = modules("overview").groups([read])
    page = report._page("features", groups, [read])
    header = "|lists of keys, TFLOP/s|forward: ours|FlashMLA|ratio|forward + backward: ours|"
    means = "Mean ratios (cells): FlashMLA 0.50 (1) and none."
    assert f"\n## H200: lists of keys\n\n{means}\n\n{header}" in page
    assert f"|{latent['name']}|0.0492|0.0983|**0.50**|0.18|none||\n" in page
    assert f"|{grouped['name']}|0.0328|none|||||\n|{dense['name']}|0.131|none|||||\n" in page
    losses = report._page("losses", groups, [read])
    assert "## H200: 1 of 1 figures\n" in losses
    assert f"|{latent['name']}|forward|0.50|FlashMLA|" in losses


@pytest.mark.parametrize("factor, is_right", [(1, True), (1.1, False)])
def test_calls_with_other_outputs_than_the_peer_have_no_figure(
    factor, is_right, modules, monkeypatch
):
    lists = modules("lists")
    (cell,) = modules("programs.list_cells").SETS["tiny"][0]
    inputs = cell.inputs(cell.lists())
    assert all(len(np.unique(row)) == 16 for row in cell.lists()[0, 0])

    def peer(query, key, found, calls):
        assert (query.shape, key.shape, found.shape) == (
            (1, 8, 4, 32),
            (1, 64, 1, 32),
            (1, 1, 8, 16),
        )
        return lists.program("memeff_xla", cell, inputs._replace(query=factor * query), False)

    monkeypatch.setattr(lists.flash_mla, "sparse_prefill", peer)
    options = argparse.Namespace(implementation="xla", rounds=3, batch_ms=20)
    records = lists.measure_direction({cell: inputs}, "forward", options)[cell]
    assert list(records) == ["memeff_xla", "flash_mla"]
    if is_right:
        assert records["flash_mla"]["difference"] == 0
        assert all(record["seconds"] > 0 for record in records.values())
    else:
        assert all("outputs differ by 0." in record["error"] for record in records.values())


def test_launches_are_padded_to_the_residency_of_another_gpu(modules, monkeypatch):
    residency = modules("measuring.residency")
    for module, name in (
        (residency.custom_call, "kernel_attributes"),
        (residency.compiler, "compile"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    monkeypatch.setattr(residency, "_capability", lambda: (9, 0))
    problem = Problem("backward", "bf16", 64, 64, "compute_86", {"bias": AskedBias("16")})
    spec = select.select(problem)
    entry = next(entry for entry in spec.entry_points if entry.name == spec.name)

    def launched():
        names = [box.name for box in (*spec.block_masks, *spec.captured_arrays)]
        names += [field.value for field in spec.params_fields]
        sizes = Sizes(batch=1, queries=64, keys=64, heads=1, key_heads=1)
        attributes = residency.custom_call.kernel_attributes
        found = attributes(spec, "compute_86", b"", names, sizes, (0,) * len(NUMBERS))
        names = found["entry_names"].split(",")
        return tuple(found["entries"].reshape(-1, 8)[names.index(entry.name), :2])

    before = launched()
    residency.Residency("compute_86")
    after = launched()
    assert before == (entry.threads, entry.shared_bytes)
    # One CTA on an SM of 100 KB, so more than half of the 228 KB of an SM of sm_90.
    assert 50 * 1024 < entry.shared_bytes < 100 * 1024
    assert after == (entry.threads, 113 * 1024 + 1)
    assert f"kSharedBytes == {entry.shared_bytes}" in emit.source(spec)


def test_other_architectures_have_groups_of_their_own(modules, document):
    other = {**document, "residency": {"arch": "compute_80", "kernels": {}}}
    other["device"] = {**document["device"], "platform": "gpu"}
    assert "with sm_80 kernels: tiny" in modules("report").tables(other)
    cells = [{**cell, "group": "small"} for cell in document["cells"]]
    groups = modules("overview").groups([{**document, "cells": cells}, {**other, "cells": cells}])
    assert [group.architecture for group in groups] == ["sm80", "cpu"]


class Clock:
    """Replaces ``time``: programs advance it."""

    now = 0.0

    def perf_counter(self):
        return self.now


@dataclasses.dataclass
class Launches:
    """A program whose launches take ``seconds`` after the first of a batch, which takes longer.

    It fails after ``left`` launches.
    """

    clock: Clock
    seconds: float = 2.0
    left: int = 10**9
    interrupted: tuple[int, ...] = ()
    """The launches during which the system does something else."""
    calls = 1
    waiting = 1.0
    launched = 0

    def launch(self):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory\nat length")
        self.clock.now += self.waiting + self.seconds
        self.clock.now += 100.0 * (self.launched in self.interrupted)
        self.launched += 1
        self.waiting = 0.0

    def wait(self):
        self.waiting = 1.0


@pytest.fixture
def timing(modules, monkeypatch):
    module = modules("measuring.timing")
    monkeypatch.setattr(module, "time", Clock())
    return module


def test_measure_keeps_going_without_a_failing_program(timing):
    clock = timing.time
    estimates = timing.WARM_UP_LAUNCHES
    rounds = estimates + timing.LAUNCHES_TO_ESTIMATE
    programs = {
        "good": Launches(clock),
        "early": Launches(clock, left=0),
        "late": Launches(clock, left=rounds + 5),
        "interrupted": Launches(clock, interrupted=(estimates, rounds)),
        "short": Launches(clock, seconds=0.0),
    }
    outcomes = timing.measure(programs, rounds=3, batch_seconds=9.0)
    # Neither the host's work before the first launch counts nor the launch before the batch.
    assert outcomes["good"] == timing.Timing((2.0, 2.0, 2.0), launches=3, calls=1)
    assert outcomes["interrupted"] == outcomes["good"]
    assert outcomes["early"] == outcomes["late"] == timing.Failure("RuntimeError: out of memory")
    assert "lengthen" in outcomes["short"].reason


def test_no_program_always_follows_the_same_one(timing):
    launched = []

    @dataclasses.dataclass
    class Records(Launches):
        name: str = ""

        def launch(self):
            super().launch()
            launched.append(self.name)

    programs = {name: Records(timing.time, name=name) for name in "abcdef"}

    def orders(seed):
        outcomes = timing.measure(programs, rounds=5, batch_seconds=1e-12, seed=seed)
        assert all(len(outcomes[name].samples) == 5 for name in programs)
        launches = 2 + timing.MIN_LAUNCHES  # one alone, and one before the batch
        timed = np.reshape(launched[-5 * len(programs) * launches :], (5, len(programs), launches))
        assert (timed == timed[..., :1]).all()
        return timed[..., 0]

    rounds = orders("a cell")
    assert (np.sort(rounds) == list(programs)).all()
    before = {name: set() for name in programs}
    for first, second in itertools.pairwise(rounds.ravel()):
        before[second].add(first)
    assert min(len(names) for names in before.values()) > 1
    assert (orders("a cell") == rounds).all()
    assert (orders("another cell") != rounds).any()


def test_every_table_has_its_cells(modules):
    """The project promises figures for these cells: their sizes, features and number."""
    sets = modules("programs.cells").SETS
    for name, number in (("main", 24), ("features", 18), ("float32", 4), ("deterministic", 18)):
        cells = sets[name]()
        assert len({cell.name for cell in cells}) == len(cells) == number
        for cell in cells:
            assert cell.batch * cell.query_length == 16384
            if cell.heads == cell.key_heads:
                assert cell.heads * cell.head_dim == 2048
            assert cell.group == name and cell.gradients
        grouped = {(c.head_dim, c.heads, c.key_heads) for c in cells if c.heads > c.key_heads}
        expected = set(itertools.product((64, 128), (32,), (4, 8)))
        assert grouped == (expected if name == "deterministic" else set())
    grid = {(c.head_dim, c.query_length, c.causal) for c in sets["main"]()}
    assert {dim for dim, _, _ in grid} == {64, 128, 256}
    assert {length for _, length, _ in grid} == {512, 2048, 8192, 16384}
    modified = {(c.query_length, c.bias, c.dropout) for c in sets["features"]()}
    assert modified == {
        (length, *modifier)
        for length in (2048, 4096)
        for modifier in ((True, 0), (False, 0.1), (True, 0.1))
    }
    capped = {c.soft_cap for c in sets["softcap"]()}
    assert capped == {None, 30.0}
    assert {c.heads // c.key_heads for c in sets["gqa"]()} == {8, 4}
    assert any((c.head_dim, c.value_dim) == (192, 128) for c in sets["dims"]())
    assert {(c.window, c.query_length) for c in sets["window"]()} == {(1024, 16384), (128, 16384)}
    shared, wide = sets["memory"]()
    assert shared.batch == 32 and shared.bias
    assert (wide.head_dim, wide.query_length) == (4096, 2048)


def test_peers_say_what_they_have_no_argument_for(modules):
    peers, sets = modules("programs.peers").PEERS, modules("programs.cells").SETS
    capped = next(cell for cell in sets["softcap"]() if cell.soft_cap)
    able = {name for name, peer in peers.items() if not peer.missing(capped)}
    assert able == {"memeff_cuda", "memeff_xla", "memeff_deterministic", "fa4"}
    function = sets["functions"]()[0]
    able = {name for name, peer in peers.items() if not peer.missing(function)}
    assert able == {"memeff_cuda", "memeff_xla", "memeff_deterministic", "memeff_plain", "flex"}
    everyone = {peer.name for peer in modules("programs.peers").peers("all")}
    absent = {"memeff_xla", "memeff_deterministic", "memeff_plain", "flex"}
    assert set(peers) - everyone == {*absent, "torch_flash_deterministic"}


def test_unknown_names_are_refused_with_the_known_ones(modules):
    with pytest.raises(ValueError, match="expected some of tiny, small, quick, main"):
        modules("programs.cells").cells("tiny,huge")
    with pytest.raises(ValueError, match="expected 'all' or some of memeff_cuda"):
        modules("programs.peers").peers("memeff")


def test_the_time_of_code_generation_has_every_lowering_and_its_import(modules, monkeypatch):
    _cuda = importlib.import_module("jax_memeff._cuda")
    primitives = importlib.import_module("jax_memeff._op.primitives")
    module = importlib.import_module("jax_memeff._cuda.lowering")
    monkeypatch.setattr(_cuda, "lowering", module)
    monkeypatch.delitem(sys.modules, module.__name__)  # as in a fresh process
    timed = modules("first_result").TimedLowering()
    assert timed.seconds == 0
    for lower in (primitives._cuda_forward, primitives._cuda_backward):
        before = timed.seconds
        with pytest.raises((AttributeError, TypeError)):  # no call is there to lower
            lower(None, tree=None, options=None)
        assert timed.seconds > before and _cuda.lowering is timed
    assert module.__name__ in sys.modules


def test_errors_of_peers_compared_with_float64(modules):
    precision, peers = modules("precision"), modules("programs.peers")
    selected = peers.peers("memeff_xla,jax_xla,pallas_mgpu")
    for cell in precision.cells([16], [96], ["float32"]):
        records = precision.measure(cell, selected)
        assert "has no scale" in records["pallas_mgpu"]["error"]
        assert list(records["memeff_xla"]) == ["out", "dq", "dk", "dv", "lse"]
        assert list(records["jax_xla"]) == ["out", "dq", "dk", "dv"]
        for name in ("memeff_xla", "jax_xla"):
            assert_small(records[name])


def assert_small(record):
    for error in record.values():
        assert 0 < error["frobenius"] < 5e-6 and 0 < error["largest"] < 1e-4


@pytest.mark.rotating(2)
@pytest.mark.parametrize("feature", ["bias", "dropout", "groups", "packed"])
def test_errors_of_cells_with_a_feature(modules, feature):
    precision, peers = modules("precision"), modules("programs.peers")
    cell = precision.cells([], [96], ["float32"], [feature])[0]
    record = precision.measure(cell, peers.peers("memeff_xla"))["memeff_xla"]
    assert ("dbias" in record) == (feature == "bias")
    assert_small(record)


def test_the_command_compares_errors_with_those_of_another_file(
    modules, monkeypatch, capsys, tmp_path
):
    precision, path = modules("precision"), tmp_path / "today.json"
    for name in ("JAX_MEMEFF_ARCHS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # the command sets it

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["precision.py", *map(str, words)])
        precision.main()
        return capsys.readouterr().out

    sizes = ("--head-dims", 16, "--lengths", 96, "--dtypes", "float32")
    run("--peers", "memeff_xla", *sizes, "--arch", "compute_80", "--output", path)
    document = json.loads(path.read_text())
    assert document["arch"] == os.environ["JAX_MEMEFF_ARCHS"] == "compute_80"
    full, causal = (cell["results"]["memeff_xla"] for cell in document["precision"])
    full["dq"]["frobenius"] /= 2
    causal["lse"]["frobenius"] *= 2
    (other := tmp_path / "other.json").write_text(json.dumps(document))
    table = run("--compare", path, other)
    assert table.count("**") == 2
    assert "The largest ratio is 2.000, that of dq in hd16 B1 N4 T96 float32." in table
    full["error"] = "fails"
    other.write_text(json.dumps(document))
    assert "Larger by more than 1 %: 2 of 6 errors" in run("--compare", other, path)


@pytest.mark.quick
def test_the_page_on_precision_has_six_rows_of_the_record(modules):
    record = json.loads((BENCHMARKS / "results/nvidia-h200-precision.json").read_text())
    table = modules("reporting.precision_table").text(record)
    assert table.count("\n") == 1 + 6
    assert f"\n{table}\n" in (BENCHMARKS.parent / "docs/guide/precision.md").read_text()


def test_cells_with_few_valid_keys(modules):
    """Both JAX peers take the lengths; other peers have no argument for them."""
    import jax
    import numpy as np

    cells, peers = modules("programs.cells"), modules("programs.peers").PEERS
    cell = cells.Cell("cpu", 2, 3, 16, 2, 2, 8, 8, dtype="float32", valid_keys=5)
    assert cell.name == "hd8 B2 N2 T3 S16 float32 5 valid keys"
    assert cell.flops(False) == 4 * 2 * 2 * 3 * 5 * 8
    made = modules("programs.inputs").make(cell)
    short = made._replace(key=made.key[:, :5], value=made.value[:, :5], key_lengths=None)
    for name in ("memeff_xla", "jax_xla"):
        attention = jax.jit(peers[name].attention(cell))
        np.testing.assert_allclose(attention(made), attention(short), atol=1e-6)
    assert peers["torch_efficient"].missing(cell) == ["valid_keys"]
