"""``python -m jax_memeff verify`` on the emulator: cases that pass, fail, hang and crash; and on a
GPU, with a kernel that hangs for a while.
"""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bad_child
import pytest

from jax_memeff import cli
from jax_memeff._command import models
from jax_memeff._command.cases import programs
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify import chosen, parent
from jax_memeff.codegen.toolchain import compile as compiler

GOOD = Case(B=1, T=20, S=33, N=2, K=1, H=32, causal="top_left")
BAD = Case(B=1, T=20, S=33, N=2, K=1, H=64, gradients=False)
CHILD = (sys.executable, str(Path(__file__).with_name("bad_child.py")))


@pytest.fixture
def verify(monkeypatch, tmp_path, capsys):
    """Runs the command in a mode of bad_child.py; returns status, report and JSON."""
    monkeypatch.setattr(parent, "require_idle", lambda: "")
    monkeypatch.setattr(chosen, "chosen", lambda every: [BAD, GOOD])

    def run(mode, *arguments, where="sm_80"):
        if where != "gpu" and shutil.which("g++") is None:
            pytest.skip("kernels run on the CPU where there is g++")
        monkeypatch.setattr(parent, "CHILD", (*CHILD, mode, where))
        out = tmp_path / "out.json"
        places = ["--json", str(out), "--log", str(tmp_path / "log")]
        code = cli.main(["verify", *places, *arguments])
        return code, capsys.readouterr().out, json.loads(out.read_text())

    return run


def phases(log):
    return [json.loads(line)["phase"] for line in log.read_text().splitlines()]


def states(document):
    return {cell["name"]: cell["state"] for cell in document["cells"]}


@pytest.mark.rotating(2)
def test_right_kernels_pass(verify, tmp_path):
    code, report, document = verify("nothing")
    assert code == 0, report
    assert states(document) == {BAD.name: "passed", GOOD.name: "passed"}
    found = phases(tmp_path / "log")
    assert found[:3] == ["starting", "trying", "ready"] and found[-1] == "done"
    assert "2 passed, 0 failed" in report and "kernels for sm_80" in report


@pytest.mark.rotating(3)
def test_a_large_case_is_timed_beside_jax_nn(verify):
    code, report, document = verify("large")
    assert code == 0, report
    bad, good = document["cells"]
    assert list(bad["results"]) == ["forward"]
    assert list(good["results"]) == ["forward", "forward_backward"]
    for records in good["results"].values():
        assert set(records) == {"memeff_cuda", "jax_xla"}  # cuDNN needs a GPU
        assert all(len(record["samples"]) == 5 for record in records.values())
    assert ", jax.nn XLA " in report


@pytest.mark.parametrize("keys", [False, True])
def test_the_users_own_call_runs_alone(verify, keys):
    call = "--dtype bf16 --head-dim 32 --batch 1 --seq 33 --queries 20 --heads 2 --key-heads 1"
    flags = ["--causal", *(["--keys"] if keys else [])]
    code, _, document = verify("nothing", "--like", *call.split(), *flags)
    name = dataclasses.replace(GOOD, keys=keys).name
    assert (code, states(document)) == (0, {name: "passed"})


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("mode", "said", "limit"),
    [
        ("wrong", "elements are not finite", "60"),
        ("blocks", "launching kernels: did not end within 3 s, and was killed", "3"),
        ("crashes", "the process was ended by SIGSEGV", "60"),
        ("stops", "launching kernels: sent no heartbeat for 3 s, and was killed", "60"),
        ("aborts", "the process was ended by SIGABRT", "60"),
    ],
)
def test_a_bad_kernel_fails_its_case_alone(verify, monkeypatch, mode, said, limit):
    if mode == "stops":
        monkeypatch.setattr(parent, "SILENCE", 3)
    code, report, document = verify(mode, "--limit", limit)
    assert code == 1
    assert states(document) == {BAD.name: "failed", GOOD.name: "passed"}
    assert f"`{BAD.name}`: failed" in report and said in report


def test_a_gpu_that_needs_a_reset_ends_the_run(verify):
    code, report, document = verify("broken")
    assert code == 1
    assert states(document) == {BAD.name: "failed"}
    assert "the GPU needs a reset" in report and "CUDA_ERROR_ILLEGAL_ADDRESS" in report


def test_a_child_that_cannot_start_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(parent, "require_idle", lambda: "")
    code = "raise ImportError('the compiled module is missing')"
    monkeypatch.setattr(parent, "CHILD", (sys.executable, "-c", code))
    assert cli.main(["verify", "--log", str(tmp_path / "log")]) == 1
    assert "status 1: ImportError: the compiled module is missing" in capsys.readouterr().out


@pytest.mark.parametrize("mode", bad_child.GPU_BODIES)
def test_bad_kernels_for_a_gpu_compile(mode):
    pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")
    program, given = programs.complete(BAD, "cuda"), Arrays.draw(BAD).given()
    for spec, arch in models.of_program(program, [given], ["sm_80", "sm_90a"]):
        names = [entry.name for entry in spec.entry_points]
        compiled = compiler.compile_source(bad_child.gpu_source(spec, mode), arch, names)
        assert {resource.name for resource in compiled.resources} == set(names)


@pytest.mark.gpu
def test_a_wrong_kernel_fails_its_case_alone_on_a_gpu(verify):
    code, report, document = verify("wrong", where="gpu")
    assert states(document) == {BAD.name: "failed", GOOD.name: "passed"}, report
    assert code == 1 and document["broken"] == ""


@pytest.mark.gpu
def test_a_kernel_that_hangs_on_a_gpu_is_ended(verify, tmp_path):
    """It spins for 20 seconds at most, so the GPU recovers whatever happens here."""
    start = time.monotonic()
    code, report, document = verify("blocks", "--limit", "8", where="gpu")
    assert states(document) == {BAD.name: "failed", GOOD.name: "passed"}, report
    assert "launching kernels: did not end within 8 s, and was killed" in report
    assert code == 1 and document["broken"] == ""
    found = phases(tmp_path / "log")
    assert found.count("ready") == 2  # the second child launched a trivial kernel
    ended = found.index("ended")
    assert found[ended - 1] == "launching" and found[ended + 1 :].count("done") == 1
    assert time.monotonic() - start < 300


# A shell starts commands in the background with SIGINT ignored, and Python keeps that.
INTERRUPTED = """
import signal, sys
from jax_memeff import cli
from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify import chosen, parent

signal.signal(signal.SIGINT, signal.default_int_handler)
parent.require_idle = lambda: ""
parent.CHILD = {child!r}
chosen.chosen = lambda every: {cases!r}
sys.exit(cli.main(["verify", "--log", {log!r}, "--json", {out!r}]))
"""


def test_ctrl_c_prints_what_was_found_and_ends_the_child(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("kernels run on the CPU where there is g++")
    log, out = tmp_path / "log", tmp_path / "out.json"
    program = INTERRUPTED.format(
        child=(*CHILD, "blocks", "sm_80"), cases=[GOOD, BAD], log=str(log), out=str(out)
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while line := process.stderr.readline():  # the log may be ahead of what the parent has read
            if line.split() == [b"passed", GOOD.name.encode()]:
                break
        launching = f'"launching", "case": "{BAD.name}"'
        wait_until(lambda: log.exists() and launching in log.read_text())
        child = json.loads(log.read_text().splitlines()[0])["pid"]
        assert is_running(child)
        process.send_signal(signal.SIGINT)
        report, errors = (text.decode() for text in process.communicate(timeout=60))
    assert process.returncode == 130, errors
    assert "1 passed, 0 failed" in report
    assert f"**Stopped**: interrupted before {BAD.name} was done" in report
    assert states(json.loads(out.read_text())) == {GOOD.name: "passed"}
    wait_until(lambda: not is_running(child))


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """Puts a program ``nvidia-smi`` with this text into an otherwise empty PATH, or none."""

    def put(text):
        if text is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)

    return put


@pytest.fixture
def runs(monkeypatch):
    """The calls of parent.run, which does nothing."""
    found = []

    def run(cases, *_):
        found.append(cases)
        return parent.Record(outcomes={case: {"state": "passed", "text": []} for case in cases[:1]})

    monkeypatch.setattr(parent, "run", run)
    return found


def test_a_gpu_on_which_others_compute_is_refused(smi, runs, capsys):
    smi('case "$*" in *compute-apps*) echo "4242, python train.py";; esac')
    assert cli.main(["verify"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "other processes compute on the GPU: 4242, python train.py" in said
    assert "--even-if-busy" in said and not runs
    assert cli.main(["verify", "--even-if-busy"]) == 0 and len(runs) == 1


@pytest.mark.parametrize("text", [None, "echo failed; exit 9"], ids=["missing", "failing"])
def test_without_nvidia_smi_a_warning_says_what_is_unknown(smi, runs, capsys, text):
    smi(text)
    assert cli.main(["verify"]) == 0 and len(runs) == 1
    said = capsys.readouterr()
    assert "unknown whether other processes compute on the GPU" in " ".join(said.err.split())
    assert "| driver | unknown |" in said.out


def test_the_driver_is_in_the_report(smi, runs, capsys):
    smi('case "$*" in *driver_version*) echo 580.65.06;; esac')
    assert cli.main(["verify"]) == 0 and len(runs) == 1
    said = capsys.readouterr()
    assert "| driver | 580.65.06 |" in said.out and "unknown whether" not in said.err


def test_all_runs_more_cases(smi, runs):
    smi(None)
    assert cli.main(["verify"]) == 0 and cli.main(["verify", "--all"]) == 0
    few, many = runs
    assert many[: len(few)] == few and len(many) > 3 * len(few)
    names = [case.name for case in many]
    assert len(set(names)) == len(names)
    for case in many:
        assert Case.of_json(json.loads(json.dumps(dataclasses.asdict(case)))) == case


def test_mps_is_refused(monkeypatch, capsys, tmp_path, runs):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert cli.main(["verify"]) == 1 and not runs
    assert "pass --even-if-busy" in " ".join(capsys.readouterr().err.split())


def test_the_parent_imports_no_jax():
    program = "import sys, jax_memeff._command.verify.parent; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
