"""Windows whose bounds are data, as a part of the mask function of a kernel.

A bound is a captured array without dims of the user's own, so a kernel reads one number per batch
index. A bottom-right window reads lengths in the same way, or has T and S as literals.
"""

from __future__ import annotations

from typing import Any

from jax_memeff._call.mask import Mask
from jax_memeff.codegen.functions.program import CapturedType, Program, Value

_SIDES = ("left", "right")


def buffer_names(mask: Mask) -> dict[str, str]:
    """The buffers of the bounds, by the paths of the bounds in the operands."""
    return {
        f"mask.traced_windows.{index}.{side}": f"window{index}_{side}"
        for index, window in enumerate(mask.traced_windows)
        for side in _SIDES
        if getattr(window, side) is not None
    }


class _Builder:
    """Deduplicates the values of a program; its arrays and literals follow those of ``base``."""

    def __init__(self, base: Program):
        self.values = dict(zip(base.values, range(len(base.values)), strict=True))
        self.arrays = list(base.arrays)
        self.literals = list(base.literals)
        self.literal_count = base.literal_count
        self.names: list[str] = []

    def add(self, op: str, dtype: Any, *args: int, **params: Any) -> int:
        value = Value(op, dtype, args, tuple(sorted(params.items())))
        return self.values.setdefault(value, len(self.values))

    def read(self, name: str) -> int:
        """The value that reads the batch index's entry of an array [B]."""
        if name not in self.names:
            self.names.append(name)
            self.arrays.append(CapturedType("int32", 0))
        place = len(self.arrays) - len(self.names) + self.names.index(name)
        return self.add("read", "int32", array=place, mode="clip")

    def literal(self, number: int) -> int:
        self.literals.append(number)
        self.literal_count += 1
        return self.add("literal", "int32", index=self.literal_count - 1)


_ALWAYS = Program((Value("constant", "bool", (), (("value", True),)),), (0,), ())


def conjunction(
    base: Program | None, mask: Mask, scores: tuple[int, int, int, int], is_varlen: bool
) -> tuple[Program | None, tuple[str, ...]]:
    """The conjunction of ``base`` and the traced windows of a mask, and the buffers of the arrays
    that it adds to those of ``base``.

    Args:
        base: the mask's function, with the values of its literals; None means true.
        mask: that of the call.
        scores: (B, N, T, S).
        is_varlen: whether sequences are packed; they have lengths.
    """
    if not mask.traced_windows:
        return base, ()
    base = _ALWAYS if base is None else base
    builder = _Builder(base)
    key, query = (builder.add(name, "int32") for name in ("key", "query"))
    result = base.results[0]
    for index, window in enumerate(mask.traced_windows):
        distance = builder.add("sub", "int32", key, query)
        if window.alignment == "bottom_right":
            lengths = (
                builder.read(name)
                if is_varlen or getattr(mask, name) is not None
                else builder.literal(size)
                for name, size in (("key_lengths", scores[3]), ("query_lengths", scores[2]))
            )
            distance = builder.add("sub", "int32", distance, builder.add("sub", "int32", *lengths))
        if window.left is not None:
            least = builder.add("neg", "int32", builder.read(f"window{index}_left"))
            result = builder.add("and", "bool", result, builder.add("ge", "bool", distance, least))
        if window.right is not None:
            most = builder.read(f"window{index}_right")
            result = builder.add("and", "bool", result, builder.add("le", "bool", distance, most))
    program = Program(
        tuple(builder.values), (result,), tuple(builder.arrays), tuple(builder.literals)
    )
    return program, tuple(builder.names)
