"""The parts of the toolchain that this process has found, which tests must not leave behind."""

from __future__ import annotations

from jax_memeff.codegen.toolchain import headers, nvrtc, parts

_CACHED = (
    parts.cuda_major,
    parts.headers,
    parts.library,
    parts.warn_of_mixture,
    headers._found,
    headers.versions,
    nvrtc._require_one_cuda,
)


def forget() -> None:
    """The next compilation searches again."""
    for function in _CACHED:
        function.cache_clear()
