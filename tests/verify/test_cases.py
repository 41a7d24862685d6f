"""The cases of ``verify`` launch every kernel that a GPU has."""

import contextlib

import pytest

from jax_memeff._command import models
from jax_memeff._command.cases import programs
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.verify import chosen
from jax_memeff.codegen import select
from jax_memeff.errors import UnsupportedError


def launched(cases, arch):
    found = set()
    for case in cases:
        with contextlib.suppress(UnsupportedError):  # latent attention, except on Hopper
            program = programs.complete(case, "cuda")
            jobs = models.of_program(program, [Arrays.draw(case).given()], [arch])
            found |= {type(spec.kernel).__name__ for spec, _ in jobs}
    return found


@pytest.mark.rotating(2)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a"])
def test_each_kernel_of_an_architecture_is_launched_by_default(arch):
    """Add a case for a new kernel, if this fails."""
    cases = chosen.on_gpu(chosen.chosen(every=False), arch)
    kernels = {type(spec.kernel).__name__ for spec in select.closure(arch)}
    assert launched(cases, arch) == kernels
