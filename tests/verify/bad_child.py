"""A child of ``verify`` with kernels that are wrong: ``python bad_child.py MODE WHERE PIPE LOG``.

WHERE is the architecture of an emulated GPU, or "gpu" for the real one. MODE is what the kernels
of cases whose head dim is 64 do:

- "nothing" is wrong with them
- "large": nothing, too, but every case counts as too large for the oracle, and is timed
- "wrong": they compute nothing
- "blocks": they never end, or after 20 seconds on a real GPU
- "crashes": their process crashes
- "stops": their process is stopped, its heartbeat too
- "aborts": it aborts when their program is compiled
- "broken": they crash, and the next child cannot launch a trivial kernel.
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

from jax_memeff._command.cases import case
from jax_memeff._command.verify import child
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import parallel

BAD_DIM = 64
CRASH = "signal(SIGSEGV, SIG_DFL); raise(SIGSEGV);"
BODIES = {
    "wrong": "",
    "blocks": "for (;;) pause();",
    "crashes": CRASH,
    "stops": "raise(SIGSTOP);",
    "broken": CRASH,
}

# Hazard: a kernel that never ends may hang the GPU, so all launches together end by themselves, 20
# seconds after the first CTA of the first one began.
SPIN = """
__device__ unsigned long long spin_end;
__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ void spin() {
  atomicCAS(&spin_end, 0ull, nanoseconds() + 20000000000ull);
  while (nanoseconds() < *(volatile unsigned long long*)&spin_end) __nanosleep(1000);
}
"""
GPU_BODIES = {"wrong": "", "blocks": "spin();"}


def emulated_image(spec, mode):
    from emulator import build

    source = "#include <csignal>\n#include <unistd.h>\n#include <memeff/arch/thread.cuh>\n"
    for entry in spec.entry_points:
        source += f'extern "C" void {entry.name}();\n'
        source += f"EMULATOR_KERNEL({entry.name})\nvoid {entry.name}() {{ {BODIES[mode]} }}\n"
    return os.fsencode(build.kernel_library("bad", source))


def gpu_source(spec, mode):
    kernels = [
        f'extern "C" __global__ void {entry.name}() {{ {GPU_BODIES[mode]} }}\n'
        for entry in spec.entry_points
    ]
    return SPIN + "".join(kernels)


def replace_kernels(mode, where):
    right = compiler.compile

    def compile(spec, arch):
        if spec.padded_head_dim != BAD_DIM:
            return right(spec, arch)
        if where == "gpu":
            names = [entry.name for entry in spec.entry_points]
            return compiler.compile_source(gpu_source(spec, mode), arch, names)
        return dataclasses.replace(right(spec, arch), image=emulated_image(spec, mode))

    compiler.compile = compile


def replace_programs():
    from jax_memeff._command.verify import checks

    right = checks.lowered

    class Aborting:
        def compile(self, *_):
            os.kill(os.getpid(), signal.SIGABRT)

    def lowered(own):
        return right(own) | ({"kernels": Aborting()} if own.H == BAD_DIM else {})

    checks.lowered = lowered


def break_gpu(log):
    if '"ended"' not in (log.read_text() if log.exists() else ""):
        return

    def fail(device):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    child._launch_trivial = fail


def main():
    mode, where, *arguments = sys.argv[1:]
    if where != "gpu":  # before JAX is imported
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        sys.path.insert(0, str(Path(__file__).parents[1]))
        import emulator

        emulator.install()
        emulator.configure(where)
        parallel.compile_many = lambda jobs: None
    if mode == "large":
        case.MOST_SCORES = 0
    if mode in BODIES:
        replace_kernels(mode, where)
    if mode == "aborts":
        replace_programs()
    if mode == "broken":
        break_gpu(Path(arguments[1]))
    child.main(arguments, "cuda" if where == "gpu" else "cpu")
    os._exit(0)


if __name__ == "__main__":
    main()
