"""A process that may open no more files: the error names the limit and the remedy."""

import errno
import os
import subprocess
import sys

import pytest

from jax_memeff.codegen.toolchain import descriptors
from jax_memeff.codegen.toolchain.program_cache import ProgramCache

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

PROGRAM = """
import os
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.errors import CompileError

source = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= 2.f; }'
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
said = []
while True:
    try:
        compiler.compile_source(source, "sm_80", ["tiny"])
        break
    except CompileError as error:
        said.append(str(error))
    os.close(opened.pop())
print(len(said), len(opened))
print("\\n".join(said))
"""


def at_most(files, *command, hard=None, **environment):
    """Runs Python with a limit; the shell sets it, because a fork of JAX's process warns."""
    limit = f'ulimit -Sn {files}; ulimit -Hn {hard or files}; exec "$0" "$@"'
    return subprocess.run(
        ["bash", "-c", limit, sys.executable, *command],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(
    ("files", "hard", "remedy"),
    [(8, 64, "in the shell that starts it: ulimit -n 1024"), (12, 12, "docker run --ulimit")],
)
def test_build_with_few_files(tmp_path, files, hard, remedy):
    """8 do not suffice to start the processes of the compiler, nor 12 for the headers."""
    done = at_most(
        files, "-m", "jax_memeff", "build", "--dtype", "f16", "--head-dim", "32", "--causal",
        "--arch", "sm_80", hard=hard, JAX_MEMEFF_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"This process may have {files} files open at once, and needs more: " in said
    assert remedy in said
    assert "Traceback" not in said and "report" not in said and "pip install" not in said


@pytest.mark.quick
def test_info_with_few_files(tmp_path):
    done = at_most(7, "-m", "jax_memeff", "info", "--timings", "--arch", "sm_80")
    assert done.returncode == 1
    assert "Too many open files" in done.stderr and "may have 7 files open" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_compiles_as_soon_as_it_may_open_files(tmp_path):
    """No search that ended for want of a descriptor is remembered as "not found"."""
    done = at_most(64, "-c", PROGRAM, JAX_MEMEFF_CACHE_DIR=str(tmp_path))
    assert done.stderr == ""
    numbers, *said = done.stdout.splitlines()
    failed, still_open = map(int, numbers.split())
    assert failed > 1 and still_open > 32
    assert sum("This process may have 64 files open at once" in line for line in said) == failed
    assert "pip install" not in done.stdout


def test_a_cache_for_which_no_file_can_be_opened(tmp_path, monkeypatch):
    def no_more(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    cache = ProgramCache(tmp_path)
    cache.put("0" * 64, b"payload")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_more)
        said = cache.loss("0" * 64)
    assert said is not None and "files open at once, and needs more: " in said


def test_other_errors_of_the_system_stay_what_they_are():
    with pytest.raises(FileNotFoundError), descriptors.explained():
        os.stat("/no/such/file")
