"""Symbolic sizes of ``jax.export``, and an error for paths that do not support them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax import export

from jax_memeff.errors import UnsupportedError


def require_static(shapes: Mapping[str, Sequence[int]], where: str, remedy: str) -> None:
    """Raise for symbolic sizes among named shapes.

    Raises:
        UnsupportedError: its text has ``where`` (the path that needs static sizes), the shape, and
            the ``remedy``.
    """
    for name, shape in shapes.items():
        if any(export.is_symbolic_dim(size) for size in shape):
            sizes = ", ".join(map(str, shape))
            raise UnsupportedError([f"{where}, got {name} [{sizes}]", remedy])
