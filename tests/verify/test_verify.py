"""``python -m jax_memeff verify`` on the emulator: cases that pass, fail, hang and crash."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jax_memeff import cli
from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify import chosen, parent

GOOD = Case(B=1, T=20, S=33, N=2, K=1, H=32, causal="top_left")
BAD = Case(B=1, T=20, S=33, N=2, K=1, H=64, gradients=False)


@pytest.fixture
def verify(monkeypatch, tmp_path, capsys):
    """Runs the command in a mode of emulated_child.py; returns status, report and JSON."""
    if shutil.which("g++") is None:
        pytest.skip("kernels run on the CPU where there is g++")
    monkeypatch.setattr(parent, "require_idle", lambda: None)
    monkeypatch.setattr(chosen, "chosen", lambda every: [BAD, GOOD])
    file = Path(__file__).with_name("emulated_child.py")

    def run(mode, *arguments):
        monkeypatch.setattr(parent, "CHILD", (sys.executable, str(file), mode, "sm_80"))
        out = tmp_path / "out.json"
        places = ["--json", str(out), "--log", str(tmp_path / "log")]
        code = cli.main(["verify", *places, *arguments])
        return code, capsys.readouterr().out, json.loads(out.read_text())

    return run


def states(document):
    return {cell["name"]: cell["state"] for cell in document["cells"]}


def test_right_kernels_pass(verify, tmp_path):
    code, report, document = verify("nothing")
    assert code == 0, report
    assert states(document) == {BAD.name: "passed", GOOD.name: "passed"}
    phases = [json.loads(line)["phase"] for line in (tmp_path / "log").read_text().splitlines()]
    assert phases[:3] == ["starting", "trying", "ready"] and phases[-1] == "done"
    assert "2 passed, 0 failed" in report and "kernels for sm_80" in report


@pytest.mark.parametrize(
    ("mode", "said", "limit"),
    [
        ("wrong", "elements are not finite", "60"),
        ("blocks", "launching kernels: did not end within 3 s, and was killed", "3"),
        ("crashes", "the process was ended by SIGSEGV", "60"),
    ],
)
def test_a_bad_kernel_fails_its_case_alone(verify, mode, said, limit):
    code, report, document = verify(mode, "--limit", limit)
    assert code == 1
    assert states(document) == {BAD.name: "failed", GOOD.name: "passed"}
    assert f"`{BAD.name}`: failed" in report and said in report


def test_a_gpu_that_needs_a_reset_ends_the_run(verify):
    code, report, document = verify("broken")
    assert code == 1
    assert states(document) == {BAD.name: "failed"}
    assert "the GPU needs a reset" in report and "CUDA_ERROR_ILLEGAL_ADDRESS" in report


def test_mps_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(parent, "run", lambda *_: pytest.fail("cases were run"))
    assert cli.main(["verify"]) == 1
    assert "pass --even-if-busy" in " ".join(capsys.readouterr().err.split())


def test_the_parent_imports_no_jax():
    program = "import sys, jax_memeff._command.verify.report; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
