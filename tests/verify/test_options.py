"""A call as options describe it: an option changes the call's program, or is refused."""

import argparse
import sys
import types

import jax
import pytest

from jax_memeff import cli
from jax_memeff._command.cases import options, programs
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.verify import parent
from jax_memeff.codegen.features import FEATURES

CALL = "--dtype bf16 --head-dim 64 --seq 64"
KINDS = {"padded": "", "packed": "--varlen", "paged": "--page-size 16"}
VALUES = {
    "window": "--window 5",
    "score_function": "--score-function own:score",
    "mask_function": "--mask-function own:mask",
    "bias": "--bias 16",
    "bias_layout": "--bias 16 --bias-layout rows",
    "page_size": "--page-size 16",
    "key_scale": "--key-scale heads",
    "value_scale": "--value-scale pages",
    "latent": "--latent --value-dim 32 --key-heads 1",
}


def parser():
    found = argparse.ArgumentParser()
    options.add_to(found)
    return found


def names_of_features():
    own = argparse.ArgumentParser()
    for feature in FEATURES:
        feature.add_flags(own)
    return list(vars(own.parse_args([])))


def case_of(text):
    return options.case("verify --like", parser().parse_args(text.split()))


def program_of(case):
    return str(jax.make_jaxpr(programs.complete(case, "cuda"))(Arrays.draw(case).given()))


@pytest.fixture
def own_functions(monkeypatch):
    module = types.SimpleNamespace(
        score=lambda s, b, h, q, k: s + 0.5 * (q - k), mask=lambda b, h, q, k: (q + k) % 3 > 0
    )
    monkeypatch.setitem(sys.modules, "own", module)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", names_of_features())
@pytest.mark.parametrize("kind", KINDS)
def test_an_option_changes_the_program_or_is_refused(own_functions, kind, name):
    """This fails for an option of a new feature that the table lacks."""
    flag = f"--{name.replace('_', '-')}"
    if flag in KINDS[kind]:
        return
    text = f"{CALL} {KINDS[kind]} {VALUES.get(name, flag)}"
    try:
        case = case_of(text)
    except ValueError as error:
        assert flag in str(error) and "leave" in str(error)
        return
    assert program_of(case) != program_of(case_of(f"{CALL} {KINDS[kind]}"))
    Arrays.draw(case).problem()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--dtype bf16 --causal", "--dtype, --causal describe your own call: pass --like"),
        ("--like --all", "expected --like for one call, or --all"),
        ("--like --causal", "verify --like needs --dtype and --head-dim"),
        ("--like --dtype f64 --head-dim 64", "expected one of f16, bf16, f32, tf32"),
        (f"--like {CALL} --heads 4 --key-heads 3", "--heads must be a multiple of --key-heads"),
        (f"--like {CALL} --heads 0", "argument --heads: expected an integer of at least 1"),
        (f"--like {CALL} --bias-layout rows", "--bias-layout rows needs --bias"),
        ("--like --dtype f32 --head-dim 64 --bias 16", "a 16-bit bias with float32 inputs"),
        (f"--like {CALL} --page-size 24", "a multiple of 16"),
        ("--limit 0", "argument --limit: expected a number of seconds above 0, got '0'"),
        ("--limit nan", "argument --limit: expected a number of seconds above 0, got 'nan'"),
        ("--log /dev/null/log", "argument --log: /dev/null/log cannot be written"),
        ("--json .", "argument --json: . cannot be written: Is a directory"),
        (f"--like {CALL} --page-size 16 --latent --key-heads 2", "expected --key-heads 1, got 2"),
        (
            f"--like {CALL} --page-size 16 --dropout",
            "paged attention (--page-size) does not take --dropout: expected options among "
            "--causal, --window",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(parent, "run", lambda *_: pytest.fail("cases were run"))
    with pytest.raises(SystemExit) as raised:
        cli.main(["verify", *arguments.split()])
    assert raised.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
