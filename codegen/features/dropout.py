"""Dropout of probabilities."""

from __future__ import annotations

import struct
from typing import Any

from ..launch import ParamsField
from .feature import (
    Flag,
    Operand,
    SpecLike,
)


class Dropout(Flag):
    """Its parameters are fields of ``DropoutParams`` (ffi/include/memeff/params.h) and not rows of
    the table of arrays: the way in which they are loaded changes ptxas's schedule of the main loop.
    """

    numbers = ("dropout_threshold", "dropout_scale")

    def params_fields(self, spec: SpecLike) -> tuple[ParamsField, ...]:
        if not spec[self]:
            return ()
        return (
            ParamsField("dropout.key_words", 200, "key_words"),
            ParamsField("dropout.batch_base", 208, "batch_base"),
            ParamsField("dropout.head_index", 216, "head_index"),
            ParamsField("dropout.threshold", 224, "dropout_threshold"),
            ParamsField("dropout.scale", 228, "dropout_scale"),
        )

    def number_values(self, call: Any) -> tuple[int, ...]:
        (scale,) = struct.unpack("<i", struct.pack("<f", call.options.kept_scale))
        return call.options.dropout_threshold, scale


DROPOUT = Dropout(
    "dropout",
    "dropout",
    constant="kDropout",
    tag="dropout",
    asked_by=lambda call: call.options.dropout_threshold > 0,
    modifies="probabilities",
    positional=True,
    operands=(
        Operand("key_words", "B 2", places=("dropout.key_words",)),
        Operand("batch_base", "B", places=("dropout.batch_base",)),
        Operand("head_index", "N", places=("dropout.head_index",)),
    ),
    per_head=True,
    values=(0.0, 0.1, 0.5),
)
