"""An archive of kernels that were compiled elsewhere, so that a machine needs no compiler.

``python -m jax_memeff build --output kernels.zip`` writes it, ``JAX_MEMEFF_KERNELS`` names it, and
it is searched before the cache. A kernel's key covers its source, its architecture and the headers
of this package, but not the compiler: an archive is also for machines with another compiler, or
with none.

Two hazards:

* Its kernels run with the user's rights. So the archive must be as trustworthy as files of the
  cache: no other user (root excepted) may own it or be able to write to it. Its digests detect
  damage. They are not a signature, because whoever writes an archive also writes its digests.
* It may come from somebody else, or be damaged. It is read in place and never unpacked, so names in
  it reach no file system; entries must be stored without compression and must not be larger than
  the archive; an entry is used only if its digest matches its key. Anything else that is wrong with
  an entry makes it a miss.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import secrets
import stat
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_memeff import config
from jax_memeff.codegen.toolchain import headers, program_cache

MAX_BYTES = 2**30
"""An archive of every kernel of an architecture takes 50 MB."""

Source = tuple[str, str, Sequence[str]]
"""A source, the architecture it is compiled for, and the names of its kernels."""

_MANIFEST = "manifest.json"
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,  # raised by zipfile for features that no archive of ours has
    OSError,  # a position before the start of the file
    RuntimeError,  # an encrypted entry
    ValueError,
    struct.error,
)


class Contents(NamedTuple):
    """An archive's description of itself; none of it is needed to use a kernel.

    ``version`` is that of the package that wrote it, ``fits`` whether its headers are this
    package's, ``kernels`` their number, ``archs`` their architectures, and ``compiler`` the
    versions of its parts.
    """

    version: str
    fits: bool
    kernels: int
    archs: tuple[str, ...]
    compiler: dict[str, str]


class UnusableArchiveError(Exception):
    """Why the archive is not used, and what to do."""


def key(source: str, arch: str, names: Sequence[str]) -> str:
    """A SHA-256, in hexadecimal, of all that a kernel depends on except for the compiler."""
    text = "\0".join((source, arch, *names))
    return hashlib.sha256(headers.own_digest() + text.encode()).hexdigest()


def get(source: str, arch: str, names: Sequence[str]) -> bytes | None:
    """The payload of a kernel, or None if no archive is named, or it does not have the kernel.

    Warns once if the archive that is named cannot be used, or was written for other headers.
    """
    path = config.kernel_archive()
    if path is None:
        return None
    try:
        with _opened(path) as archive:
            name = key(source, arch, names)
            payload = program_cache.verified(name, _stored(archive, f"{name}.kernel"))
            if payload is None and not (found := _contents(archive)).fits:
                _warn_once(
                    f"JAX_MEMEFF_KERNELS names {path}, whose kernels were compiled from the "
                    f"headers of jax_memeff {found.version}, and not of this installation: write "
                    "it again with python -m jax_memeff build --output"
                )
            return payload
    except UnusableArchiveError as error:
        _warn_once(str(error))
        return None


def contents() -> Contents | None:
    """The description in the named archive; None if no archive is named.

    Raises ``UnusableArchiveError`` if it cannot be used.
    """
    path = config.kernel_archive()
    if path is None:
        return None
    with _opened(path) as archive:
        return _contents(archive)


def write(path: Path, kernels: Mapping[Source, bytes], compiler: Mapping[str, str]) -> None:
    """Write an archive of payloads; the same kernels give the same bytes.

    The file is renamed into place. Raises ``OSError`` if it cannot be written.
    """
    entries = {f"{key(*source)}.kernel": (source, payload) for source, payload in kernels.items()}
    manifest = {
        "jax_memeff": importlib.metadata.version("jax-memeff"),
        "headers": headers.own_digest().hex(),
        "compiler": dict(compiler),
        "kernels": {
            name: [arch, *names] for name, ((_, arch, names), _) in sorted(entries.items())
        },
    }
    target = target_of(path)
    temporary = temporary_beside(target)
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED) as archive:
            _add(archive, _MANIFEST, json.dumps(manifest, indent=1).encode())
            for name, (_, payload) in sorted(entries.items()):
                _add(archive, name, program_cache.sealed(name.removesuffix(".kernel"), payload))
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def target_of(path: Path) -> Path:
    """The file that ``path`` leads to. Renaming to it keeps a symbolic link."""
    return Path(os.path.realpath(path))


def temporary_beside(target: Path) -> Path:
    """A new name beside a file; from there it is renamed into place."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    archive.writestr(entry, data)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, checked. Damage that is found while it is open is reported like other damage."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnusableArchiveError(
            f"JAX_MEMEFF_KERNELS names {path}, which cannot be read: {error.strerror}"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise UnusableArchiveError(
                f"JAX_MEMEFF_KERNELS names {path}, which is not a file of at most {MAX_BYTES} bytes"
            )
        if found := program_cache.distrust(status):
            raise UnusableArchiveError(
                "machine code that another user wrote would run with your rights: "
                f"JAX_MEMEFF_KERNELS names {path}, which {found}. Copy it, or change its owner or "
                "its mode (chmod go-w)"
            )
        try:
            stream = stack.enter_context(os.fdopen(file, "rb", closefd=False))
            yield stack.enter_context(zipfile.ZipFile(stream))
        except _DAMAGE as error:
            raise UnusableArchiveError(
                f"JAX_MEMEFF_KERNELS names {path}, which is damaged, or is no archive of kernels: "
                f"{type(error).__name__}: {error}"
            ) from error


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of an entry; no bytes if it is absent, compressed or larger than the archive.

    The size is checked first, because zipfile takes the memory that an entry declares.
    """
    try:
        entry = archive.getinfo(name)
    except KeyError:
        return b""
    sizes = {entry.compress_size, entry.file_size}
    if (
        entry.compress_type != zipfile.ZIP_STORED
        or len(sizes) > 1
        or max(sizes) > archive.start_dir
    ):
        return b""
    return archive.read(entry)


def _contents(archive: zipfile.ZipFile) -> Contents:
    try:
        manifest: Any = json.loads(_stored(archive, _MANIFEST))
        kernels = manifest["kernels"]
        return Contents(
            version=_printable(manifest["jax_memeff"]),
            fits=manifest["headers"] == headers.own_digest().hex(),
            kernels=len(kernels),
            archs=tuple(sorted({_printable(arch) for arch, *_ in kernels.values()})),
            compiler={
                _printable(part): _printable(version)
                for part, version in manifest["compiler"].items()
            },
        )
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{_MANIFEST} has another structure: {error!r}") from error


def _printable(value: object) -> str:
    """Text from an archive, escaped so that it cannot control a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(value)
    )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
