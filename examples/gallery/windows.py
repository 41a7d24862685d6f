"""Masks of the neighbourhood of each row; pass the result of each function as ``mask=``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_memeff import Mask


def sliding_window(window: int) -> Mask:
    """A row attends to itself and to the ``window`` columns before it.

    ``Mask.window(window, 0)`` is the same mask without a function and without a block mask.
    """
    return Mask.function(lambda b, h, q, k: (k <= q) & (q - k <= window))


def global_tokens(window: int, is_global: jax.Array) -> Mask:
    """A window on both sides; global tokens attend to all tokens, and all attend to them.

    Beltagy, Peters and Cohan, "Longformer", 2020.

    Args:
        window: the number of columns on each side.
        is_global: bool [B, T]: whether each token is global.
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
    """Each pixel attends to a window of ``kernel * kernel`` pixels around it.

    Hassani et al., "Neighborhood Attention Transformer", 2023. The sequence is the pixels of an
    image, row by row. At a border the window moves inwards, so every pixel attends to the same
    number of pixels.

    Args:
        height, width: the size of the image.
        kernel: an odd number, at most the length of the shorter side.
    """
    reach = kernel // 2

    def attends(b, h, q, k):
        row = jnp.clip(q // width, reach, height - 1 - reach)
        column = jnp.clip(q % width, reach, width - 1 - reach)
        return (abs(row - k // width) <= reach) & (abs(column - k % width) <= reach)

    return Mask.function(attends)


def head_windows(windows: jax.Array) -> Mask:
    """A causal window, with a different size for each head.

    Args:
        windows: integer [N]: the number of columns before its own that a row attends to.
    """
    return Mask.function(lambda b, h, q, k: (k <= q) & (q - k <= windows[h]))


def look_ahead(chunk: int, ahead: int) -> Mask:
    """A row attends to its chunk, all chunks before it, and ``ahead`` columns after it.

    Streaming speech recognition works like this: a chunk of frames is encoded as soon as ``ahead``
    more frames have arrived.
    """
    return Mask.function(lambda b, h, q, k: k < (q // chunk + 1) * chunk + ahead)


def local_or_global(window: jax.Array | int) -> Mask:
    """A causal window that may be traced, so layers with different windows run in one ``scan``.

    Gemma 3 has five local layers for each global one.

    Args:
        window: int32 scalar: the number of columns before the row; T or more is a global layer.
    """
    return Mask.window(window, 0)
