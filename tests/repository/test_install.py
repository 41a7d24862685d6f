"""The error for importing a source tree, or an incomplete installation."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import jax_memeff

ROOT = Path(str(jax_memeff.__file__)).parent
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"


def tree(directory, *, clone, parts):
    """jax_memeff as in a clone or in site-packages, with some of the files that pip adds."""
    package = directory / "jax_memeff"
    package.mkdir()
    for source in ROOT.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    for part in parts:
        (package / part).mkdir()
        (package / part / "__init__.py").write_text("")
    if clone:
        (directory / "pyproject.toml").write_text("")


@pytest.mark.parametrize("command", [("-c", "import jax_memeff"), ("-m", "jax_memeff", "info")])
@pytest.mark.parametrize(
    ("clone", "parts", "lacks"),
    [
        (True, (), "_ffi and codegen"),
        (True, ("codegen",), "_ffi"),
        (True, ("_ffi",), "codegen"),
        (False, ("codegen",), "_ffi"),
    ],
)
def test_a_tree_that_is_not_installed_says_what_to_type(tmp_path, command, clone, parts, lacks):
    if not PYTHON.exists():
        pytest.skip(f"needs an interpreter without packages, and there is no {PYTHON}")
    tree(tmp_path, clone=clone, parts=parts)
    done = subprocess.run(
        [PYTHON, "-S", *command], capture_output=True, text=True, cwd=tmp_path, env={}
    )
    assert done.returncode == 1 and done.stdout == ""
    what = f"-e '{tmp_path}'" if clone else "--force-reinstall WHEEL_OR_CLONE"
    said = rf"ImportError: jax_memeff in {tmp_path} is not completely installed for this Python "
    said += rf"\(it lacks {lacks}\): run \S+ -m pip install {re.escape(what)}"
    assert re.search(said, done.stderr.splitlines()[-1]), done.stderr
    assert "No module named" not in done.stderr
