"""Symbolic sizes of ``jax.export``, and the paths that cannot have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax import export

from jax_memeff.errors import UnsupportedError


def require_static(shapes: Mapping[str, Sequence[int]], where: str, remedy: str) -> None:
    """Raise for symbolic sizes among named shapes.

    Raises:
        UnsupportedError: names ``where`` sizes have to be static, the shape, and the ``remedy``.
    """
    for name, shape in shapes.items():
        if any(export.is_symbolic_dim(size) for size in shape):
            sizes = ", ".join(map(str, shape))
            raise UnsupportedError([f"{where}, got {name} [{sizes}]", remedy])
