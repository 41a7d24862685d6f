"""The tables of ``benchmarks/`` from the JSON that ``python -m jax_memeff verify`` writes."""

import json

from harness import modules

from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify import parent
from jax_memeff._command.verify.parent import Record

__all__ = ["modules"]

LARGE = Case(B=4, T=2048, S=2048, N=16, K=4, H=128, causal="top_left")
DECODE = Case(B=16, T=1, S=8192, N=32, K=8, H=128, gradients=False)
SMALL, WRONG = Case(), Case(H=32)


def outcome(state, **fields):
    return {"state": state, "text": [], "errors": {}, **fields}


def times(**milliseconds):
    return {peer: [1e-3 * ms * x for x in (0.9, 1, 1.2)] for peer, ms in milliseconds.items()}


def results_of_verify():
    machine = {"name": "NVIDIA A100", "platform": "gpu", "arch": "sm_80", "versions": {"jax": "1"}}
    both = {
        "forward": times(memeff_cuda=1, jax_cudnn=2),
        "forward_backward": times(memeff_cuda=4, jax_cudnn=4),
    }
    outcomes = {
        SMALL: outcome("passed"),
        LARGE: outcome("passed", seconds=both),
        DECODE: outcome("passed", seconds={"forward": times(memeff_cuda=2, jax_xla=1)}),
        WRONG: outcome("failed"),
    }
    return parent.document(Record(machine, outcomes), "580.65.06")


def test_tables_are_made_of_the_results_of_verify(modules, tmp_path):
    file = tmp_path / "verify.json"
    file.write_text(json.dumps(results_of_verify()))
    report, reporting = modules("report"), modules("reporting.results")
    text = report.tables(reporting.read(file))
    assert "## A100: verify" in text
    assert f"|{LARGE.name}|1000|2000 jax.nn cuDNN|2.00|4000|4000 jax.nn cuDNN|1.00|" in text
    assert f"|{DECODE.name}|2000|1000 jax.nn XLA|**0.50**||||" in text
    assert SMALL.name not in text and WRONG.name not in text
