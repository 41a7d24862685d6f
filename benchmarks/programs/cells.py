"""The measured problems: cells and sets of cells."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

WITH_ARGUMENT = frozenset(("identity", "soft cap", "documents", "window"))
"""Functions that the plain call also computes, with another argument or without one."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One attention problem. Shapes are those of ``jax.nn.dot_product_attention``."""

    group: str
    batch: int
    query_length: int
    key_length: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None
    """A row attends to this many keys before its own position (if causal, none after it)."""
    bias: bool = False
    """A ``[1, N, T, S]`` bias in ``dtype``; forward+backward includes its gradient."""
    dropout: float = 0.0
    soft_cap: float | None = None
    sequences: tuple[int, ...] | None = None
    """Lengths of packed sequences; the batch size is 1."""
    documents: int | None = None
    """Each batch index holds this many documents of equal length, separated by segment ids."""
    mask_block: int | None = None
    """A ``[1, 1, T, S]`` boolean mask of square blocks with this many rows; a quarter are true."""
    valid_keys: int | None = None
    """Each batch index attends to this many keys, the first ones."""
    function: str | None = None
    """A function of ``user_functions``. It replaces the argument with the same meaning, if there is
    one: ``documents``, ``window``, ``soft_cap``."""
    gradients: bool = True
    """Whether forward+backward is measured, too."""

    def __post_init__(self):
        tokens = (self.batch, self.query_length, self.key_length)
        if self.sequences is not None and tokens != (1, *[sum(self.sequences)] * 2):
            raise ValueError(
                f"sequences of {sum(self.sequences)} tokens need as many queries and keys in one "
                f"batch index, got batch, query_length, key_length {tokens}"
            )
        if self.window is not None and not self.causal:
            raise ValueError(f"window={self.window} needs causal=True, got causal={self.causal}")

    @property
    def name(self) -> str:
        """A readable name, unique among the cells below.

        >>> small()[0].name
        'hd64 B1 N8 T1024'
        """
        dims = f"hd{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f"/{self.value_dim}"
        heads = f"N{self.heads}"
        if self.key_heads != self.heads:
            heads += f"/{self.key_heads}"
        lengths = f"T{self.query_length}"
        if self.key_length != self.query_length:
            lengths += f" S{self.key_length}"
        parts = [dims, f"B{self.batch}", heads, lengths]
        if self.dtype != "bfloat16":
            parts.append(self.dtype)
        if self.sequences is not None:
            parts.append(f"{len(self.sequences)} sequences to {max(self.sequences)}")
        if self.documents is not None:
            parts.append(f"{self.documents} documents")
        if self.mask_block is not None:
            parts.append(f"mask in blocks of {self.mask_block}")
        if self.valid_keys is not None:
            parts.append(f"{self.valid_keys} valid keys")
        if self.causal:
            parts.append("causal")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.bias:
            parts.append("bias")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.soft_cap is not None:
            parts.append(f"soft cap {self.soft_cap:g}")
        if self.function is not None:
            has_argument = self.function in WITH_ARGUMENT - {"identity"}
            parts.append("as a function" if has_argument else f"function {self.function}")
        return " ".join(parts)

    @property
    def key_value_bytes(self) -> int:
        """The bytes of keys and values, which dominate the memory traffic of a few queries.

        >>> decode()[1].key_value_bytes == 2 * 32768 * 8 * 128 * 2
        True
        """
        keys = self.valid_keys or self.key_length
        elements = self.batch * keys * self.key_heads * (self.head_dim + self.value_dim)
        return elements * (4 if self.dtype == "float32" else 2)

    def flops(self, backward: bool) -> float:
        """Floating-point operations counted for one call, or for one call and its gradients.

        Forward: ``2 (H + Hv)`` for each valid pair of a query and a key. A causal mask counts as
        half of the pairs. Forward+backward: 3.5 times that, because the backward has five matrix
        products and the forward two.

        >>> small()[0].flops(backward=False) == 4 * 8 * 1024 * 1024 * 64
        True
        """
        lengths = [(self.query_length, self.key_length)]
        if self.sequences is not None:
            lengths = [(length, length) for length in self.sequences]
        pairs = sum(rows * columns for rows, columns in lengths) * (0.5 if self.causal else 1.0)
        pairs /= (self.documents or 1) * (1 if self.mask_block is None else 4)
        if self.valid_keys is not None:
            pairs *= self.valid_keys / self.key_length
        if self.window is not None:
            rows = range(self.query_length)
            pairs = sum(
                max(0, min(r, self.key_length - 1) + 1 - max(0, r - self.window)) for r in rows
            )
        forward = 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.value_dim)
        return forward * (3.5 if backward else 1.0)


def _decode(batch: int, queries: int, keys: int, heads: int, key_heads: int, dim: int) -> Cell:
    return Cell("decode", batch, queries, keys, heads, key_heads, dim, dim, gradients=False)


def _square(group: str, batch: int, length: int, heads: int, dim: int, **features) -> Cell:
    return Cell(group, batch, length, length, heads, heads, dim, dim, **features)


def _constant_size(group: str, length: int, dim: int, **features) -> Cell:
    """B·T = 16384 and N·H = 2048: every operand has 64 MiB, more than the L2 of an H200."""
    return _square(group, 16384 // length, length, 2048 // dim, dim, **features)


def tiny() -> list[Cell]:
    """Problems small enough for a CPU: they test the harness, not the speed."""
    return [
        _square("tiny", 2, 96, 2, 16, dtype="float32", causal=True),
        Cell("tiny", 1, 48, 64, 4, 2, 16, 16, dtype="float32", bias=True),
        Cell("decode", 1, 2, 64, 4, 2, 16, 16, dtype="float32", gradients=False),
    ]


def small() -> list[Cell]:
    """Problems so small that launches and grid size dominate, and the short sequences of encoders
    (ViT with 197 and 577 tokens, DiT with 256, BERT with 512).
    """
    batches = ((64, 197, 12, 64), (64, 256, 16, 64), (32, 512, 12, 64), (32, 577, 16, 64))
    encoders = [_square("small", *sizes) for sizes in (*batches, (8, 1023, 16, 128))]
    return [
        _square("small", 1, 1024, 8, 64),
        _square("small", 1, 1024, 8, 64, causal=True),
        *encoders,
        _square("small", 8, 1023, 16, 128, causal=True),
    ]


def quick() -> list[Cell]:
    """A part of the main grid that takes a few minutes."""
    return [
        _constant_size("main", length, dim, causal=causal)
        for dim, length, causal in itertools.product((64, 128), (2048, 8192), (False, True))
    ]


def main() -> list[Cell]:
    """The main grid."""
    return [
        _constant_size("main", length, dim, causal=causal)
        for dim, length, causal in itertools.product(
            (64, 128, 256), (512, 2048, 8192, 16384), (False, True)
        )
    ]


def gqa() -> list[Cell]:
    """Eight and four query heads per key head, with short and long sequences."""
    return [
        Cell("gqa", 32768 // length, length, length, 32, 32 // group, dim, dim, causal=True)
        for dim, group, length in itertools.product((64, 128), (8, 4), (4096, 32768))
    ]


def decode() -> list[Cell]:
    """One or a few queries and long keys, bound by reading keys and values."""
    return [
        _decode(16, 1, 8192, 32, 8, 128),
        _decode(1, 1, 32768, 32, 8, 128),
        _decode(16, 16, 8192, 32, 8, 128),
        _decode(16, 1, 8192, 8, 8, 128),
        _decode(16, 1, 8192, 32, 1, 128),
        _decode(16, 1, 8192, 32, 8, 64),
        _decode(16, 1, 8192, 16, 8, 256),
    ]


def features() -> list[Cell]:
    """Bias with gradient, dropout, and both."""
    modifiers = ({"bias": True}, {"dropout": 0.1}, {"bias": True, "dropout": 0.1})
    return [
        _constant_size("features", length, dim, **modifier)
        for dim, length, modifier in itertools.product((64, 128, 256), (2048, 4096), modifiers)
    ]


def pairs() -> list[Cell]:
    """The bias of pair representations (AlphaFold), shared by many short sequences."""
    return [_square("pairs", 256, 256, 4, 32, bias=True)]


def window() -> list[Cell]:
    """Sliding windows over a long sequence."""
    return [
        _constant_size("window", 16384, dim, causal=True, window=window)
        for dim, window in itertools.product((64, 128, 256), (1024, 128))
    ]


def softcap() -> list[Cell]:
    """Capped scores, and the same cells without the cap."""
    return [
        _constant_size("softcap", 4096, dim, causal=causal, soft_cap=cap)
        for dim, causal, cap in itertools.product((64, 128), (False, True), (None, 30.0))
    ]


def deterministic() -> list[Cell]:
    """The cost of ``deterministic_backward``, a separate peer, ``memeff_deterministic``."""
    cells = [
        _constant_size("deterministic", length, dim, causal=causal)
        for dim, length, causal in itertools.product((64, 128), (2048, 4096, 8192), (False, True))
    ]
    cells += [_constant_size("deterministic", 4096, dim, bias=True) for dim in (64, 128)]
    return cells + [
        Cell("deterministic", 4, 4096, 4096, 32, 32 // group, dim, dim, causal=True)
        for dim, group in itertools.product((64, 128), (4, 8))
    ]


def memory() -> list[Cell]:
    """A bias that is broadcast over a large batch, and a head dim far too large for registers."""
    return [
        _square("memory", 32, 2048, 8, 64, bias=True),
        _square("memory", 1, 2048, 4, 4096),
    ]


def varlen() -> list[Cell]:
    """16384 tokens in packed sequences: of equal lengths, and of lengths up to 64 times apart."""
    mixed = tuple(length for length in (64, 128, 256, 512, 1024, 2048, 4096) for _ in range(2))
    mixed += (64,) * 2
    return [
        Cell("varlen", 1, 16384, 16384, heads, heads, dim, dim, causal=causal, sequences=sequences)
        for (heads, dim), causal, sequences in itertools.product(
            ((32, 64), (16, 128)), (False, True), ((2048,) * 8, mixed)
        )
    ]


def masks() -> list[Cell]:
    """Masks that are arrays: sorted documents, and blocks or elements, a quarter of them true."""
    return [
        _constant_size("masks", 8192, 128, documents=8),
        _constant_size("masks", 8192, 128, mask_block=256),
        *(_constant_size("masks", 8192, dim, mask_block=1) for dim in (64, 128, 256)),
    ]


def dims() -> list[Cell]:
    """Head dims beyond the main grid: H ≠ Hv, dims that fill a tile and dims that do not."""
    others = (32, 40, 48, 72, 80, 88, 96, 112, 160, 192, 224)
    return [
        *(Cell("dims", 2, 4096, 4096, 32, 32, 192, 128, causal=causal) for causal in (False, True)),
        _square("dims", 2, 4096, 32, 80, causal=True),
        *(_square("dims", 2, 4096, 32, dim) for dim in others),
    ]


def large_dims() -> list[Cell]:
    """Head dims above 256: global layers of Gemma, and latent attention without a cache."""
    return [
        Cell("large_dims", 2, 4096, 4096, 8, 8, dim, min(dim, value_dim), causal=causal)
        for (dim, value_dim), causal in itertools.product(
            ((320, 320), (512, 512), (576, 512), (1024, 1024)), (False, True)
        )
    ]


def float32() -> list[Cell]:
    """Single precision."""
    return [
        _constant_size("float32", length, dim, dtype="float32")
        for dim, length in itertools.product((64, 128), (2048, 4096))
    ]


def functions() -> list[Cell]:
    """Functions of scores and masks, each compared with a plain call (``memeff_plain``)."""
    rows: list[dict[str, Any]] = [
        {"function": "identity"},
        {"function": "alibi"},
        {"function": "alibi", "causal": True},
        {"function": "soft cap", "soft_cap": 30.0},
        {"function": "table"},
    ]
    masks: list[dict[str, Any]] = [
        {"function": "documents", "documents": 8},
        {"function": "window", "window": 1024, "causal": True},
    ]
    return [
        _constant_size("functions", length, dim, **row)
        for dim in (64, 128)
        for length, selected in ((4096, rows + masks), (16384, masks))
        for row in selected
    ]


def cpu() -> list[Cell]:
    """Decode steps and training of a size for a CPU, which runs the path in plain JAX."""
    return [
        Cell("cpu", 8, 1, 4096, 8, 8, 64, 64, gradients=False),
        Cell("cpu", 8, 1, 4096, 8, 8, 64, 64, gradients=False, valid_keys=100),
        Cell("cpu", 8, 1, 4096, 32, 8, 128, 128, gradients=False),
        _square("cpu", 1024, 16, 4, 64),
        _square("cpu", 1024, 16, 4, 64, dtype="float32"),
        _square("cpu", 2, 512, 8, 64, dtype="float32", bias=True),
        _square("cpu", 2, 1024, 8, 64, causal=True),
        _square("cpu", 1, 2048, 8, 64, dtype="float32", causal=True),
        _square("cpu", 1, 1024, 8, 64, dtype="float32", causal=True, window=128),
        _square("cpu", 1, 1024, 8, 64, dtype="float32", mask_block=128),
    ]


def gallery() -> list[Cell]:
    """Every example of examples/gallery, compared with a call without the function or mask."""
    from user_functions.in_jax import ENTRIES, PREFIX

    cell = _constant_size("gallery", 4096, 128)
    return [
        dataclasses.replace(
            cell,
            function=f"{PREFIX}{entry.name}",
            causal=entry.is_causal,
            query_length=entry.rows or cell.query_length,
        )
        for entry in ENTRIES.values()
        if entry.has_kernels
    ]


def tiny_functions() -> list[Cell]:
    """Every function of ``functions``, in problems small enough for a CPU."""
    sizes = {"batch": 2, "query_length": 96, "key_length": 96, "heads": 2, "key_heads": 2}
    sizes |= {"head_dim": 16, "value_dim": 16}
    return [
        dataclasses.replace(cell, **sizes, dtype="float32", window=cell.window and 16)
        for cell in functions()
        if (cell.head_dim, cell.query_length) == (64, 4096)
    ]


SETS = {
    function.__name__: function
    for function in (
        tiny,
        small,
        quick,
        main,
        gqa,
        decode,
        features,
        pairs,
        window,
        softcap,
        varlen,
        masks,
        dims,
        large_dims,
        float32,
        deterministic,
        memory,
        functions,
        gallery,
        cpu,
        tiny_functions,
    )
}


def cells(names: str) -> list[Cell]:
    """The cells of a comma-separated list of sets, each cell once.

    >>> len(cells("main,quick"))
    24
    """
    selected: dict[Cell, None] = {}
    for name in names.split(","):
        if name not in SETS:
            raise ValueError(f"unknown set of cells {name!r}: expected some of {', '.join(SETS)}")
        selected |= dict.fromkeys(SETS[name]())
    return list(selected)
