"""The measured implementations: their frameworks and unsupported features."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from user_functions import flex_attention, in_jax

from programs.cells import Cell


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation of attention.

    ``attention(cell)`` gives a function of ``inputs.Inputs`` (jax) or ``torch_programs.Tensors``
    (torch) that returns the output; it may import what it needs and raise where that is missing.
    With ``return_residual=True`` those of ``OURS`` return a pair of the output and the logsumexp.
    """

    name: str
    label: str
    framework: Literal["jax", "torch"]
    attention: Callable[..., Callable[[Any], Any]]
    missing: Callable[[Cell], list[str]]
    """The features for which the peer has no argument; if there are none, the cell is tried."""
    dtype: str | None = None
    """Runs in this dtype instead of the cell's."""
    prescaled: bool = False
    """Has no scale argument: its query is multiplied by ``1/sqrt(H)`` before the clock starts."""
    plain: bool = False
    """Ignores the function of a cell."""
    compiles: bool = False
    """Compiles its kernels at the first call, so parallel processes compile them beforehand."""
    deterministic: bool = False
    """Runs with PyTorch's deterministic algorithms."""


def _memeff(
    cell: Cell,
    implementation: Literal["cuda", "xla"],
    deterministic: bool = False,
    with_function: bool = True,
    return_residual: bool = False,
):
    import jax_memeff

    if cell.sequences is not None:
        starts, longest = _starts(cell.sequences), max(cell.sequences)
        residual: dict[str, Any] = {"return_residual": return_residual}

        def varlen(inputs):
            tokens = (inputs.query[0], inputs.key[0], inputs.value[0])
            packed = jax_memeff.varlen_attention(
                *tokens,
                starts,
                starts,
                longest,
                longest,
                is_causal=cell.causal,
                deterministic_backward=deterministic,
                implementation=implementation,
                **residual,
            )
            return jax.tree.map(lambda x: x[None], packed)

        return varlen

    def attention(inputs):
        mask = inputs.mask
        if (ids := inputs.segment_ids) is not None:
            mask = jax_memeff.Mask.segments(ids, ids)
        arguments: dict[str, Any] = {
            "mask": mask,
            "key_value_seq_lengths": inputs.key_lengths,
            "is_causal": cell.causal,
            "local_window_size": None if cell.window is None else (cell.window, 0),
            "logits_soft_cap": cell.soft_cap,
        }
        if with_function and cell.function is not None:
            arguments |= in_jax.arguments(cell, inputs)
        return jax_memeff.dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.bias,
            dropout_rate=cell.dropout,
            dropout_key=inputs.dropout_key,
            deterministic_backward=deterministic,
            return_residual=return_residual,
            implementation=implementation,
            **arguments,
        )

    return attention


def _jax_nn(cell: Cell, implementation: Literal["xla", "cudnn"]):
    def attention(inputs):
        return jax.nn.dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.bias,
            inputs.mask,
            key_value_seq_lengths=inputs.key_lengths,
            is_causal=cell.causal,
            local_window_size=None if cell.window is None else (cell.window, 0),
            implementation=implementation,
        )

    return attention


def _pallas_mosaic_gpu(cell: Cell):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    # Two warpgroups of 64 queries and two stages, with the largest key block whose stages fit in
    # the shared memory of Hopper; the same holds for the backward's warpgroups.
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=64 if cell.head_dim > 128 else 128,
        max_concurrent_steps=2,
        causal=cell.causal,
        compute_wgs_bwd=1 if cell.head_dim > 128 else 2,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    return lambda inputs: attention_mgpu.attention(inputs.query, inputs.key, inputs.value, config)


def _torch_sdpa(cell: Cell, backend: str):
    torch = importlib.import_module("torch")
    attention_module = importlib.import_module("torch.nn.attention")
    kernel = getattr(attention_module.SDPBackend, backend)

    def attention(tensors):
        with attention_module.sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(
                tensors.query,
                tensors.key,
                tensors.value,
                attn_mask=tensors.bias,
                dropout_p=cell.dropout,
                is_causal=cell.causal,
                enable_gqa=cell.heads != cell.key_heads,
            )

    return attention


def _torch_flash(cell: Cell):
    """FlashAttention-2. SDPA has no argument for its window, so such cells call the operator."""
    if cell.window is None:
        return _torch_sdpa(cell, "FLASH_ATTENTION")
    torch = importlib.import_module("torch")

    def attention(tensors):
        # It takes [B, T, N, H]: transposed views of the same memory that SDPA gets.
        operands = (x.transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))
        lengths = cell.query_length, cell.key_length
        # No starts of sequences; dropout, causal mask, no debug mask.
        result = torch.ops.aten._flash_attention_forward(
            *(*operands, None, None, *lengths, cell.dropout, cell.causal, False),
            window_size_left=cell.window,
            window_size_right=0,
        )
        return result[0].transpose(1, 2)

    return attention


def _starts(sequences: tuple[int, ...]) -> np.ndarray:
    return np.array([*itertools.accumulate(sequences, initial=0)], np.int32)


def _torch_packed(cell: Cell, packed: Callable[..., Any]):
    """``packed`` takes three operands [tokens, N, H], the starts of the sequences (twice) and the
    length of the longest (twice).
    """
    torch = importlib.import_module("torch")
    sequences = cell.sequences or ()
    starts = torch.tensor(_starts(sequences), device="cuda")
    longest = max(sequences)

    def attention(tensors):
        tokens = (tensors.query, tensors.key, tensors.value)
        operands = (tensor.transpose(1, 2)[0] for tensor in tokens)
        out = packed(*operands, starts, starts, longest, longest)
        return out[None].transpose(1, 2)

    return attention


def _torch_varlen(cell: Cell):
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    window = (-1, 0 if cell.causal else -1)
    return _torch_packed(cell, functools.partial(varlen_attn, window_size=window))


def _flash_attention_4(cell: Cell):
    flash = importlib.import_module("flash_attn.cute")
    if cell.sequences is not None:

        def packed(query, key, value, *starts_and_longest):
            starts = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            named = dict(zip(starts, starts_and_longest, strict=True))
            result = flash.flash_attn_varlen_func(query, key, value, **named, causal=cell.causal)
            return result[0] if isinstance(result, tuple) else result

        return _torch_packed(cell, packed)

    def attention(tensors):
        # It takes [B, T, N, H]: transposed views of the same memory that torch's SDPA gets.
        result = flash.flash_attn_func(
            *(tensor.transpose(1, 2) for tensor in (tensors.query, tensors.key, tensors.value)),
            causal=cell.causal,
            window_size=(None, None) if cell.window is None else (cell.window, 0),
            softcap=cell.soft_cap or 0.0,
        )
        out = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return attention


def _without(*features: str, packed: bool = False) -> Callable[[Cell], list[str]]:
    """A check for a peer without arguments for these fields of a cell and for segments."""
    missing = (*features, "documents", "function", *(() if packed else ("sequences",)))
    return lambda cell: [name for name in missing if getattr(cell, name) != getattr(Cell, name)]


def _nothing(cell: Cell) -> list[str]:
    del cell
    return []


def _only_functions(cell: Cell) -> list[str]:
    """A check for a peer that supports only cells with a function."""
    return ["calls without a function"] if cell.function is None else []


def _only_varlen(cell: Cell) -> list[str]:
    """A check for a peer that supports packed sequences only."""
    return ["batches"] if cell.sequences is None else []


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "memeff_cuda",
            "jax-memeff",
            "jax",
            functools.partial(_memeff, implementation="cuda"),
            _nothing,
            compiles=True,
        ),
        Peer(
            "memeff_xla",
            "jax-memeff (blockwise)",
            "jax",
            functools.partial(_memeff, implementation="xla"),
            _nothing,
        ),
        Peer(
            "memeff_deterministic",
            "jax-memeff (deterministic)",
            "jax",
            functools.partial(_memeff, implementation="cuda", deterministic=True),
            _nothing,
            compiles=True,
        ),
        Peer(
            "memeff_plain",
            "jax-memeff (plain call)",
            "jax",
            functools.partial(_memeff, implementation="cuda", with_function=False),
            _only_functions,
            plain=True,
            compiles=True,
        ),
        Peer(
            "jax_xla",
            "jax.nn XLA",
            "jax",
            functools.partial(_jax_nn, implementation="xla"),
            _without("dropout", "soft_cap"),
        ),
        Peer(
            "jax_cudnn",
            "jax.nn cuDNN",
            "jax",
            functools.partial(_jax_nn, implementation="cudnn"),
            _without("dropout", "soft_cap"),
        ),
        Peer(
            "pallas_mgpu",
            "Pallas Mosaic GPU (f16)",
            "jax",
            _pallas_mosaic_gpu,
            _without("window", "bias", "dropout", "soft_cap", "mask_block", "valid_keys"),
            # Its shared-memory buffers are declared float16, whatever the operands are.
            dtype="float16",
            prescaled=True,
        ),
        Peer(
            "torch_efficient",
            "torch mem-efficient",
            "torch",
            functools.partial(_torch_sdpa, backend="EFFICIENT_ATTENTION"),
            _without("window", "soft_cap", "mask_block", "valid_keys"),
        ),
        Peer(
            "torch_flash",
            "torch FlashAttention-2",
            "torch",
            _torch_flash,
            _without("soft_cap", "mask_block", "valid_keys"),
        ),
        Peer(
            "torch_flash_deterministic",
            "torch FlashAttention-2 (deterministic)",
            "torch",
            _torch_flash,
            _without("soft_cap", "mask_block", "valid_keys"),
            deterministic=True,
        ),
        Peer(
            "torch_cudnn",
            "torch cuDNN",
            "torch",
            functools.partial(_torch_sdpa, backend="CUDNN_ATTENTION"),
            _without("window", "soft_cap", "mask_block", "valid_keys"),
        ),
        Peer("torch_varlen", "torch varlen FlashAttention-2", "torch", _torch_varlen, _only_varlen),
        Peer(
            "fa4",
            "FlashAttention-4",
            "torch",
            _flash_attention_4,
            _without("bias", "dropout", "mask_block", "valid_keys", packed=True),
            compiles=True,  # into a disk cache if its variable is set
        ),
        Peer(
            "flex",
            "FlexAttention",
            "torch",
            flex_attention.attention,
            _only_functions,
            compiles=True,
        ),
    )
}

OURS = ("memeff_cuda", "memeff_xla", "memeff_deterministic", "memeff_plain")


def peers(names: str) -> list[Peer]:
    """The peers of a comma-separated list of names.

    ``all`` means jax-memeff's default and all other implementations, except FlexAttention and the
    deterministic ones.

    >>> [peer.label for peer in peers("memeff_cuda,torch_cudnn")]
    ['jax-memeff', 'torch cuDNN']
    """
    if names == "all":
        absent = (*OURS[1:], "flex")
        peers = PEERS.values()
        return [peer for peer in peers if peer.name not in absent and not peer.deterministic]
    unknown = [name for name in names.split(",") if name not in PEERS]
    if unknown:
        raise ValueError(f"unknown peers {unknown}: expected 'all' or some of {', '.join(PEERS)}")
    return [PEERS[name] for name in names.split(",")]
