"""Dropout of probabilities."""

from __future__ import annotations

from .feature import Flag, Operand

DROPOUT = Flag(
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
