"""The child of ``verify`` on the emulator: ``python emulated_child.py MODE ARCH PIPE LOG``.

MODE is what goes wrong with the kernels of cases whose head dim is 64: "nothing", "wrong" (they
compute nothing), "blocks" (they never end) or "crashes". With "broken", a child that comes after
one whose case failed cannot launch a trivial kernel.
"""

import dataclasses
import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import emulator
from emulator import build

from jax_memeff._command.verify import child
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import parallel

BODIES = {
    "wrong": "",
    "blocks": "for (;;) pause();",
    "crashes": "signal(SIGSEGV, SIG_DFL); raise(SIGSEGV);",
}
BODIES["broken"] = BODIES["crashes"]
BAD_DIM = 64


def bad(spec, body):
    source = "#include <csignal>\n#include <unistd.h>\n#include <memeff/arch/thread.cuh>\n"
    for entry in spec.entry_points:
        source += f'extern "C" void {entry.name}();\n'
        source += f"EMULATOR_KERNEL({entry.name})\nvoid {entry.name}() {{ {body} }}\n"
    return build.kernel_library("bad", source)


def main():
    mode, arch, *arguments = sys.argv[1:]
    emulator.install()
    emulator.configure(arch)
    right = compiler.compile

    def compile(spec, arch):
        if mode == "nothing" or spec.padded_head_dim != BAD_DIM:
            return right(spec, arch)
        image = os.fsencode(bad(spec, BODIES[mode]))
        return dataclasses.replace(right(spec, arch), image=image)

    compiler.compile = compile
    parallel.compile_many = lambda jobs: None
    log = Path(arguments[1])
    if mode == "broken" and '"ended"' in (log.read_text() if log.exists() else ""):

        def fail(device):
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

        child._launch_trivial = fail
    child.main(arguments, "cpu")
    os._exit(0)


if __name__ == "__main__":
    main()
