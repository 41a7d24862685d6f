"""Windows of a sequence whose rows are sharded."""

from __future__ import annotations

import dataclasses

from jax_memeff._call.mask import Mask, Window

UNALIGNABLE = (
    "mask: a bottom-right window together with lengths has a diagonal for each batch index, which "
    "a sequence sharded over devices does not support; align the window top-left, or pass no "
    "lengths"
)


def can_align(mask: Mask) -> bool:
    """Whether :func:`top_left` can align the mask's windows; the arrays may be types."""
    traced = any(window.alignment == "bottom_right" for window in mask.traced_windows)
    has_lengths = mask.query_lengths is not None or mask.key_lengths is not None
    return not (has_lengths and (traced or mask.bottom_right is not None))


def top_left(mask: Mask, rows: int, columns: int) -> Mask:
    """The same mask with top-left windows only.

    Args:
        mask: of the whole sequence.
        rows, columns: T and S of the whole sequence.

    Raises:
        ValueError: a bottom-right window comes with lengths.

    >>> top_left(Mask.causal("bottom_right"), rows=2, columns=5).top_left
    Window(left=None, right=3)
    """
    if not can_align(mask):
        raise ValueError(UNALIGNABLE)
    distance = columns - rows
    windows = (
        window.moved(distance) if window.alignment == "bottom_right" else window
        for window in mask.traced_windows
    )
    mask = dataclasses.replace(mask, traced_windows=tuple(windows))
    if mask.bottom_right is None:
        return mask
    left, right = mask.bottom_right.left, mask.bottom_right.right
    window = Window.of(
        None if left is None else left - distance, None if right is None else right + distance
    )
    return dataclasses.replace(mask, bottom_right=None) & Mask(top_left=window)
