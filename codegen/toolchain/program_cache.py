"""The cache of compiled kernels: files named by the hash of what they depend on, each one verified.

A reader must not import cuda.core, whose import alone takes longer than all else that a process
with a filled cache does before its first launch (0.16 of 0.25 seconds, measured on an H200), so
its program cache does not serve here. Correctness needs no lock: an entry is written under a
temporary name and renamed, a damaged one is a miss and is dropped, and without a usable directory
the kernels of this process are kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path

from jax_memeff import config

MAX_BYTES = 256 * 2**20
"""About 6000 kernels; the least recently used ones are evicted first."""

_HASH_BYTES = hashlib.sha256().digest_size


class ProgramCache:
    """Bytes by key under ``directory``; every failure of the disk is a miss."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.memory: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """The payload stored under ``key``, or None when it is absent or damaged."""
        if (payload := self.memory.get(key)) is not None:
            return payload
        file = self.directory / key
        try:
            stored = file.read_bytes()
        except OSError:
            return None
        hash_, payload = stored[:_HASH_BYTES], stored[_HASH_BYTES:]
        with contextlib.suppress(OSError):
            if hashlib.sha256(payload).digest() != hash_:
                file.unlink()
                return None
            os.utime(file)  # it was used: eviction goes by this time
        self.memory[key] = payload
        return payload

    def put(self, key: str, payload: bytes, *, to_disk: bool = True) -> None:
        """Store ``payload``; a directory that cannot be written to only costs a later compile."""
        self.memory[key] = payload
        if to_disk:
            with contextlib.suppress(OSError):
                self._write(key, hashlib.sha256(payload).digest() + payload)
                self._evict()

    def entries(self) -> list[os.DirEntry[str]]:
        """The files of the cache, none where there is no directory."""
        try:
            with os.scandir(self.directory) as files:
                return [file for file in files if file.is_file()]
        except OSError:
            return []

    def _write(self, key: str, stored: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
            try:
                file.write(stored)
                file.close()
                os.replace(file.name, self.directory / key)
            except OSError:
                os.unlink(file.name)
                raise

    def _evict(self) -> None:
        files = sorted(self.entries(), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > MAX_BYTES:
                os.unlink(file.path)


def current() -> ProgramCache:
    """The cache in ``config.cache_dir()``, opened once per directory."""
    return _open(config.cache_dir())


@functools.cache
def _open(directory: Path) -> ProgramCache:
    return ProgramCache(directory)
