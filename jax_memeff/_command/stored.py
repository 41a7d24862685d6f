"""``build`` without ``--output``: a kernel that no later process finds is an error."""

from __future__ import annotations

from jax_memeff import config
from jax_memeff._command.output import OutputError
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain.compile import Compiled
from jax_memeff.codegen.toolchain.parallel import Job
from jax_memeff.errors import CompileError


def require(job: Job, result: Compiled | CompileError) -> None:
    """Raise if a kernel was compiled and is not in the cache, for example on a full disk.

    Raises:
        OutputError: the message says why, and what to do.
    """
    if isinstance(result, CompileError) or result.cached:
        return
    if reason := compiler.loss(*job):
        raise OutputError(
            f"the kernels would be lost, because the cache does not take them: {reason}; --output "
            "writes an archive instead"
        )


def elsewhere() -> str | None:
    """A note for a user who expects all kernels in the cache; None if they are there."""
    if config.kernel_archive() is None:
        return None
    return (
        "Kernels of the archive that JAX_MEMEFF_KERNELS names were not put into the cache: unset "
        "it to do that."
    )
