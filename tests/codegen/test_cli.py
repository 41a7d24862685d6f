"""``python -m jax_memeff``: its output and exit codes, without a GPU and with little compiling."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment, run

from jax_memeff import cli
from jax_memeff.codegen import select
from jax_memeff.codegen.features import AskedBias
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.strategy import Strategy
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import nvrtc, parallel, parts, program_cache
from jax_memeff.codegen.toolchain.compile import Compiled, Resource
from jax_memeff.errors import CompileError

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

__all__ = ["environment"]

GOLDEN = Path(__file__).parents[1] / "golden"


def test_kernels_writes_the_golden_file():
    done = subprocess.run(
        [sys.executable, "-m", "jax_memeff", "kernels", "--arch", "sm_75", "--arch", "sm_75"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / "kernels_sm_75.txt").read_text()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("arguments", ["kernels --arch sm_75", "--help"])
@pytest.mark.parametrize(
    ("stdout", "said"),
    [
        (">/dev/full", "cannot write to standard output: No space left on device"),
        (">&-", "standard output is closed"),
        ("| true", ""),
    ],
)
def test_output_that_cannot_be_written_is_an_error(arguments, stdout, said):
    command = f"{sys.executable} -m jax_memeff {arguments}"
    done = subprocess.run(
        ["bash", "-c", f'{command} {stdout}; exit "${{PIPESTATUS[0]}}"'],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == bool(said)  # no traceback, not even at exit
    assert done.stderr.startswith(said)


def test_info_shows_the_toolchain(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")
    code, out = run(capsys, "info")
    assert code == 0
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert {"NVRTC", "CUTLASS", "CCCL", "CUDA headers", "driver"} <= set(lines)
    assert "sm_80, sm_90a" in lines["JAX_MEMEFF_ARCHS"]
    assert str(tmp_path) in lines["kernel cache"]


@pytest.mark.parametrize("arch", ["sm_75", None])
def test_info_times_each_step(capsys, monkeypatch, arch):
    """Without a GPU, too: sm_80 then stands for all architectures."""
    source = 'extern "C" __global__ void empty() {}'
    monkeypatch.setattr(cli.emit, "source", lambda spec: source)
    code, out = run(capsys, "info", "--timings", *(["--arch", arch] if arch else []))
    assert code == 0
    for step in ("digest of the headers", "compile", "find in the cache"):
        assert re.search(rf"^{step} \(.*, {arch or 'sm_80'}\) +\d+\.\d *$", out, re.MULTILINE)


def test_info_without_a_compiler_shows_the_rest_and_how_to_install_it(capsys, monkeypatch):
    def absent(*_):
        raise parts.missing([parts.NVRTC])

    monkeypatch.setattr(nvrtc, "compile", absent)
    assert cli.main(["info", "--timings"]) == 1
    shown = capsys.readouterr()
    assert "kernel cache" in shown.out
    assert "NVRTC not found" in shown.err and '[nvrtc]"' in shown.err


@pytest.mark.quick
def test_explain_shows_choice_grid_and_source(capsys):
    code, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a",
        "--causal", "--soft-cap", "--seq", "1000",
    )  # fmt: skip
    assert code == 0
    asked = Problem("forward", "bf16", 128, 128, "sm_90a", {"mask": "causal", "soft_cap": True})
    spec = select.select(asked)
    assert verdicts(out)[0] == (spec.name, f"selected: {spec.tile.reason}")
    assert f"\n{spec.name}  {spec.shared_bytes} bytes of shared memory\n" in out
    tiles = -(-1000 // spec.tile.query)
    assert f"{tiles} tiles of {spec.tile.query} query rows for each of the query heads" in out
    assert "kMask = memeff::MaskKind::causal;" in out


def verdicts(out):
    """The kernels that ``explain`` shows, each with what it says of them."""
    return re.findall(r"^(fmha_\w+)  \d+ bytes of shared memory\n  (.*)$", out, re.MULTILINE)


@pytest.mark.quick
def test_explain_begins_with_the_choice_and_its_nearest_losers(capsys, monkeypatch):
    problem = "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a", "--causal"
    _, out = run(capsys, *problem)
    choice = out.partition("#include")[0]
    assert verdicts(choice) == verdicts(out) and len(choice.splitlines()) < 16
    (name, verdict), *losers = verdicts(choice)
    assert name == "fmha_fwd_bf16_d128_128x128_causal_sm90" and verdict.startswith("selected: ")
    assert losers == [
        (
            "fmha_fwd_bf16_d128_64x64_groups_causal_sm90",
            "its consumer groups are for few work tiles whose keys are not long",
        ),
        ("fmha_fwd_bf16_d128_128x64_causal_sm90", "fits, but comes after the selected one"),
        ("fmha_fwd_bf16_d128v64_128x64_causal_sm90", "value_dim 128 is above its 64"),
    ]
    explained = select.explain(Problem("forward", "bf16", 128, 128, "sm_90a", {"mask": "causal"}))
    assert f"\n{len(explained) - 4} more with --all\n" in choice
    _, out = run(capsys, *problem, "--all")
    found = verdicts(out)
    assert len(found) == len(explained) and found[0] == (name, verdict)
    assert "more with --all" not in out
    others = [spec.name for spec, _ in explained]
    others.remove(name)
    assert [name for name, _ in found[1:]] == others
    fits = {name: verdict for name, verdict in found if verdict.startswith("fits, ")}
    assert len(set(fits.values())) == 2
    for name, verdict in fits.items():
        assert ("with more padding" in verdict) == ("_d128_" not in name), verdict


def test_explain_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    """Only names and the lines of the source may be longer than that."""
    monkeypatch.setattr(cli, "_FILE_WIDTH", 80)
    _, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a", "--all",
    )  # fmt: skip
    choice = out.partition("#include")[0]
    count = choice.count(" bytes of shared memory\n")
    assert count > 200 and len(choice.splitlines()) < 4 * count
    assert max(map(len, choice.splitlines())) <= 80


def test_explain_of_a_problem_that_no_kernel_solves_shows_the_nearest(capsys, monkeypatch):
    explained = [(spec, ["it is Tuesday"]) for spec, _ in select.explain(
        Problem("forward", "bf16", 64, 64, "sm_80")
    )]  # fmt: skip
    explained[7] = explained[7][0], ["it is Tuesday", "and raining"]
    monkeypatch.setattr(select, "explain", lambda *_: explained)
    code, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "64", "--arch", "sm_80"
    )  # fmt: skip
    assert code == 1 and "no kernel fits this problem" in out and "#include" not in out
    assert [verdict for _, verdict in verdicts(out)] == ["it is Tuesday"] * 3


def test_dtypes_have_their_names_in_jax_too(capsys):
    for name, short in (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")):
        _, out = run(
            capsys, "explain", "--dtype", name, "--head-dim", "64", "--arch", "sm_80",
            "--query-rows", "16",
        )  # fmt: skip
        assert out.startswith(f"forward, {short}, head_dim=64")
    with pytest.raises(SystemExit):
        cli.main(["explain", "--dtype", "float8", "--head-dim", "64"])
    with pytest.raises(SystemExit):
        cli.main([])
    assert "kernels,explain,build}" in capsys.readouterr().err


def test_explain_takes_lists_of_keys_as_pages_of_one_key_or_as_bits(capsys):
    base = "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a"
    status, out = run(capsys, *base, "--keys", "--causal")
    assert not status and "fmha_fwd_bf16_d128_128x128_varlen_pages1_sm90" in out
    for given in (("--direction", "backward"), ("--bias", "16")):
        status, out = run(capsys, *base, "--keys", *given)
        assert not status and "_boolean_" in out and "_pages1_" not in out
    latent = "--keys", "--latent", "--value-dim", "512", "--direction", "backward"
    status, out = run(capsys, *base[:4], "576", *base[5:], *latent)
    assert not status and "_latent_varlen_pages1_" in out
    for dims in (("128",), ("576", "--value-dim", "512", "--latent")):
        status, out = run(capsys, *base[:4], *dims, *base[5:], "--keys", "--direction", "tangent")
        assert status == 1
        assert out.splitlines()[1:] == [
            "  tangents of lists of keys (Mask.keys) are computed in plain JAX"
        ]


def test_explain_draws_the_tiles(capsys, tmp_path, monkeypatch):
    base = "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a", "--seq", "512"
    _, out = run(capsys, *base, "--causal")
    assert "T 512, S 512, tiles of 128 x 128: 6 skipped, 4 partial, 6 full; 62% computed" in out
    assert "\n████▒▒·\n" in out
    _, out = run(capsys, *base, "--window", "128", "--segments")
    assert "\n·  ▒▒▒▒·\n".replace("  ", " ") in out
    assert "without --segments, whose arrays are unknown here" in out
    _, out = run(capsys, *base, "--window")
    assert "no drawing: pass a bound, such as --window 256" in out
    (tmp_path / "drawn_masks.py").write_text(
        "def even(b, h, q, k):\n    return k // 128 % 2 == 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, out = run(capsys, *base, "--mask-function", "drawn_masks:even")
    assert out.count("\n██· ██·\n") + out.count("\n██· ██·") >= 4
    _, out = run(capsys, *base, "--query-rows", "16")
    assert "no drawing: the rows of a tile belong to several heads" in out


@pytest.mark.parametrize("option", ["--head-dim", "--value-dim", "--seq"])
@pytest.mark.parametrize("value", ["0", "-3", "1e3"])
def test_sizes_are_at_least_1(capsys, option, value):
    base = "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a"
    with pytest.raises(SystemExit, match="2"):
        cli.main([*base, option, value])
    expected = f"argument {option}: expected an integer of at least 1, got '{value}'"
    assert expected in capsys.readouterr().err


def test_explain_draws_no_more_tiles_than_memory_has(capsys):
    code, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "64", "--arch", "sm_90a",
        "--seq", "1000000000",
    )  # fmt: skip
    assert code == 0
    assert re.search(r"no drawing: it would have \d{14} tiles; pass a smaller --seq", out)


def test_explain_of_few_queries(capsys):
    problem = Problem("forward", "bf16", 128, 128, "sm_90a")
    _, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a",
        "--query-rows", "16", "--seq", "1",
    )  # fmt: skip
    assert verdicts(out)[0][0] == select.select(problem, Strategy(query_rows="16")).name
    assert "1 tiles of 16 rows; as many splits of the keys as fill the device" in out
    _, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "128", "--arch", "sm_90a", "--all"
    )  # fmt: skip
    assert "it splits the keys, and work tiles fill the GPU without splits" in out


def test_explain_of_an_unsupported_problem(capsys):
    code, out = run(
        capsys, "explain", "--direction", "backward", "--dtype", "f64", "--head-dim", "64",
        "--arch", "sm_80", "--deterministic",
    )  # fmt: skip
    assert code == 1
    assert "deterministic" in out.splitlines()[0]
    assert "float64 has no kernel" in out


def test_build_prints_resources_and_is_not_fooled_by_failures(capsys, monkeypatch):
    def compile_many(jobs, on_done):
        error = CompileError("k(1): error: no [bold] luck", {"NVRTC": "13.5"})
        on_done(*jobs[0], error)
        for spec, arch in jobs[1:]:
            names = tuple(entry.name for entry in spec.entry_points)
            resources = tuple(Resource(name, 168, 8, 16, 512) for name in names)
            warnings = ("(C7510) Potential Performance Loss",)
            compiled = Compiled(b"image", names, resources, warnings, "", 1.25, False)
            compiler.store(*compiler.source(spec, arch), compiled)
            on_done(spec, arch, compiled)
        raise error

    monkeypatch.setattr(cli, "compile_many", compile_many)
    code, out = run(capsys, "build", "--dtype", "bf16", "--head-dim", "64", "--arch", "sm_80")
    assert code == 1
    specs = list(select.closure("sm_80", dtypes=["bf16"], dims=[(64, 64)]))
    assert all(spec.name in out for spec in specs)
    line = next(line for line in out.splitlines() if line.startswith(f"{specs[1].name} "))
    shared = str(specs[1].shared_bytes + 512)
    assert line.split()[1:] == ["sm_80", "168", "24", shared, "1.25", "no"]
    assert "did not compile" in out and "no [bold] luck" in out
    assert f"\n{specs[1].name}, sm_80: (C7510) Potential Performance Loss\n" in out


@pytest.mark.parametrize(
    ("dims", "kinds"),
    [
        (
            ("576", "--value-dim", "512", "--latent"),
            {("fwd", "pages1"), ("bwd", "pages1")},
        ),
        (("64",), {("fwd", "pages1"), ("fwd", "boolean"), ("bwd", "boolean")}),
    ],
    ids=["latent", "keys"],
)
def test_build_compiles_the_kernels_of_lists_of_keys(dims, kinds, capsys, monkeypatch):
    built = []

    def compile_many(jobs, on_done):
        for spec, arch in jobs:
            built.append(spec.name)
            names = tuple(entry.name for entry in spec.entry_points)
            compiled = Compiled(b"image", names, (), (), "", 1.25, False)
            compiler.store(*compiler.source(spec, arch), compiled)
            on_done(spec, arch, compiled)

    monkeypatch.setattr(cli, "compile_many", compile_many)
    code, _ = run(
        capsys, "build", "--dtype", "bf16", "--keys", "--arch", "sm_90a", "--head-dim", *dims
    )
    assert code == 0
    ways = "pages1", "boolean"
    assert {(name.split("_")[1], *(x for x in ways if f"_{x}_" in name)) for name in built} == kinds


@pytest.mark.parametrize("columns", [80, 20])
def test_tables_of_numbers_are_whole_on_a_narrow_terminal(capsys, monkeypatch, columns):
    """The terminal wraps their lines; columns that fit it would have digits below each other."""
    monkeypatch.setattr(cli, "_FILE_WIDTH", columns)
    problem = Problem("forward", "f16", 32, 32, "sm_80", {"mask": "causal"})
    spec = select.select(problem, Strategy(query_rows="16"))
    resource = Resource(spec.name, 78, 0, 0, 0)
    compiled = Compiled(b"image", (spec.name,), (resource,), (), "", 1.25, True)
    monkeypatch.setattr(cli, "_jobs", lambda options: [(spec, "sm_80")])
    monkeypatch.setattr(cli, "compile_many", lambda jobs, done: done(spec, "sm_80", compiled))
    code, out = run(capsys, "build", "--models", "llama")
    assert code == 0
    assert out.splitlines()[-1].split() == [
        spec.name, "sm_80", "78", "0", str(spec.shared_bytes), "1.25", "yes"
    ]  # fmt: skip


def test_an_interrupted_build_goes_on_where_it_was(capsys, monkeypatch):
    """Kernels without an include compile in no time; the third compilation is interrupted."""
    specs = list(select.closure("sm_80", dtypes=["bf16"], dims=[(32, 32)]))[:5]
    monkeypatch.setattr(select, "closure", lambda arch, **chosen: specs)
    monkeypatch.setattr(parallel, "_available_cores", lambda: 1)
    monkeypatch.setattr(
        compiler.emit,
        "source",
        lambda spec: "".join(
            f'extern "C" __global__ void {entry.name}() {{}}\n' for entry in spec.entry_points
        ),
    )
    compiled, compile = [], nvrtc.compile

    def interrupted(source, arch, name):
        if len(compiled) == 2:
            raise KeyboardInterrupt
        compiled.append(name)
        return compile(source, arch, name)

    monkeypatch.setattr(nvrtc, "compile", interrupted)
    assert cli.main(["build", "--all", "--arch", "sm_80"]) == 130
    assert "2 of 5 kernels are done" in " ".join(capsys.readouterr().err.split())
    assert compiled == [spec.name for spec in specs[:2]]

    program_cache.current().memory.clear()  # the next command is another process
    monkeypatch.setattr(nvrtc, "compile", lambda *args: compiled.append(args[2]) or compile(*args))
    code, out = run(capsys, "build", "--all", "--arch", "sm_80")
    assert code == 0
    assert compiled == [spec.name for spec in specs]
    cached = [line.split()[-1] for line in out.splitlines() if line.split()[0] in compiled]
    assert cached == ["yes", "yes", "no", "no", "no"]


def test_explain_tells_why_each_kernel_is_rejected(capsys):
    code, out = run(
        capsys, "explain", "--dtype", "bf16", "--head-dim", "64", "--arch", "sm_90a",
        "--segments", "--boolean", "--bias", "16", "--bias-layout", "common", "--all",
    )  # fmt: skip
    assert code == 0
    problem = Problem(
        "forward", "bf16", 64, 64, "sm_90a",
        {"segments": True, "boolean": True, "bias": AskedBias("16", "common")},
    )  # fmt: skip
    verdicts = {spec.name: refused for spec, refused in select.explain(problem)}
    assert {name.split("_")[-1] for name in verdicts} == {"sm80", "sm90"}
    text = " ".join(out.split())
    for name, refused in verdicts.items():
        assert f"{name} " in text
        for reason in refused:
            assert reason.split()[0] in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "--dtype", "bf16", "--arch", "sm_80"], "--dtype and --head-dim, --all"),
        (["kernels"], "pass --arch sm_90a, or set JAX_MEMEFF_ARCHS"),
        (["kernels", "--arch", "hopper"], "expected the name of a GPU architecture"),
        (["info", "--arch", "sm_1"], "expected the name of a GPU architecture"),
        (["info", "--arch", "sm_090"], "expected the name of a GPU architecture"),
        (["info", "--arch", "sm_80a"], "expected the name of a GPU architecture"),
        (["info", "--arch", "sm_90f"], "expected the name of a GPU architecture"),
        (["doctor", "--arch", "sm_90a"], "unrecognized arguments: --arch"),
        (["explain", "--dtype", "int8", "--head-dim", "64"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_build_of_an_unsupported_problem(capsys):
    assert cli.main(["build", "--head-dim", "70000", "--dtype", "f16", "--arch", "sm_80"]) == 1
    assert "the largest with a kernel is 65536" in capsys.readouterr().err


def test_build_for_an_architecture_without_the_dtype_writes_nothing(capsys, tmp_path):
    path = tmp_path / "kernels.zip"
    chosen = ["--head-dim", "64", "--dtype", "bf16", "--arch", "sm_75"]
    assert cli.main(["build", *chosen, "--output", str(path)]) == 1
    assert "sm_75 multiplies f16, not bf16" in capsys.readouterr().err
    assert not path.exists()


def test_compile_errors_exit_with_1(capsys, monkeypatch):
    def compile_many(jobs, on_done):
        raise CompileError("error: cuda.core was not found", {}, "install it")

    monkeypatch.setattr(cli, "compile_many", compile_many)
    code = cli.main(["build", "--dtype", "f16", "--head-dim", "32", "--arch", "sm_80"])
    assert code == 1
    assert "cuda.core was not found" in capsys.readouterr().err
