"""``python -m jax_memeff`` with odd paths, flags that conflict, and Ctrl-C."""

import errno
import os
import resource

import pytest
from command_line import environment, run

from jax_memeff import cli, config
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import prebuilt, program_cache
from jax_memeff.codegen.toolchain.compile import Compiled

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

__all__ = ["environment"]

BUILD = ["build", "--dtype", "f16", "--head-dim", "64", "--causal", "--arch", "sm_80"]


@pytest.fixture
def no_compiler(monkeypatch):
    """Kernels compile at once, to an image that is none."""

    def compile_many(jobs, on_done):
        for spec, arch in jobs:
            names = tuple(entry.name for entry in spec.entry_points)
            compiled = Compiled(b"image", names, (), (), "", 1.0, False)
            compiler.store(*compiler.source(spec, arch), compiled)
            on_done(spec, arch, compiled)

    monkeypatch.setattr(cli, "compile_many", compile_many)


def test_an_output_whose_name_no_file_can_have_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as raised:
        cli.main([*BUILD, "--output", str(tmp_path / ("k" * 300))])
    assert raised.value.code == 2
    assert "kkk cannot be written: File name too long" in capsys.readouterr().err


def test_the_path_of_an_archive_is_printed_as_it_is(capsys, tmp_path, no_compiler):
    path = tmp_path / "[bold]kernels [1].zip"
    code, out = run(capsys, *BUILD, "--output", str(path))
    assert code == 0 and path.exists()
    assert f"JAX_MEMEFF_KERNELS={path}\n" in out


def test_names_that_the_encoding_of_the_output_lacks_are_escaped(
    capsys, tmp_path, no_compiler, monkeypatch
):
    path = tmp_path / os.fsdecode(b"not UTF-8 \xff.zip")
    code, out = run(capsys, *BUILD, "--output", str(path))
    assert code == 0 and path.exists()
    assert r"not UTF-8 \udcff.zip" in out
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", str(path))
    code, out = run(capsys, "info")
    assert code == 0 and r"not UTF-8 \udcff.zip: " in out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a file", "cannot be used (Not a directory): name another directory"),
        ("below a file", "cannot be used (Not a directory): name another directory"),
        ("a name too long", "cannot be used (File name too long): name another directory"),
        ("of others", "can be written to by other users"),
        ("none", "there is no home directory: name a directory in JAX_MEMEFF_CACHE_DIR"),
    ],
)
def test_build_ends_if_the_cache_takes_no_kernels(
    capsys, tmp_path, no_compiler, monkeypatch, kind, said
):
    """Without ``--output`` the kernels would be lost, although the command seemed to succeed."""
    path = tmp_path / "cache"
    if kind == "none":
        monkeypatch.setattr(config, "cache_dir", lambda: None)
    elif kind == "of others":
        path.mkdir()
        path.chmod(0o777)
        monkeypatch.setattr(program_cache, "_warn_once", lambda message: None)
    elif kind == "a name too long":
        path = tmp_path / ("k" * 300)
    else:
        path.write_text("mine")
    path = path / "inner" if kind == "below a file" else path
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(path))
    assert cli.main(BUILD) == 1
    error = capsys.readouterr().err
    assert f"{said}" in error and "--output writes an archive instead" in error
    assert run(capsys, *BUILD, "--output", str(tmp_path / "kernels.zip"))[0] == 0


def test_a_part_of_the_cache_that_is_a_file(capsys, tmp_path, no_compiler, monkeypatch):
    (tmp_path / program_cache.SUBDIRECTORY).write_text("mine")
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    assert cli.main(BUILD) == 1
    place = tmp_path / program_cache.SUBDIRECTORY
    assert f"{place} cannot be used (Not a directory)" in capsys.readouterr().err


def test_build_says_which_kernels_the_cache_lacks(capsys, tmp_path, no_compiler, monkeypatch):
    note = "JAX_MEMEFF_KERNELS names were not put into the cache: unset it"
    path = tmp_path / "kernels.zip"
    assert note not in run(capsys, *BUILD)[1]
    assert run(capsys, *BUILD, "--output", str(path))[0] == 0
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", str(path))
    code, out = run(capsys, *BUILD)
    assert code == 0 and note in out
    assert note not in run(capsys, *BUILD, "--output", str(path))[1]


def test_build_ends_if_the_disk_is_full(capsys, no_compiler):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        code = cli.main(BUILD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert "cannot be used (File too large): name another directory" in capsys.readouterr().err


def test_info_says_why_the_cache_is_not_used(capsys, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("mine")
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path / "cache"))
    code, out = run(capsys, "info")
    assert code == 0 and "cache cannot be used (Not a directory)" in " ".join(out.split())


def test_ctrl_c_while_an_archive_is_written_leaves_the_old_one(
    capsys, tmp_path, no_compiler, monkeypatch
):
    path = tmp_path / "kernels.zip"
    path.write_bytes(b"the old one")
    add = prebuilt._add

    def interrupted(archive, name, data):
        if name != "manifest.json":
            raise KeyboardInterrupt
        add(archive, name, data)

    monkeypatch.setattr(prebuilt, "_add", interrupted)
    assert cli.main([*BUILD, "--output", str(path)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert path.read_bytes() == b"the old one"
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "llama"], "expected --models or a problem, not both"),
        (["--all"], "--value-dim needs --head-dim"),
        (["--all", "--dtype", "f16"], "--value-dim needs --head-dim"),
    ],
)
def test_a_value_dim_is_never_ignored(capsys, monkeypatch, arguments, said):
    monkeypatch.setattr(cli, "compile_many", lambda *_: pytest.fail("kernels were compiled"))
    with pytest.raises(SystemExit) as raised:
        cli.main(["build", "--arch", "sm_80", "--value-dim", "64", *arguments])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_digits_of_other_scripts_are_no_architecture(capsys, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_\u0668\u0660")  # int() reads 80
    with pytest.raises(SystemExit) as raised:
        cli.main(["kernels"])
    assert raised.value.code == 2
    assert "expected JAX_MEMEFF_ARCHS to be a comma-separated list" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "build"])
def test_a_page_has_at_most_as_many_keys_as_int32_counts(capsys, monkeypatch, command):
    monkeypatch.setattr(cli, "compile_many", lambda *_: pytest.fail("kernels were compiled"))
    problem = ["--dtype", "f16", "--head-dim", "64", "--arch", "sm_80"]
    with pytest.raises(SystemExit) as raised:
        cli.main([command, *problem, "--page-size", str(2**31)])
    assert raised.value.code == 2
    said = "the size of pages to be 1, 2, 4, 8 or a multiple of 16 below 2**31, got 2147483648"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--split-q"], "--split-q needs --direction backward, got forward"),
        (
            ["--direction", "backward", "--query-rows", "16"],
            "--query-rows needs --direction forward, got backward",
        ),
    ],
)
def test_a_strategy_of_another_direction_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as raised:
        cli.main(["explain", "--dtype", "f16", "--head-dim", "64", "--arch", "sm_80", *arguments])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "build"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bias-layout", "rows"], "--bias-layout rows needs --bias, got none"),
        (["--window", "-1"], "argument --window: expected an integer of at least 0, got '-1'"),
        (["--window", "x"], "argument --window: expected an integer of at least 0, got 'x'"),
    ],
)
def test_flags_without_a_meaning_are_refused(capsys, monkeypatch, command, arguments, said):
    monkeypatch.setattr(cli, "compile_many", lambda *_: pytest.fail("kernels were compiled"))
    with pytest.raises(SystemExit) as raised:
        cli.main([command, "--dtype", "f16", "--head-dim", "64", "--arch", "sm_80", *arguments])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_an_archive_for_which_the_disk_has_no_space_ends_with_1(
    capsys, tmp_path, no_compiler, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "kernels.zip"
    monkeypatch.setattr(prebuilt, "_add", full)
    assert cli.main([*BUILD, "--output", str(path)]) == 1
    errors = capsys.readouterr().err
    assert f"--output {path} cannot be written: No space left on device" in errors
    assert "usage:" not in errors
    assert list(tmp_path.glob(".*.tmp")) == [] and not path.exists()


def test_brackets_in_paths_and_remarks_are_no_markup(capsys, monkeypatch):
    monkeypatch.setattr(cli.nvrtc, "versions", lambda: {"NVRTC": "13.0, in /opt/[/cuda]"})
    code, out = run(capsys, "info")
    assert code == 0 and "/opt/[/cuda]" in out

    def compile_many(jobs, on_done):
        for spec, arch in jobs:
            on_done(spec, arch, Compiled(b"image", (), (), ("(C7510) [/lost]",), "", 1.0, True))

    monkeypatch.setattr(cli, "compile_many", compile_many)
    code, out = run(capsys, *BUILD)
    assert code == 0 and "(C7510) [/lost]" in out
