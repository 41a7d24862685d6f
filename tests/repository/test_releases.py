"""The parts of a release agree: workflows, wheels, notes and versions."""

import importlib.util
import itertools
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="flax brings PyYAML")

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = pytest.mark.quick


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_wheel, release_notes, todays_files = map(
    script, ("check_wheel", "release_notes", "todays_files")
)


def steps(workflow):
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", ())]


def test_the_check_of_a_change_is_the_script():
    assert [step["run"] for step in steps("ci") if "run" in step] == [".ci/run"]


def test_a_week_under_the_newest_jax_runs_every_file_on_two_days_in_a_row():
    files = todays_files.files()
    days = [{x for x in files if todays_files.is_due(x, day)} for day in range(739_000, 739_008)]
    week = days[:7]
    for file in files:
        assert sum(file in day for day in week) == 2
        assert any(file in day and file in after for day, after in itertools.pairwise(days))
    assert {"tests/repository/test_releases.py", "jax_memeff/_compat.py"} <= set(files)
    assert all(0.2 < len(day) / len(files) < 0.4 for day in week)
    assert all(todays_files.is_due(file, None) for file in files)


@pytest.mark.parametrize("parts", range(2, 6))
def test_every_part_of_rotating_cases_runs_under_the_newest_jax(parts):
    for file in todays_files.files():
        due = (day for day in range(7 * parts) if todays_files.is_due(file, day))
        assert {day % parts for day in due} == set(range(parts))


def test_every_night_all_tests_run_under_the_oldest_and_the_newest_jax():
    """The last JAX for the oldest Python is older than that of the others."""
    job = WORKFLOWS["nightly"]["jobs"]["samples"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert [oldest, "3.13"] == job["strategy"]["matrix"]["python"]


def test_every_python_of_the_wheels_is_stated_and_tried():
    built = [f"{name[2]}.{name[3:-2]}" for name in PROJECT["tool"]["cibuildwheel"]["build"]]
    (setup,) = [step for step in steps("ci") if "setup-python" in step.get("uses", "")]
    assert sorted(setup["with"]["python-version"].split()) == sorted(built)
    prefix = "Programming Language :: Python :: "
    stated = [line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"]]
    assert {version.removesuffix("t") for version in built} == {
        version for version in stated if re.fullmatch(r"3\.\d+", version)
    }


def test_the_gpu_workflow_runs_the_commands_of_contributing():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## On a GPU\n")[1]
    block = section.split("```\n")[1]
    documented = [re.split(r"\s+# ", line)[0].strip() for line in block.splitlines()]
    run = [step["run"].replace('"$PROCESSES"', "16") for step in steps("gpu") if "run" in step]
    # The first command includes the races; a person commits the report.
    left_to_people = {
        "pytest -m gpu tests/kernels/test_races.py tests/functions/kernels/test_function_races.py "
        "tests/serving/kernels/test_latent_races.py",
        "python benchmarks/report.py",
    }
    apart = {"pytest -m gpu": "pytest -m gpu --deselect tests/kernels/test_kernels.py"}
    expected = {
        apart.get(command, command) for command in documented if command not in left_to_people
    }
    assert left_to_people <= set(documented)
    assert expected <= set(run)
    assert {command for command in run if "pytest" in command} <= expected


def test_nightly_compiles_every_architecture_of_the_sample():
    text = (ROOT / "tests/toolchain/test_closure.py").read_text()
    (archs,) = re.findall(r"^ARCHS = \((.*)\)$", text, re.MULTILINE)
    matrix = WORKFLOWS["nightly"]["jobs"]["closure"]["strategy"]["matrix"]
    assert matrix["arch"] == re.findall(r'"(\w+)"', archs)
    assert set(matrix["cuda"]) <= set(PROJECT["project"]["optional-dependencies"])


def test_notes_of_a_release(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## [Unreleased]\n\n- later\n\n"
        "## [1.2.0] - 2026-11-23\n\n### Added\n\n- now\n\n## [1.1.0] - 2026-01-01\n\n- before\n"
    )
    assert release_notes.notes(tmp_path, "v1.2.0") == "### Added\n\n- now"
    with pytest.raises(SystemExit, match=r"expected the tag v1\.2\.0.* got v1\.1\.0"):
        release_notes.notes(tmp_path, "v1.1.0")
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n- now\n")
    with pytest.raises(SystemExit, match=r"a section '## \[1\.2\.0\] - YEAR-MONTH-DAY'"):
        release_notes.notes(tmp_path, "v1.2.0")


def test_a_wheel_that_is_large_incomplete_or_linked_is_refused(tmp_path, monkeypatch):
    compile = ["gcc", "-x", "c", "/dev/null", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-o"]
    cudart, library = tmp_path / "libcudart.so", tmp_path / "_ffi.cpython.so"
    try:
        subprocess.run([*compile, cudart, "-Wl,-soname,libcudart.so.13"], check=True)
    except FileNotFoundError:
        pytest.skip("needs gcc")
    subprocess.run([*compile, library, "-x", "none", cudart, "-lc"], check=True)
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "jax_memeff/_ffi.cpython.so")
        archive.writestr("jax_memeff/py.typed", "")
        for name in ("__init__.py", "kernels/sm90/forward.cuh", "memeff/arch/mma.cuh"):
            archive.writestr(f"jax_memeff/codegen/{name}", "")
    monkeypatch.setattr(check_wheel, "LARGEST_BYTES", 100)
    large, incomplete, linked = check_wheel.faults(wheel)
    assert large.startswith("expected at most 100 bytes, got ")
    assert "params" in incomplete
    assert linked == "jax_memeff/_ffi.cpython.so is linked to libcudart.so.13"
    assert check_wheel.main([str(wheel)]) == 1
