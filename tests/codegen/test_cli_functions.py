"""``python -m jax_memeff`` with the user's own functions."""

import importlib
import sys

import pytest
from command_line import environment, run

from jax_memeff import cli
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain.compile import Compiled

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

__all__ = ["environment"]


@pytest.fixture
def named_functions(tmp_path, monkeypatch):
    """A user's module, whose functions read its arrays."""
    (tmp_path / "user_model.py").write_text(
        """
import jax
import jax.numpy as jnp

slopes, prefix = jnp.array([0.5, 0.25]), jnp.array([3, 4])


class Bias:
    @staticmethod
    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)


def prefixes(b, h, q, k):
    return k < prefix[b]


def two_arguments(q, k):
    return q > k


def gamma(score, b, h, q, k):
    return jax.lax.lgamma(score)


def unknown(score, b, h, q, k):
    return {}["rate"]


def leaves(score, b, h, q, k):
    raise SystemExit(3)


class Lazy:
    def __getattr__(self, name):
        raise RuntimeError(f"{name} needs a GPU")


lazy = Lazy()
"""
    )
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('no GPU here')")
    (tmp_path / "script_model.py").write_text("raise SystemExit('usage: script_model FILE')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("user_model", "broken_model", "script_model"):
        sys.modules.pop(name, None)


_PROBLEM = ("--dtype", "bf16", "--head-dim", "64", "--arch", "sm_90a")


def test_explain_shows_the_device_code_of_named_functions(capsys, named_functions):
    code, out = run(
        capsys, "explain", *_PROBLEM, "--direction", "backward", "--causal", "--soft-cap",
        "--score-function", "user_model:Bias.alibi", "--mask-function", "user_model:prefixes",
    )  # fmt: skip
    assert code == 0
    assert "causal, a score function and a mask function" in out.splitlines()[0]
    assert "struct ScoreProgram {" in out and "struct MaskProgram {" in out
    assert "tanh_approx" in out and "kSoftCap = false;" in out  # the cap is part of the function
    assert "kFunctionGradient = true;" in out
    _, out = run(capsys, "explain", *_PROBLEM, "--score-function", "user_model:Bias.alibi")
    assert "kFunctionGradient = false;" in out and "tanh" not in out


def test_build_compiles_the_kernels_that_a_call_with_the_function_finds(
    capsys, named_functions, monkeypatch
):
    """Their names and sources equal those of lowered programs."""
    jobs = []

    def compile_many(asked, on_done):
        jobs.extend(asked)
        for spec, arch in asked:
            on_done(spec, arch, Compiled(b"", (), (), (), "", 1.0, True))

    monkeypatch.setattr(cli, "compile_many", compile_many)
    code, _ = run(
        capsys, "build", *_PROBLEM, "--causal", "--score-function", "user_model:Bias.alibi"
    )
    assert code == 0
    built = {spec for spec, _ in jobs}
    assert {spec.direction for spec in built} == {"forward", "backward", "tangent"}

    model = importlib.import_module("user_model")
    for argnums in (0, (0, 1)):
        assert _lowered(model, argnums, monkeypatch) <= built


def _lowered(model, argnums, monkeypatch):
    """The kernels of a loss and its gradients by the operands, and by the slopes if asked."""
    import jax
    import jax.numpy as jnp

    from jax_memeff import dot_product_attention

    found = set()

    def loss(query, slopes):
        def alibi(score, b, h, q, k):
            return score + slopes[h] * (k - q)

        out = dot_product_attention(
            query, query, query, score_mod=alibi, is_causal=True, implementation="cuda"
        )
        return out.astype(jnp.float32).sum()

    def compiled(spec, arch):
        found.add(spec)
        names = tuple(entry.name for entry in spec.entry_points)
        return Compiled(b"image", names, (), (), "", 1.0, False)

    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    query = jax.ShapeDtypeStruct((8, 4096, 16, 64), jnp.bfloat16)
    for function in (loss, jax.grad(loss, argnums)):
        jax.jit(function).trace(query, model.slopes).lower(lowering_platforms=("cuda",))
    assert {spec.direction for spec in found} == {"forward", "backward"}
    return found


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("score", "alibi", "--score-function must be MODULE:NAME, for example"),
        ("score", "user_model:", "--score-function must be MODULE:NAME"),
        ("score", "user_model.py:gamma", "MODULE:NAME, for example models.attention:alibi for a"),
        ("score", "./user_model.py:gamma", "--score-function must be MODULE:NAME, for example"),
        ("score", "user_model:leaves", "--score-function user_model:leaves raised SystemExit: 3"),
        ("mask", "no_such_module:f", "the import of no_such_module raised ModuleNotFoundError"),
        ("mask", "broken_model:f", "the import of broken_model raised RuntimeError: no GPU here"),
        (
            "mask",
            "user_model:prefix_",
            "has no attribute 'prefix_'; did you mean user_model:prefix",
        ),
        ("mask", "user_model:two_arguments", "--mask-function user_model:two_arguments: Mask.func"),
        ("score", "user_model:two_arguments", "score_mod must take (score, batch, head, query, ke"),
        ("mask", "script_model:f", "the import of script_model raised SystemExit: usage: script_m"),
        ("mask", "user_model:lazy.f", "the attribute raised RuntimeError: f needs a GPU"),
        ("score", "user_model:unknown", "--score-function user_model:unknown raised KeyError: 'ra"),
        ("score", "user_model:slopes", "must be a function of 5 arguments"),
    ],
)
def test_wrong_names_of_functions_exit_with_2(capsys, named_functions, flag, name, said):
    with pytest.raises(SystemExit) as raised:
        cli.main(["explain", *_PROBLEM, f"--{flag}-function", name])
    assert raised.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_functions_without_scalar_form_exit_with_1(capsys, named_functions):
    code = cli.main(["explain", *_PROBLEM, "--score-function", "user_model:gamma"])
    assert code == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "--score-function user_model:gamma: score_mod cannot be written" in error


def test_build_takes_features_of_one_problem_only(capsys):
    with pytest.raises(SystemExit):
        cli.main(["build", "--all", "--causal", "--arch", "sm_80"])
    assert "features of one problem, or --all" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["build", "--causal", "--dtype", "bf16", "--arch", "sm_80"])
    assert "expected --dtype and --head-dim" in capsys.readouterr().err
