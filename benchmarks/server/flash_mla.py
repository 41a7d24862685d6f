"""FlashMLA, the peer of latent attention. It reads the same pages and lists as our calls."""

from __future__ import annotations

import importlib
from typing import Any

import jax
from programs.torch_programs import TorchProgram

from server.calls import Pages
from server.steps import Step

NAME, LABEL = "flash_mla", "FlashMLA"


def program(step: Step, pages: Pages, calls: int) -> TorchProgram:
    """``calls`` calls from pages of 64.

    The first call plans the work of all others, before the clock starts. Raises ``ValueError`` if
    the numbers of new tokens differ, and ``ImportError`` without PyTorch or FlashMLA.
    """
    if len(set(step.counts)) > 1:
        raise ValueError(f"expected equal numbers of new tokens, got {step.counts}")
    torch: Any = importlib.import_module("torch")
    flash_mla: Any = importlib.import_module("flash_mla")
    arrays = jax.block_until_ready((pages.query, pages.key, pages.table, pages.lengths))
    query, pool, table, lengths = map(torch.from_dlpack, arrays)
    query = query.reshape(len(step.counts), step.counts[0], step.heads, step.head_dim)
    plan, _ = flash_mla.get_mla_metadata()

    def attention(operands: tuple[Any, ...]) -> tuple[Any]:
        # The kernels for Hopper and for 16-bit pools are those that it calls legacy.
        out, _ = flash_mla.flash_mla_with_kvcache(
            *operands, step.value_dim, plan, causal=step.counts[0] > 1, use_legacy=True
        )
        return (out.transpose(1, 2),)

    # It may load the page of an entry beyond a sequence's last one.
    return TorchProgram(attention, (query, pool, table.clamp(min=0), lengths), calls)


def sparse_prefill(query: jax.Array, key: jax.Array, lists: jax.Array, calls: int) -> TorchProgram:
    """``calls`` calls for queries that have lists of keys, whose first 512 columns are the values.

    Args:
        query: ``bfloat16[1, T, N, 576]``, where N is 64 or 128.
        key: ``bfloat16[1, S, 1, 576]``.
        lists: ``int32[1, 1, T, n]``, the keys of each query.
        calls: the number of calls in the graph.

    Raises ``ImportError`` without PyTorch or FlashMLA.
    """
    torch: Any = importlib.import_module("torch")
    flash_mla: Any = importlib.import_module("flash_mla")
    arrays = jax.block_until_ready((query[0], key[0], lists[0].swapaxes(0, 1)))

    def attention(operands: tuple[Any, ...]) -> tuple[Any]:
        # As above, the kernel for Hopper is a legacy one.
        scale = query.shape[-1] ** -0.5
        out, *_ = flash_mla.flash_mla_sparse_fwd(*operands, scale, use_legacy=True)
        return (out[None].transpose(1, 2),)

    return TorchProgram(attention, tuple(map(torch.from_dlpack, arrays)), calls)
