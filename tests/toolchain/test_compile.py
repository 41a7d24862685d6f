"""Source → fatbin by the real compiler, which needs no GPU, and the cache of its results."""

import dataclasses
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import found_parts
import pytest

from jax_memeff.codegen import select
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import headers, nvrtc, parallel, parts, program_cache
from jax_memeff.errors import CompileError

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

FATBIN_MAGIC = (0xBA55ED50).to_bytes(4, "little")
# Without an include it compiles in milliseconds.
TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= 2.f; }'
CUTE = """
#include <cute/tensor_impl.hpp>
extern "C" __global__ void __launch_bounds__(128) reverse(float* x) {
  __shared__ float staged[128];
  auto tensor = cute::make_tensor(cute::make_gmem_ptr(x), cute::Layout<cute::Int<128>>{});
  staged[threadIdx.x] = tensor(threadIdx.x);
  __syncthreads();
  tensor(threadIdx.x) = staged[127 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory):
    """A cache that the tests of this module share, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared_cache(module_cache, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(module_cache))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(directory))
    return directory


def forget_memory():
    program_cache.current().memory.clear()


def forward(**changes):
    return select.select(Problem("forward", "bf16", 32, 32, "sm_80", changes))


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("direction", "arch"), [("forward", "sm_80"), ("backward", "sm_90a")])
def test_attention_kernel_compiles_once(shared_cache, direction, arch):
    spec = select.select(Problem(direction, "bf16", 32, 32, arch, {"mask": "causal"}))
    compiled = compiler.compile(spec, arch)
    assert not compiled.cached
    assert compiled.image.startswith(FATBIN_MAGIC) and len(compiled.image) < 200_000
    assert compiled.names == tuple(entry.name for entry in spec.entry_points)
    assert tuple(resource.name for resource in compiled.resources) == compiled.names
    assert all(0 < resource.registers <= 255 for resource in compiled.resources)
    assert compiled.warnings == ()

    forget_memory()
    again = compiler.compile(spec, arch)
    assert again.cached and again.seconds < 0.5
    assert again == dataclasses.replace(compiled, cached=True, seconds=again.seconds)
    assert compiler.lookup(spec, arch) is not None
    assert compiler.lookup(spec, "sm_90") is None


def test_ptx_is_for_any_later_device(cache):
    code, _ = nvrtc.compile(TINY, "compute_80", "tiny")
    assert b".target sm_80" in code and b".entry tiny" in code
    assert code.endswith(b"\0")
    compiled = compiler.compile_source(TINY, "compute_80", ["tiny"])
    assert compiled.image == nvrtc.fatbin(code, "compute_80", "tiny")
    assert compiled.image.startswith(FATBIN_MAGIC)
    assert [resource.name for resource in compiled.resources] == ["tiny"]
    assert compiler.lookup_source(TINY, "compute_80", ["tiny"]) is not None
    assert compiler.lookup_source(TINY, "sm_80", ["tiny"]) is None
    assert compiler.compile_source(TINY, "sm_80", ["tiny"]).image != compiled.image


def test_cute_kernel_and_its_resources(shared_cache):
    compiled = compiler.compile_source(CUTE, "sm_90a", ["reverse"])
    (resource,) = compiled.resources
    assert (resource.spill_store, resource.spill_load, resource.shared_bytes) == (0, 0, 512)
    # The symbols of the libraries' constants are compressed away.
    assert len(compiled.image) < 50_000


def test_threads_of_a_fresh_process_compile_at_once(cache):
    """Hazard: the first compilation imports cuda.core, and several threads may lower programs."""
    program = f"""
from concurrent.futures import ThreadPoolExecutor
from jax_memeff.codegen.toolchain import compile as compiler

def work(i):
    source = {TINY!r}.replace("2.f", f"{{i}}.f")
    return compiler.compile_source(source, "sm_80", ["tiny"]).cached

with ThreadPoolExecutor(8) as pool:
    assert not any(pool.map(work, range(8)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_fork_compiles_although_another_thread_was_importing(cache):
    """Hazard: the child of a fork has no other threads, so a lock that one held is never
    released.
    """
    program = f"""
import os, sys
from jax_memeff.codegen.toolchain import compile as compiler, parts

compiler.compile_source({TINY!r}, "sm_80", ["tiny"])
parts._importing.acquire()
child = os.fork()
if child == 0:
    again = compiler.compile_source({TINY.replace("2.f", "3.f")!r}, "sm_80", ["tiny"])
    os._exit(42 if again.image else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 42


@pytest.mark.quick
def test_damaged_entry_is_compiled_again(cache):
    good = compiler.compile_source(TINY, "sm_80", ["tiny"])
    (entry,) = [file for file in cache.rglob("*") if file.is_file()]
    entry.write_bytes(entry.read_bytes()[:-100])
    forget_memory()
    again = compiler.compile_source(TINY, "sm_80", ["tiny"])
    assert not again.cached
    assert again.image == good.image
    forget_memory()
    assert compiler.compile_source(TINY, "sm_80", ["tiny"]).cached


def test_unusable_directory_keeps_kernels_in_memory(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("not a directory")
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(file / "cache"))
    assert not compiler.compile_source(TINY, "sm_80", ["tiny"]).cached
    assert compiler.compile_source(TINY, "sm_80", ["tiny"]).cached


def test_directory_that_vanishes_costs_only_time(cache):
    compiler.compile_source(TINY, "sm_80", ["tiny"])
    shutil.rmtree(cache)
    forget_memory()
    assert not compiler.compile_source(TINY, "sm_80", ["tiny"]).cached
    assert compiler.compile_source(TINY, "sm_80", ["tiny"]).cached


def test_key_depends_on_what_headers_say_not_on_where_they_are(cache, tmp_path, monkeypatch):
    def is_cached():
        return compiler.lookup_source(TINY, "sm_80", ["tiny"]) is not None

    moved = tuple(tmp_path / str(index) for index in range(2))
    for old, new in zip(headers.own_include_dirs(), moved, strict=True):
        shutil.copytree(old, new, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    compiler.compile_source(TINY, "sm_80", ["tiny"])
    monkeypatch.setattr(headers, "own_include_dirs", lambda: moved)
    assert is_cached()
    params = moved[1] / "memeff" / "params.h"
    text = params.read_text()
    params.write_text(text + "// a change\n")
    assert not is_cached()
    params.write_text(text)
    assert is_cached()
    monkeypatch.setattr(headers, "versions", lambda: {"cutlass": "4.2.1"})
    assert not is_cached()


def test_a_header_is_read_again_after_a_change_that_keeps_its_length_and_time(
    tmp_path, monkeypatch
):
    header = tmp_path / "memeff.cuh"
    monkeypatch.setattr(headers, "own_include_dirs", lambda: (tmp_path,))
    monkeypatch.setattr(headers, "_TICK", 0)
    header.write_text("one")
    digest, before = headers.own_digest(), header.stat()
    time.sleep(0.05)  # several ticks
    header.write_text("two")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert headers.own_digest() != digest


@pytest.mark.parametrize("age", [0, 10 * 10**9])
def test_headers_are_read_again_if_the_clock_could_have_missed_a_change(tmp_path, monkeypatch, age):
    header = tmp_path / "memeff.cuh"
    header.write_text("one")
    same = headers._File((header.name,), inode=1, size=3, changed=time.time_ns() - age)
    monkeypatch.setattr(headers, "own_include_dirs", lambda: (tmp_path,))
    monkeypatch.setattr(headers, "_files", lambda directory, above: [same])
    digest = headers.own_digest()
    header.write_text("two")
    assert (headers.own_digest() == digest) == bool(age)


@pytest.mark.quick
def test_compile_error_shows_the_first_error_and_the_versions(cache):
    with pytest.raises(CompileError) as raised:
        compiler.compile_source(TINY.replace("2.f", "two"), "sm_80", ["tiny"])
    message = str(raised.value)
    assert message.startswith("a kernel did not compile: tiny(1): error: ")
    assert '"two" is undefined' in raised.value.log
    assert "\0" not in raised.value.log
    assert list(raised.value.versions) == ["driver", "NVRTC", "CUDA headers", "CCCL", "CUTLASS"]
    assert "CUTLASS: 4." in message and "report it" in message


def test_a_worker_whose_parent_was_killed_ends_quietly():
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "jax_memeff.codegen.toolchain.parallel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as worker:
        assert worker.stdin and worker.stdout and worker.stderr
        worker.stdout.close()
        worker.stdin.write(pickle.dumps((TINY, "sm_80", ("tiny",))))
        worker.stdin.close()
        assert worker.stderr.read() == b""
        assert worker.wait() == 1


def test_unknown_architecture_says_so(cache):
    with pytest.raises(CompileError, match="does not know the architecture"):
        compiler.compile_source(TINY, "sm_70", ["tiny"])


def test_known_breakage_of_cccl_is_named(cache, monkeypatch):
    parts = {"cutlass": "4.2.0", "cudart": "13.5", "cccl": "3.3.0"}
    monkeypatch.setattr(headers, "versions", lambda: parts)
    with pytest.raises(CompileError, match=r"pip install 'nvidia-cuda-cccl<13\.2'"):
        compiler.compile_source(TINY.replace("2.f", "two"), "sm_80", ["tiny"])


@pytest.fixture
def nothing_found(monkeypatch):
    """Hides all wheels and toolkits."""
    from cuda import pathfinder

    def not_found(name):
        raise pathfinder.DynamicLibNotFoundError(f"lib{name}.so is nowhere")

    found_parts.forget()
    monkeypatch.setattr(parts, "_in_wheels", lambda part: None)
    monkeypatch.setattr(pathfinder, "locate_nvidia_header_directory", lambda part: None)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    monkeypatch.setenv("CUDA_PATH", "/opt/some_cuda")
    yield
    found_parts.forget()


def test_missing_headers_name_the_command_and_the_places(cache, nothing_found, monkeypatch):
    with pytest.raises(CompileError) as raised:
        compiler.compile_source(TINY, "sm_80", ["tiny"])
    message = str(raised.value)
    assert "CUTLASS, CUDA headers, CCCL not found" in message
    assert "searched CUDA_PATH: /opt/some_cuda" in message
    assert all(entry in message for entry in sys.path if os.path.isdir(entry))
    assert "nvidia-cutlass, nvidia-cuda-runtime, nvidia-cuda-cccl" in message
    assert '[nvrtc]". Or name an archive' in message
    assert nvrtc.versions()["CUTLASS"] == nvrtc.versions()["NVRTC"] == "not found"


def test_missing_nvrtc_names_the_command(cache, nothing_found):
    with pytest.raises(CompileError, match=r"NVRTC not found: libnvrtc\.so is nowhere") as raised:
        nvrtc.compile(TINY, "sm_80", "tiny")
    assert '[nvrtc]"' in str(raised.value)


def test_a_library_that_does_not_load_names_the_command(nothing_found, monkeypatch, tmp_path):
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_text("not a library")
    wheel = parts.Found(parts.NVRTC, broken, parts.WHEEL, "13.0.0")
    monkeypatch.setattr(parts, "_in_wheels", lambda part: wheel)
    monkeypatch.setattr(parts, "_is_loaded", lambda soname: False)
    with pytest.raises(CompileError, match=r"NVRTC not found: .*libnvrtc\.so\.13") as raised:
        nvrtc.compile(TINY, "sm_80", "tiny")
    assert '[nvrtc]"' in str(raised.value)


@pytest.mark.parametrize("module", ["cuda.bindings.nvfatbin"])
def test_missing_packages_name_the_command(cache, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CompileError, match=f"{module} was not found") as raised:
        compiler.compile_source(TINY, "sm_80", ["tiny"])
    assert '[nvrtc]"' in str(raised.value)


def test_wrong_numbers_in_python_do_not_compile(shared_cache):
    """The assertions in the source keep spec.py and the device code consistent."""
    spec = forward()

    class Wrong(type(spec)):
        @property
        def shared_bytes(self):
            return 1024

    wrong = Wrong(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
    with pytest.raises(CompileError, match="static assertion failed"):
        compiler.compile(wrong, "sm_80")


@pytest.mark.rotating(3)
def test_many_in_processes(shared_cache):
    good = forward(mask="window")
    broken = dataclasses.replace(good, tile=dataclasses.replace(good.tile, warps=3))
    seen = {}

    def on_done(spec, arch, result):
        seen[spec, arch] = result

    jobs = [(broken, "sm_80"), (good, "sm_80"), (good, "sm_80")]
    with pytest.raises(CompileError, match="static assertion failed") as raised:
        parallel.compile_many(jobs, on_done, processes=2)
    assert "report it" in str(raised.value) and raised.value.log
    assert set(seen) == set(jobs)
    assert not seen[good, "sm_80"].cached

    first, second = parallel.compile_many(jobs[1:], processes=2)
    assert first.cached and first is second
    assert first.image == seen[good, "sm_80"].image


def test_killed_process_is_an_error_and_not_a_hang(cache):
    worker = parallel._Worker()
    try:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        result = worker.run((forward(), "sm_80"))
    finally:
        worker.close()
    assert isinstance(result, CompileError)
    assert "ended with exit code -9" in str(result)


def test_a_process_that_ends_within_a_result_is_an_error(cache, monkeypatch, tmp_path):
    program = tmp_path / "killed"
    program.write_text("#!/bin/sh\nprintf '\\200\\005\\225\\377\\0\\0\\0\\0\\0\\0\\0abc'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = parallel._Worker()
    result = worker.run((forward(), "sm_80"))
    worker.close()
    assert isinstance(result, CompileError)
    assert "ended with exit code 9" in str(result)


def test_a_path_object_in_the_path_of_modules(cache, monkeypatch, tmp_path, nothing_found):
    """Python's import ignores it; so must the search for the toolchain, and the processes."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    worker = parallel._Worker()
    worker.close()
    assert worker.process.returncode == 0
    with pytest.raises(CompileError, match="CUTLASS, CUDA headers, CCCL not found"):
        compiler.compile_source(TINY, "sm_80", ["tiny"])


def test_processes_do_not_run_the_main_script_again(cache, tmp_path):
    """Training scripts often have no __main__ guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('started')\n"
        "from jax_memeff.codegen.toolchain import parallel\n"
        "worker = parallel._Worker()\n"
        "worker.close()\n"
        "print('worker ended with', worker.process.returncode)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "started\nworker ended with 0\n", done.stderr
