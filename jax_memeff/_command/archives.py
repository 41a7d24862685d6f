"""``build --output``: an archive of the kernels that were compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jax_memeff._command.output import OutputError
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import prebuilt
from jax_memeff.codegen.toolchain.compile import Compiled


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
