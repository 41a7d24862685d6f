"""The cache of compiled kernels: one verified file per kernel, in a directory of the user.

A process with a filled cache spends 0.25 s before its first launch (measured on an H200). The
import of ``cuda.core`` alone takes 0.16 s, so its program cache is not used; it has no checksum
either. ``diskcache`` unpickles what it finds, which would run code from the directory.

Two hazards:

* An entry is machine code, which runs with the user's rights. So the cache trusts a directory or a
  file only if no other user (root excepted) can write to it. Everybody may read, so that root can
  fill the cache of a container image. Files are opened relative to the checked, open directory and
  links are not followed, because a path may name something else after the check.
* The directory may hold files of the user. So the cache has a subdirectory, and it lists, evicts
  and removes only names that ``_write`` makes.

Correctness needs no lock. An entry is written under a temporary name and renamed into place, so a
reader sees all of it or none. An entry that does not verify is a miss, whatever the cause, and the
compilation that follows replaces it. Without a usable directory, the process keeps its kernels in
memory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax_memeff import config
from jax_memeff.codegen.toolchain import descriptors

MAX_BYTES = 256 * 2**20
"""About 6000 kernels; the least recently used ones are evicted first."""

SUBDIRECTORY = "kernels"

_MAGIC = b"jax_memeff kernel 1\n"
_HASH_BYTES = hashlib.sha256().digest_size
_ENTRY = re.compile(r"[0-9a-f]{64}\.kernel")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_HOUR = 3600
"""Seconds. A temporary file of this age belongs to a process that was killed: writing takes
milliseconds. A time this far ahead was set while a clock was wrong."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(NamedTuple):
    """A file of the cache: its name, its size in bytes, and when it was last used."""

    name: str
    size: int
    used: float


class UntrustedDirectoryError(Exception):
    """Another user could have written the kernels of this directory."""


class ProgramCache:
    """Bytes by key, a SHA-256 in hexadecimal, below ``directory``; every failure is a miss.

    ``directory`` is None if there is no place for files: then the cache is this process's memory.
    """

    def __init__(self, directory: Path | None):
        self.directory = directory
        self.memory: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """The payload stored under ``key``, or None if it is absent or damaged."""
        if (payload := self.memory.get(key)) is not None:
            return payload
        payload = None
        with self._opened() as directory:
            if directory is not None:
                payload = _read(directory, key)
        if payload is not None:
            self.memory[key] = payload
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store ``payload``; a directory that cannot be written to only costs a later compile."""
        self.memory[key] = payload
        with self._opened(create=True) as directory:
            if directory is not None:
                _remove_abandoned(directory)  # first: they may be what fills the disk
                with contextlib.suppress(OSError):
                    _write(directory, key, payload)
                    _evict(directory, _name(key))

    def entries(self) -> list[Entry]:
        """The kernels on disk."""
        with self._opened() as directory:
            return [] if directory is None else _entries(directory, _ENTRY)

    def refusal(self) -> str | None:
        """Why the directory is not used although it is there; None if it is used or absent."""
        try:
            with _open_trusted(self.directory, create=False):
                return None
        except UntrustedDirectoryError as error:
            return str(error)
        except FileNotFoundError:
            return None
        except OSError as error:
            return _unusable(self.directory, error)

    def is_writable(self) -> bool:
        """Whether files may be created where the entries are or, before the first one, will be."""
        if self.directory is None:
            return False
        place = self.directory / SUBDIRECTORY
        while not os.path.exists(place):
            place = place.parent
        return os.access(place, os.W_OK | os.X_OK)

    def loss(self, key: str) -> str | None:
        """Why the kernel that was put under ``key`` is not on disk; None if it is.

        Writes it again, because the error of the first attempt is gone.
        """
        if self.directory is None:
            return "there is no home directory: name a directory in JAX_MEMEFF_CACHE_DIR"
        try:
            with _open_trusted(self.directory, create=True) as directory:
                if _read(directory, key) is None:
                    _write(directory, key, self.memory[key])
        except UntrustedDirectoryError as error:
            return str(error)
        except OSError as error:
            return _unusable(self.directory, error)
        return None

    @contextlib.contextmanager
    def _opened(self, create: bool = False) -> Iterator[int | None]:
        """A descriptor of the directory of entries; None if there is none, or none to trust."""
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(_open_trusted(self.directory, create))
            except UntrustedDirectoryError as error:
                _warn_once(str(error))
                descriptor = None
            except OSError:
                descriptor = None
            yield descriptor


def current() -> ProgramCache:
    """The cache in ``config.cache_dir()``, one object per directory."""
    return _cache_of(config.cache_dir())


@functools.cache
def _cache_of(directory: Path | None) -> ProgramCache:
    return ProgramCache(directory)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _open_trusted(directory: Path | None, create: bool) -> Iterator[int]:
    """A descriptor of the subdirectory of ``directory``, both checked.

    Raises ``UntrustedDirectoryError``, or ``OSError`` if the subdirectory cannot be opened.
    """
    if directory is None:
        raise FileNotFoundError("there is no directory for the cache")
    if create:
        with contextlib.suppress(FileExistsError):  # of a file: it cannot be opened below
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    outer = os.open(directory, _DIRECTORY)
    try:
        _require_private(outer, directory)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(SUBDIRECTORY, 0o755, dir_fd=outer)
        inner = os.open(SUBDIRECTORY, _DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
    finally:
        os.close(outer)
    try:
        _require_private(inner, directory / SUBDIRECTORY)
        yield inner
    finally:
        os.close(inner)


def _unusable(directory: Path | None, error: OSError) -> str:
    place = directory
    if directory is not None and error.filename == SUBDIRECTORY:  # opened relative to it
        place = directory / SUBDIRECTORY
    elif directory is not None and error.filename2:  # something that no rename replaces
        place = directory / SUBDIRECTORY / error.filename2
    advice = "name another directory in JAX_MEMEFF_CACHE_DIR"
    if error.errno == errno.EMFILE:
        advice = descriptors.advice()
    return (
        f"jax_memeff keeps compiled kernels in memory only, because {place} cannot be used "
        f"({error.strerror}): {advice}"
    )


def _require_private(descriptor: int, directory: Path) -> None:
    status = os.fstat(descriptor)
    if found := distrust(status):
        chmod = f", or run: chmod go-w '{directory}'" if _trusted_owner(status) else ""
        raise UntrustedDirectoryError(
            "jax_memeff keeps compiled kernels in memory only, because machine code that another "
            f"user wrote would run with your rights: {directory} {found}. Name another directory "
            f"in JAX_MEMEFF_CACHE_DIR (it is created if it does not exist){chmod}"
        )


def _trusted_owner(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)  # root could change any file


def distrust(status: os.stat_result) -> str | None:
    """How a user other than this one could have written a file; None if none could."""
    if not _trusted_owner(status):
        return f"is owned by the user with the id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written to by other users (its mode is {stat.S_IMODE(status.st_mode):o})"
    return None


def _read(directory: int, key: str) -> bytes | None:
    try:
        file = os.open(_name(key), _READ, dir_fd=directory)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or distrust(status) or status.st_size > MAX_BYTES:
            return None
        with os.fdopen(file, "rb", closefd=False) as stream:
            payload = verified(key, stream.read())
        if payload is not None:
            with contextlib.suppress(OSError):  # the directory may be read-only
                os.utime(file)  # eviction is by this time
        return payload
    except OSError:
        return None
    finally:
        os.close(file)


def _write(directory: int, key: str, payload: bytes) -> None:
    temporary = f"{key}.{secrets.token_hex(8)}.tmp"
    file = os.open(temporary, _CREATE, 0o644, dir_fd=directory)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(sealed(key, payload))
        os.replace(temporary, _name(key), src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:  # an interrupt must not leave a partial file behind either
        _unlink(directory, temporary)
        raise


def _remove_abandoned(directory: int) -> None:
    """Remove the temporary files of processes that were killed."""
    for entry in _entries(directory, _TEMPORARY):
        if abs(time.time() - entry.used) > _HOUR:
            _unlink(directory, entry.name)


def _evict(directory: int, written: str) -> None:
    """Remove the least recently used entries beyond ``MAX_BYTES``, but not the one just written.

    A time in the future, set by a wrong clock or a copy, says nothing about the last use. Entries
    that have one go first: otherwise they would never go, and every new kernel would.
    """
    latest = time.time() + _HOUR

    def last_use(entry: Entry) -> tuple[bool, bool, float]:
        return entry.name == written, entry.used <= latest, entry.used

    total = 0
    for entry in sorted(_entries(directory, _ENTRY), key=last_use, reverse=True):
        total += entry.size
        if total > MAX_BYTES and entry.name != written:
            _unlink(directory, entry.name)


def _entries(directory: int, pattern: re.Pattern[str]) -> list[Entry]:
    entries = []
    with contextlib.suppress(OSError), os.scandir(directory) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process evicts, too
                if pattern.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    entries.append(Entry(file.name, status.st_size, status.st_mtime))
    return entries


def _unlink(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _name(key: str) -> str:
    return f"{key}.kernel"


def sealed(key: str, payload: bytes) -> bytes:
    """The bytes of an entry's file: the format, a digest, and the payload."""
    return _MAGIC + _digest(key, payload) + payload


def verified(key: str, stored: bytes) -> bytes | None:
    """The payload of bytes that ``sealed`` returned for this key; None for any other bytes."""
    start = len(_MAGIC) + _HASH_BYTES
    payload = stored[start:]
    return payload if stored[:start] == _MAGIC + _digest(key, payload) else None


def _digest(key: str, payload: bytes) -> bytes:
    """Covers all that a reader relies on: the format, the key and the payload."""
    return hashlib.sha256(_MAGIC + key.encode() + b"\n" + payload).digest()
