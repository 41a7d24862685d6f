"""``python -m jax_memeff build``: where the kernels go that were compiled.

With ``--output`` it is an archive. Without, it is the cache, and a kernel that no later process
finds there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jax_memeff import config
from jax_memeff._command.command_line import OutputError
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import prebuilt
from jax_memeff.codegen.toolchain.compile import Compiled
from jax_memeff.codegen.toolchain.parallel import Job
from jax_memeff.errors import CompileError


def require_writable(path: Path) -> None:
    """Raise for a path that cannot become a file; kernels take minutes to compile.

    Raises:
        ValueError: it is a directory, a device or the like, or a file cannot be created beside it.
    """
    reason = None
    try:
        if path.is_dir():
            reason = "it is a directory"
        elif path.exists() and not path.is_file():  # the archive would replace a device
            reason = "it is no regular file"
        elif not path.parent.is_dir():
            reason = f"{path.parent} is not a directory"
        else:
            temporary = prebuilt.temporary_beside(prebuilt.target_of(path))
            temporary.touch(exist_ok=False)
            temporary.unlink()
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ValueError(f"--output {path} cannot be written: {reason}")


def write(path: Path, kernels: Mapping[tuple[KernelSpec, str], Compiled]) -> str:
    """Write the archive, and return a line about it.

    Raises:
        OutputError: it cannot be written, although it could when the command began.
    """
    try:
        compiler.write_archive(path, kernels)
    except OSError as error:
        raise OutputError(f"--output {path} cannot be written: {error.strerror}") from error
    size = path.stat().st_size / 2**20
    return f"{len(kernels)} kernels, {size:.1f} MB: JAX_MEMEFF_KERNELS={path.absolute()}"


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
