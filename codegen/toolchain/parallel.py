"""Many kernels at once, in processes: NVRTC holds a lock, so threads would compile one by one.

The processes are started as ``python -m jax_memeff.codegen.toolchain.parallel`` (:func:`main`). The
spawn method of ``multiprocessing`` would import the user's main script again: a training script
without a ``__main__`` guard would run twice. They read pickled sources and write pickled results,
and do not open the cache: the parent process stores the results, and warns once if it cannot.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import descriptors, nvrtc, parts
from jax_memeff.codegen.toolchain.compile import Compiled, compile_uncached
from jax_memeff.errors import CompileError

Job = tuple[KernelSpec, str]
OnDone = Callable[[KernelSpec, str, Compiled | CompileError], object]


@descriptors.explained()
def compile_many(
    jobs: Iterable[Job], on_done: OnDone | None = None, processes: int | None = None
) -> list[Compiled]:
    """Compile every (spec, arch) of ``jobs``, and return the results in the same order.

    Kernels in the cache come first; then at most ``processes`` (by default one per available core)
    compile the others. ``on_done(spec, arch, result)`` is called in this thread as each distinct
    job ends. The first ``CompileError`` is raised once all jobs have ended.
    """
    jobs = list(jobs)
    results: dict[Job, Compiled | CompileError] = {}

    def finish(job: Job, result: Compiled | CompileError) -> None:
        results[job] = result
        if on_done is not None:
            on_done(*job, result)

    missing = []
    for job in dict.fromkeys(jobs):
        if (compiled := compiler.lookup(*job)) is not None:
            finish(job, compiled)
        else:
            missing.append(job)
    count = min(len(missing), processes or _available_cores())
    if count <= 1 or not sys.executable:  # an embedded interpreter has no executable to start
        for job in missing:
            finish(job, _compile_here(job))
    else:
        _compile_in_processes(missing, count, finish)
    for job in jobs:
        if isinstance(result := results[job], CompileError):
            raise result
    return [result for job in jobs if isinstance(result := results[job], Compiled)]


def _compile_here(job: Job) -> Compiled | CompileError:
    try:
        return compiler.compile_source(*compiler.source(*job))
    except CompileError as error:
        return error


def _compile_in_processes(jobs: list[Job], count: int, finish) -> None:
    local = threading.local()
    workers: list[_Worker] = []

    def run(job: Job) -> Compiled | CompileError:
        if not hasattr(local, "worker") or local.worker.process.poll() is not None:
            local.worker = _Worker()
            workers.append(local.worker)
        return local.worker.run(job)

    try:
        with ThreadPoolExecutor(count) as threads:
            futures = {threads.submit(run, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    result = future.result()
                    if isinstance(result, Compiled):
                        compiler.store(*compiler.source(*futures[future]), result)
                    finish(futures[future], result)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in list(workers):
                    worker.process.kill()
                raise
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """One process that compiles the sources written to its standard input, one at a time."""

    def __init__(self):
        # -P keeps modules of the working directory from shadowing installed ones.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jax_memeff.codegen.toolchain.parallel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts.python_path()))},
        )

    def run(self, job: Job) -> Compiled | CompileError:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            pickle.dump(compiler.source(*job), stdin)
            stdin.flush()
            ok, result = pickle.load(stdout)
        # UnpicklingError: the process ended while it sent a result.
        except (EOFError, OSError, pickle.UnpicklingError):
            return CompileError(
                f"error: the compiler process ended with exit code {self.process.wait()}",
                nvrtc.versions(),
                "Its own message is on the standard error stream. A negative code is a signal; "
                "-9 usually means that memory ran out: compile with fewer processes",
            )
        if ok:
            return result
        message, log, versions = result
        error = CompileError(log, versions)
        error.args = (message,)  # with the advice that the process gave
        return error

    def close(self) -> None:
        # This closes both pipes; the process exits at the end of its input.
        self.process.communicate()


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main() -> None:
    """A process of :func:`compile_many`: compiles sources until its standard input ends."""
    # Only results may reach the pipe: output of libraries goes to standard error.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, compile_uncached(*job))
        except CompileError as error:
            answer = (False, (str(error), error.log, error.versions))
        try:
            pickle.dump(answer, results)
            results.flush()
        except BrokenPipeError:  # the parent was killed
            os._exit(1)


if __name__ == "__main__":
    main()
