"""Masks of the neighbourhood of a row: what they return is passed as ``mask=``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_memeff import Mask


def sliding_window(window: int) -> Mask:
    """A row attends to itself and to the ``window`` columns before it.

    ``Mask.window(window, 0)`` is the same mask without a function, and needs no block mask.
    """
    return Mask.function(lambda b, h, q, k: (k <= q) & (q - k <= window))


def global_tokens(window: int, is_global: jax.Array) -> Mask:
    """A window on both sides; global tokens attend to all, and all attend to them.

    Beltagy, Peters and Cohan, "Longformer", 2020.

    Args:
        window: columns on each side.
        is_global: bool [B, T].
    """
    return Mask.window(window, window) | Mask.function(
        lambda b, h, q, k: is_global[b, q] | is_global[b, k]
    )


def dilated_window(count: int, dilation: int) -> Mask:
    """A row attends to itself and to ``count`` columns before it, ``dilation`` apart.

    Child et al., "Generating Long Sequences with Sparse Transformers", 2019.
    """

    def attends(b, h, q, k):
        distance = q - k
        return (distance >= 0) & (distance <= count * dilation) & (distance % dilation == 0)

    return Mask.function(attends)


def neighborhood(height: int, width: int, kernel: int) -> Mask:
    """A pixel attends to the ``kernel * kernel`` pixels around it, fully inside the image.

    Hassani et al., "Neighborhood Attention Transformer", 2023. The pixels are a sequence, row by
    row. At a border the window moves inwards, so that all pixels attend to as many others.

    Args:
        height, width: of the image.
        kernel: an odd number, at most that of the shorter side.
    """
    reach = kernel // 2

    def attends(b, h, q, k):
        row = jnp.clip(q // width, reach, height - 1 - reach)
        column = jnp.clip(q % width, reach, width - 1 - reach)
        return (abs(row - k // width) <= reach) & (abs(column - k % width) <= reach)

    return Mask.function(attends)


def head_windows(windows: jax.Array) -> Mask:
    """A causal window of its own for each head.

    Args:
        windows: integer [N]: how many columns before its own a row attends to.
    """
    return Mask.function(lambda b, h, q, k: (k <= q) & (q - k <= windows[h]))


def look_ahead(chunk: int, ahead: int) -> Mask:
    """All before the row, its chunk, and ``ahead`` columns after the chunk.

    Streaming speech recognition works like this: a chunk of frames is encoded as soon as so many
    frames after it have come in.
    """
    return Mask.function(lambda b, h, q, k: k < (q // chunk + 1) * chunk + ahead)


def local_or_global(window: jax.Array | int) -> Mask:
    """A causal window, which may be traced: layers that differ in it run in one ``jax.lax.scan``.

    Gemma 3 has five local layers for each global one.

    Args:
        window: int32 scalar: columns before the row; any number beyond T is a global layer.
    """
    return Mask.window(window, 0)
