"""The on-disk cache of compiled kernels: cuda.core's program cache, with every entry verified.

cuda.core's cache renames files into place atomically and needs no lock, but it has no checksum and
refuses to open an unusable directory. Here a damaged entry is a miss and is dropped, and without
a usable directory the kernels of this process are kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from pathlib import Path

from jax_memeff import config

MAX_BYTES = 256 * 2**20
"""About 8000 kernels; the least recently read ones are evicted first."""

_MAGIC = b"memeff01"
_HASH_BYTES = hashlib.sha256().digest_size


class ProgramCache:
    """Bytes by key under ``directory``; every failure of the disk is a miss."""

    def __init__(self, directory: Path):
        utils = importlib.import_module("cuda.core.utils")
        self.memory = utils.InMemoryProgramCache(max_size_bytes=MAX_BYTES)
        try:
            self.disk = utils.FileStreamProgramCache(directory, max_size_bytes=MAX_BYTES)
        except OSError:
            self.disk = None

    def get(self, key: bytes) -> bytes | None:
        """The payload stored under ``key``, or None when it is absent or damaged."""
        if (stored := self.memory.get(key)) is not None:
            return _payload(stored)
        if self.disk is None:
            return None
        try:
            stored = self.disk.get(key)
        except OSError:
            return None
        if stored is None:
            return None
        payload = _payload(stored)
        if payload is None:
            with contextlib.suppress(OSError, KeyError):
                del self.disk[key]
            return None
        self.memory[key] = stored
        return payload

    def put(self, key: bytes, payload: bytes, *, to_disk: bool = True) -> None:
        """Store ``payload``; a directory that cannot be written to only costs a later compile."""
        hash_ = hashlib.sha256(payload).digest()
        stored = _MAGIC + len(payload).to_bytes(8, "little") + hash_ + payload
        self.memory[key] = stored
        if self.disk is not None and to_disk:
            with contextlib.suppress(OSError):
                self.disk[key] = stored


def current() -> ProgramCache:
    """The cache in ``config.cache_dir()``, opened once per directory."""
    return _open(config.cache_dir())


@functools.cache
def _open(directory: Path) -> ProgramCache:
    return ProgramCache(directory)


def _payload(stored: bytes) -> bytes | None:
    start = len(_MAGIC) + 8 + _HASH_BYTES
    length = int.from_bytes(stored[len(_MAGIC) : len(_MAGIC) + 8], "little")
    hash_, payload = stored[len(_MAGIC) + 8 : start], stored[start:]
    intact = (
        stored.startswith(_MAGIC)
        and len(payload) == length
        and hashlib.sha256(payload).digest() == hash_
    )
    return payload if intact else None
