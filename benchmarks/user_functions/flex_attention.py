"""FlexAttention with the functions of cells: compiled by PyTorch, with a compiled block mask."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from programs.cells import Cell

from user_functions.in_jax import alibi_slopes

_COMPILED_FUNCTIONS = 64
"""PyTorch's default is 8. Beyond the limit it silently falls back to an unfused path."""


def attention(cell: Cell) -> Callable[[Any], Any]:
    """FlexAttention with the function of ``cell``, and with its causal mask as a function.

    The block mask is computed here, before the clock starts, as in a model that uses one for all
    layers.
    """
    torch = importlib.import_module("torch")
    dynamo = importlib.import_module("torch._dynamo")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    dynamo.reset()  # drops the functions of other cells, which count towards the limit
    dynamo.config.recompile_limit = _COMPILED_FUNCTIONS
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    block_mask = None
    if (mask_function := _mask_function(torch, cell)) is not None:
        batch = cell.batch if cell.function == "documents" else None
        lengths = cell.query_length, cell.key_length
        block_mask = torch.compile(flex.create_block_mask)(
            mask_function, batch, None, *lengths, device="cuda"
        )

    @functools.cache  # one function object for all calls; otherwise each call compiles again
    def score_function(table: Any) -> Callable[..., Any] | None:
        return _score_function(torch, cell, table)

    def call(tensors: Any) -> Any:
        return compiled(
            tensors.query,
            tensors.key,
            tensors.value,
            score_mod=score_function(tensors.table),
            block_mask=block_mask,
            enable_gqa=cell.heads != cell.key_heads,
        )

    return call


def _score_function(torch: Any, cell: Cell, table: Any) -> Callable[..., Any] | None:
    if cell.function == "identity":
        return lambda score, b, h, q, k: score
    if cell.function == "alibi":
        slopes = torch.tensor(alibi_slopes(cell.heads), device="cuda")
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)
    if cell.function == "soft cap":
        cap = cell.soft_cap
        return lambda score, b, h, q, k: cap * torch.tanh(score / cap)
    if cell.function == "table":
        middle = cell.key_length
        return lambda score, b, h, q, k: score + table[h, q - k + middle]
    return None


def _mask_function(torch: Any, cell: Cell) -> Callable[..., Any] | None:
    if cell.documents is not None:
        index = torch.arange(cell.query_length, device="cuda", dtype=torch.int32)
        ids = torch.stack([index * cell.documents // cell.query_length] * cell.batch)
        return lambda b, h, q, k: ids[b, q] == ids[b, k]
    if (window := cell.window) is not None:
        return lambda b, h, q, k: (k <= q) & (q - k <= window)
    if cell.causal:
        return lambda b, h, q, k: k <= q
    return None
