"""``python -m jax_memeff doctor``, on machines of many kinds, and the kernels of models."""

import os
import subprocess
import sys

import pytest

import jax_memeff
from jax_memeff import cli
from jax_memeff._command import doctor, models, tables
from jax_memeff._command.doctor import Machine
from jax_memeff.codegen.toolchain import nvrtc, parts, prebuilt, program_cache
from jax_memeff.codegen.toolchain.compile import Compiled
from jax_memeff.errors import UnsupportedError

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

NO_GPU = Machine(None, (), "")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_MEMEFF_ARCHS", raising=False)


@pytest.fixture
def on(capsys, monkeypatch):
    """Runs the command on a machine; the call of attention itself stays on the CPU."""

    def run(machine):
        attention = doctor._attention
        monkeypatch.setattr(doctor, "_machine", lambda: machine)
        monkeypatch.setattr(doctor, "_attention", lambda _: attention(NO_GPU))
        code = cli.main(["doctor"])
        found, _, advice = capsys.readouterr().out.partition("\nNext\n")
        monkeypatch.setattr(doctor, "_attention", attention)
        return code, " ".join(found.split()), " ".join(advice.split())

    return run


def test_a_machine_without_a_gpu(on):
    code, found, advice = on(NO_GPU)
    assert code == 0
    assert found.startswith("ok package jax-memeff ")
    assert "absent GPU no NVIDIA driver" in found and "ok attention" in found
    assert advice.startswith("Nothing is missing on a CPU: replace jax.nn.dot_product_attention")


def test_an_unknown_platform(tmp_path):
    """JAX raises the same error each time that a device is asked for."""
    found = subprocess.run(
        [sys.executable, "-m", "jax_memeff", "doctor"],
        env=os.environ | {"JAX_PLATFORMS": "abacus", "JAX_MEMEFF_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1 and not found.stderr
    assert "broken  attention  JAX has no backend: " in found.stdout
    assert "unset JAX_PLATFORMS, which is 'abacus', or name a known backend" in found.stdout


@pytest.mark.parametrize(
    ("machine", "said", "next_step"),
    [
        (Machine((13, 0), (90,), ""), "JAX's GPU sm_90", "Nothing is missing: replace"),
        (Machine((12, 8), (80,), ""), "is newer than the driver", '[nvrtc-cu12]"'),
        (Machine((12, 2), (80,), ""), "too old for the kernels", "550.54.14 or later"),
        (Machine((13, 0), (), "Unknown backend"), "JAX does not use the GPU", '[cuda13]"'),
        (Machine((13, 0), (), "no", "cpu"), "JAX does not use the GPU: no", "unset JAX_PLATFORMS"),
        (Machine((13, 0), (), "no", "cuda,cpu"), "JAX does not use", '[cuda13]"'),
        (Machine((13, 0), (70,), ""), "sm_70", "implementation='xla'"),
    ],
    ids=["well", "cuda 12", "old driver", "no plugin", "CPU asked for", "both asked for", "volta"],
)
def test_machines_with_a_gpu(on, monkeypatch, machine, said, next_step):
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5.37")
    if machine.devices == (70,):
        monkeypatch.setattr(nvrtc, "compile", lambda *arguments: (b"", ""))
        monkeypatch.setattr(nvrtc, "fatbin", lambda *arguments: b"")
    code, found, advice = on(machine)
    assert said in found and next_step in advice
    assert code == (0 if next_step.startswith("Nothing") else 1)


def test_a_missing_compiler(on, monkeypatch):
    monkeypatch.setattr(parts, "all_found", lambda: {parts.NVRTC: None, parts.CCCL: None})
    code, found, advice = on(Machine((12, 8), (80,), ""))
    assert code == 1 and "broken compiler NVRTC, CCCL not found" in found
    assert advice.startswith("pip install") and advice.endswith(
        '[nvrtc-cu12]"'
    )  # JAX's plugin is there
    _, _, advice = on(Machine((12, 8), (), "Unknown backend"))
    assert advice.startswith("pip install") and advice.endswith('[cuda12]"')
    code, found, _ = on(NO_GPU)  # which needs none
    assert code == 0 and "absent compiler" in found


def test_a_cache_that_others_can_write_to(on, tmp_path):
    tmp_path.chmod(0o777)
    code, found, advice = on(NO_GPU)
    assert code == 1 and "broken cache" in found
    assert f"chmod go-w '{tmp_path}'" in advice


@pytest.mark.parametrize("filled", [True, False])
def test_a_cache_that_is_read_only(on, tmp_path, monkeypatch, capsys, filled):
    """One that root has filled, as in a container image, is fine; an empty one is of no use."""
    if filled:
        program_cache.ProgramCache(tmp_path).put("0" * 64, b"payload")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    code, found, advice = on(NO_GPU)
    assert code == (0 if filled else 1)
    state = "ok" if filled else "broken"
    assert f"{state} cache {tmp_path}, {int(filled)} kernels, is read-only" in found
    assert ("set JAX_MEMEFF_CACHE_DIR" in advice) == (not filled)
    assert cli.main(["info"]) == 0
    assert f"{tmp_path}, read-only" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("outcome", [float("nan"), RuntimeError("broken")])
def test_attention_that_is_wrong_or_raises_is_to_be_reported(on, monkeypatch, outcome):
    """Without a GPU an installation of the compiler would not help."""

    def attention(query, *arguments, **keywords):
        if isinstance(outcome, Exception):
            raise outcome
        return query * outcome

    monkeypatch.setattr(jax_memeff, "dot_product_attention", attention)
    code, found, advice = on(NO_GPU)
    said = "RuntimeError: broken" if isinstance(outcome, Exception) else "is not finite"
    assert code == 1 and "broken attention" in found and said in found
    assert advice == "report it, with the output of: python -m jax_memeff info"


def test_commands_are_not_broken_into_lines(monkeypatch, capsys):
    """A long command can be copied from a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(doctor, "_machine", lambda: NO_GPU)
    cli.main(["doctor"])
    lines = capsys.readouterr().out.split("Next\n")[1].splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "Nothing is missing on a CPU",
        "On a machine with a GPU",
    ]


@pytest.mark.parametrize("kernels", [None, 0, 1])
def test_an_archive(on, tmp_path, monkeypatch, kernels):
    path = tmp_path / "kernels.zip"
    if kernels is not None:
        prebuilt.write(path, {("source", "sm_80", ("name",)): b"payload"} if kernels else {}, {})
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", str(path))
    code, found, advice = on(NO_GPU)
    assert code == (0 if kernels else 1)
    assert ("ok archive 1 kernels for sm_80" in found) == bool(kernels)
    assert ("archive has no kernels" in found) == (kernels == 0)
    assert ("build --models" in advice) == (not kernels)
    assert ("no kernels" in tables.prebuilt_kernels()) == (kernels == 0)


def test_the_driver_of_this_machine_is_asked():
    assert (doctor._driver() or (12, 0)) >= (12, 0)
    assert doctor._machine().devices or doctor._machine().jax_error


def test_the_models_of_the_readme_have_kernels():
    jobs = models.kernels(["llama", "gemma", "gpt-oss"], ["sm_80", "sm_90a"])
    assert len(set(jobs)) == len(jobs) > 50
    for direction in ("forward", "backward"):
        for arch in ("sm_80", "sm_90a"):
            own = {spec for spec, job in jobs if job == arch and spec.direction == direction}
            assert {spec.padded_head_dim for spec in own} == {64, 128, 256}
            assert any("_sinks" in spec.name for spec in own)
            assert any("_varlen" in spec.name for spec in own)
    assert any("_pages64" in spec.name for spec, _ in jobs)
    assert {spec.kernel.stem for spec, _ in models.kernels(["deepseek"], ["sm_90a"])} > {
        "sm90/latent"
    }
    with pytest.raises(UnsupportedError, match="latent"):
        models.kernels(["deepseek"], ["sm_80"])


def test_build_writes_an_archive(capsys, tmp_path, monkeypatch):
    def compile_many(jobs, on_done):
        for spec, arch in jobs:
            names = tuple(entry.name for entry in spec.entry_points)
            on_done(spec, arch, Compiled(b"image", names, (), (), "", 1.0, False))

    monkeypatch.setattr(cli, "compile_many", compile_many)
    path = tmp_path / "kernels.zip"
    command = ["build", "--models", "llama", "--arch", "sm_90a", "--output", str(path)]
    assert cli.main(command) == 0
    expected = len(models.kernels(["llama"], ["sm_90a"]))
    assert f"{expected} kernels, 0.0 MB: JAX_MEMEFF_KERNELS={path}" in capsys.readouterr().out
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", str(path))
    assert cli.main(["info"]) == 0
    assert f"{path}: {expected} kernels for sm_90a, by jax_memeff" in capsys.readouterr().out
    # Whether it can be written is known before the kernels are compiled.
    monkeypatch.setattr(cli, "compile_many", lambda *_: pytest.fail("kernels were compiled"))
    for wrong in (
        ["--models", "llama", "--head-dim", "64"],
        ["--models", "lama"],
        ["--models", "llama", "--output", str(tmp_path / "no" / "kernels.zip")],
        ["--models", "llama", "--output", str(tmp_path)],
        ["--models", "llama", "--output", str(tmp_path / ("k" * 250))],
        ["--models", "llama", "--output", os.devnull],
    ):
        with pytest.raises(SystemExit):
            cli.main(["build", "--arch", "sm_90a", *wrong])
    errors = capsys.readouterr().err
    assert "--models or a problem, not both" in errors and "got 'lama'" in errors
    assert f"kernels.zip cannot be written: {tmp_path / 'no'} is not a directory" in errors
    assert f"--output {tmp_path} cannot be written: it is a directory" in errors
    assert "kkk cannot be written: File name too long" in errors
    assert f"--output {os.devnull} cannot be written: it is no regular file" in errors
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")] == []
