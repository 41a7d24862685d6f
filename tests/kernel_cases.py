"""The calls that the kernels are tested with: one table for GPU tests and for what they compile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import packing

from jax_memeff import dropout
from jax_memeff.mask import Mask
from jax_memeff.options import DropoutState, Operands, Options, Position, Wants


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and features of one call; ``lengths`` are (query, key) pairs, one per batch element."""

    B: int = 2
    T: int = 65
    S: int = 65
    N: int = 2
    K: int = 2
    H: int = 64
    Hv: int | None = None
    dtype: str = "bfloat16"
    mask: Mask = dataclasses.field(default_factory=Mask)
    mask_name: str = "full"
    scale: float | None = None
    soft_cap: float | None = None
    lse_gradient: bool = True
    lengths: tuple[tuple[int, int], ...] | None = None
    bias: str | None = None
    """A letter of "BNTS" for each full dim and 1 for each broadcast one: "1NTS"."""
    bias_dtype: str | None = None
    segments: int = 0
    boolean: tuple[str, ...] = ()
    block: int | None = None
    """Boolean masks, and ids that are not sorted, stay the same in blocks of so many positions."""
    dropout: float = 0.0
    precision: Literal["tf32x3", "tf32"] = "tf32x3"
    position: tuple[int, int] | None = None
    packed: bool = False
    """The sequences that ``lengths`` names stand one after the other, with gaps between them."""

    def __str__(self) -> str:
        words = [
            f"B{self.B}T{self.T}S{self.S}N{self.N}K{self.K}H{self.H}v{self.value_dim}",
            self.dtype,
            self.mask_name,
        ]
        words += ["softcap"] if self.soft_cap else []
        words += [f"scale{self.scale:g}"] if self.scale is not None else []
        words += ["packed" if self.packed else "lengths"] if self.lengths else []
        words += [f"bias{self.bias}{self.bias_dtype or ''}"] if self.bias else []
        words += [f"{self.segments}segments"] if self.segments else []
        words += [f"mask{dims}" for dims in self.boolean]
        words += [f"blocks{self.block}"] if self.block else []
        words += [f"dropout{self.dropout:g}"] if self.dropout else []
        words += [self.precision] if self.precision != "tf32x3" else []
        words += [f"at{self.position[0]}x{self.position[1]}"] if self.position else []
        return "-".join(words)

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def full_mask(self) -> Mask:
        if self.lengths is None:
            return self.mask
        query, key = (jnp.array(x, jnp.int32) for x in zip(*self.lengths, strict=True))
        return self.mask & Mask.lengths(query, key)

    @property
    def options(self) -> Options:
        scale = self.H**-0.5 if self.scale is None else self.scale
        threshold = dropout.threshold(self.dropout)
        return Options(
            scale=scale,
            soft_cap=self.soft_cap,
            dropout_threshold=threshold,
            precision=self.precision,
        )

    @property
    def wants(self) -> Wants:
        """What a backward kernel computes; the gradient of a bias per row needs none."""
        return Wants(True, True, True, bias=self.bias is not None and self.bias[3] == "S")

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(1 if dim == "1" else getattr(self, dim) for dim in dims)

    def arrays(self, seed: int = 0) -> tuple[Operands, Any, Any]:
        """Operands, dout and dlse (or None), NumPy in the case's dtype, all finite."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)

        def draw(*shape, dtype: Any = dtype) -> Any:
            return rng.standard_normal(shape, np.float32).astype(dtype)

        operands = Operands(
            draw(self.B, self.T, self.N, self.H),
            draw(self.B, self.S, self.K, self.H),
            draw(self.B, self.S, self.K, self.value_dim),
            None if self.bias is None else self.draw_bias(rng),
            self.full_mask & self.element_mask(rng),
            None,
            None if self.position is None else self.global_position,
        )
        if self.dropout:
            operands = operands._replace(dropout=self.draw_dropout(rng))
        dout = draw(self.B, self.T, self.N, self.value_dim)
        dlse = draw(self.B, self.T, self.N, dtype=np.float32) if self.lse_gradient else None
        return operands, dout, dlse

    @property
    def global_position(self) -> Position:
        first: Any = np.array(self.position, np.int32)
        return Position(first[0], first[1])

    def draw_dropout(self, rng: np.random.Generator) -> DropoutState:
        words: Any = rng.integers(2**32, size=(self.B, 2), dtype=np.uint32)
        batch_base: Any = np.arange(self.B, dtype=np.uint32) * np.uint32(self.N)
        head_index: Any = np.arange(self.N, dtype=np.uint32)
        return DropoutState(words, batch_base, head_index)

    def draw_bias(self, rng: np.random.Generator) -> Any:
        """Normal numbers, and -inf (or what counts as it) in some elements and in whole rows."""
        bias = rng.standard_normal(self.shape(self.bias or ""), np.float32)
        bias[rng.random(bias.shape) < 0.02] = -np.inf
        bias[rng.random(bias.shape[:3]) < 0.04] = -np.inf
        if (dtype := jnp.dtype(self.bias_dtype or self.dtype)) != np.float16:
            bias[rng.random(bias.shape) < 0.02] = -2e38
        return bias.astype(dtype)

    def element_mask(self, rng: np.random.Generator) -> Mask:
        mask = Mask()
        for index in range(self.segments):
            # Sorted ids first, with negative ones among them, then ids in no order.
            ids = [
                self.in_blocks(rng.integers(-1, 3, size=(self.B, length)).astype(np.int32))
                for length in (self.T, self.S)
            ]
            mask &= Mask.segments(*(ids if index else map(np.sort, ids)))
        for dims in self.boolean:
            probability = 0.3 if self.block else 0.8
            drawn = rng.random(self.shape(dims)) < probability
            mask &= Mask.boolean(self.in_blocks(self.in_blocks(drawn), axis=2))
        return mask

    def in_blocks(self, array: Any, axis: int = -1) -> Any:
        """The array with the first of each ``block`` elements along ``axis`` in their place."""
        if self.block is None or array.shape[axis] == 1:
            return array
        position = np.arange(array.shape[axis])
        return np.take(array, position - position % self.block, axis)


CAUSAL = {"mask": Mask.causal(), "mask_name": "causal"}
BOTTOM_RIGHT = {"mask": Mask.causal("bottom_right"), "mask_name": "bottom_right"}
WINDOW = {"mask": Mask.window(40, 17), "mask_name": "window"}
BOTH_WINDOWS = {
    "mask": Mask.window(33, None, "bottom_right") & Mask.window(None, 50),
    "mask_name": "two_windows",
}
MASKS = ({}, CAUSAL, BOTTOM_RIGHT, WINDOW, BOTH_WINDOWS)

ODD_SIZES = (
    (1, 1),
    (1, 3),
    (3, 1),
    (63, 65),
    (64, 64),
    (65, 63),
    (127, 129),
    (128, 128),
    (129, 127),
    (255, 257),
    (257, 255),
    (1023, 1025),
    (1025, 1023),
    (40, 700),
    (700, 40),
)
HEAD_DIMS = (
    (64, 64),
    (128, 128),
    (96, 96),
    (256, 256),
    (192, 128),
    (8, 8),
    (32, 32),
    (40, 72),
    (72, 40),
    (80, 80),
    (136, 24),
    (24, 200),
    (248, 256),
)
ODD_HEAD_DIMS = (
    (1, 1),
    (7, 7),
    (100, 100),
    (66, 72),
    (36, 250),
    (255, 33),
)
"""Rows that begin at multiples of 2, 4 and 8 bytes."""
WIDE_HEAD_DIMS = ((264, 264), (320, 320), (512, 64), (72, 520), (301, 299), (1000, 1000))
"""Above what accumulators hold: in steps and chunks of columns."""

BIASES = ("BNTS", "1NTS", "B1TS", "11TS", "BN1S", "B11S", "1N1S", "111S", "BNT1", "1NT1", "1111")
BOOLEANS = (("BNTS",), ("11TS",), ("B11S",), ("1N1S", "B1T1"))
GROUPS = ((2, 2), (4, 2), (3, 1), (8, 1), (6, 2))


def _element_cases() -> list[Case]:
    """Bias, element masks and dropout: every value alone, and some together."""
    found = []
    for bias in BIASES:
        found += [Case(T=130, S=150, bias=bias), Case(T=201, S=77, bias=bias, **CAUSAL)]
        found += [Case(T=77, S=201, H=128, bias=bias, bias_dtype="float32")]
        found += [Case(T=64, S=129, N=4, bias=bias, dtype="float16", soft_cap=2.0)]
        found += [Case(T=200, S=270, bias=bias, lengths=((200, 270), (33, 100)), **BOTTOM_RIGHT)]
        # Rows of 16-byte multiples: other copies than those of the odd sizes above.
        found += [Case(T=150, S=200, bias=bias), Case(T=200, S=136, N=4, K=2, bias=bias, **CAUSAL)]
        found += [Case(T=77, S=264, H=128, bias=bias, bias_dtype="float32", **WINDOW)]
        found += [Case(T=130, S=144, bias=bias, soft_cap=2.0, lengths=((77, 144), (130, 9)))]
    for T, S in ODD_SIZES:
        found += [Case(T=T, S=S, bias="BNTS", **WINDOW), Case(T=T, S=S, bias="1NTS", dropout=0.1)]
    for H, Hv in HEAD_DIMS:
        found += [Case(T=150, S=130, H=H, Hv=Hv, bias="1NTS", dropout=0.2)]
    for dropout_rate in (0.1, 0.5, 0.9):
        for mask in MASKS:
            found += [Case(T=200, S=270, dropout=dropout_rate, **mask)]
        found += [Case(T=130, S=150, N=4, H=128, dropout=dropout_rate, position=(48, 160))]
    for segments in (1, 2):
        for mask in MASKS:
            found += [Case(T=200, S=270, segments=segments, **mask)]
        found += [Case(T=65, S=257, N=6, H=128, segments=segments, lengths=((65, 257), (40, 0)))]
        # Tiles without a valid element, and with valid ones only.
        found += [Case(T=700, S=650, segments=segments, block=90), Case(T=530, S=777, segments=2)]
        found += [Case(T=400, S=2300, N=4, segments=segments, block=70, bias="BNTS", **CAUSAL)]
        found += [Case(T=2200, S=300, K=1, H=128, segments=segments, block=64, dropout=0.2)]
    for boolean in BOOLEANS:
        for mask in MASKS:
            found += [Case(T=270, S=201, boolean=boolean, **mask)]
        found += [Case(T=129, S=64, N=4, H=128, boolean=boolean, dtype="float16")]
        found += [Case(T=600, S=720, N=4, K=2, boolean=boolean, block=64, bias="BNTS")]
        found += [Case(T=300, S=2500, H=128, boolean=boolean, block=150, **WINDOW)]
        found += [Case(T=2500, S=300, boolean=boolean, segments=1, block=80)]
        lengths = ((350, 500), (512, 77))
        found += [Case(T=512, S=512, boolean=boolean, block=128, lengths=lengths, **CAUSAL)]
    return found


def _packed_cases() -> list[Case]:
    """Packed sequences: alone, with each other feature, and with draws of all together."""
    sequences = ((200, 270), (0, 100), (77, 0), (1, 1), (130, 33))
    packed = functools.partial(Case, B=5, T=200, S=270, lengths=sequences, packed=True)
    found = [packed(H=H, **mask) for H in (64, 128) for mask in MASKS]
    found += [packed(soft_cap=2.0, **mask) for mask in MASKS]
    found += [packed(H=H, Hv=Hv, **CAUSAL) for H, Hv in HEAD_DIMS + ODD_HEAD_DIMS]
    found += [packed(N=N, K=K, dtype="float16") for N, K in GROUPS]
    found += [packed(bias=bias, **BOTTOM_RIGHT) for bias in BIASES]
    found += [packed(bias=bias, H=128, dropout=0.2) for bias in BIASES]
    found += [packed(segments=segments, **mask) for segments in (1, 2) for mask in MASKS]
    found += [packed(boolean=boolean, **WINDOW) for boolean in BOOLEANS]
    found += [packed(dropout=0.1, position=(48, 160), **WINDOW), packed(lse_gradient=False)]
    found += [packed(B=1, lengths=((200, 270),)), packed(B=2, lengths=((0, 0), (0, 0)))]
    rng = np.random.default_rng(2)
    for _ in range(60):
        B, N, K = int(rng.integers(1, 7)), *GROUPS[rng.integers(len(GROUPS))]
        T, S = ODD_SIZES[rng.integers(len(ODD_SIZES))]
        H, Hv = HEAD_DIMS[rng.integers(len(HEAD_DIMS))]
        lengths = rng.integers(0, (T + 1, S + 1), (B, 2)) * (rng.random((B, 2)) < 0.9)
        found.append(
            Case(
                B=B,
                T=T,
                S=S,
                N=N,
                K=K,
                H=H,
                Hv=Hv,
                dtype=str(rng.choice(["bfloat16", "float16"])),
                soft_cap=5.0 if rng.random() < 0.3 else None,
                lengths=tuple((int(query), int(key)) for query, key in lengths),
                packed=True,
                bias=str(rng.choice(BIASES)) if rng.random() < 0.4 else None,
                segments=int(rng.choice([0, 0, 0, 1])),
                boolean=BOOLEANS[rng.integers(4)] if rng.random() < 0.2 else (),
                dropout=float(rng.choice([0.0, 0.0, 0.1])),
                **MASKS[rng.integers(len(MASKS))],
            )
        )
    return found


FEW_QUERIES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17)
LONG_KEYS = (1, 63, 513, 2049, 5000)


def split_cases() -> list[Case]:
    """Few queries and long keys, every feature with several sizes."""
    found = []
    for index, T in enumerate(FEW_QUERIES):
        S = LONG_KEYS[index % len(LONG_KEYS)]
        for N, K in ((2, 2), (3, 1), (8, 2), (8, 1)):
            found += [Case(T=T, S=S, N=N, K=K), Case(T=T, S=2 * S + 1, N=N, K=K, H=128, **CAUSAL)]
            found += [Case(T=T, S=4097, N=N, K=K, **BOTTOM_RIGHT)]
        found += [Case(T=T, S=3001, N=8, K=2, H=128, dtype="float16", soft_cap=2.0)]
        found += [Case(T=T, S=3001, N=8, K=2, lengths=((T, 3001), (T // 2, 77)), **BOTTOM_RIGHT)]
        found += [Case(T=T, S=3001, N=8, K=2, lengths=((T, 0), (0, 3000)), H=128)]
        found += [Case(T=T, S=1500, N=8, K=2, **mask) for mask in (WINDOW, BOTH_WINDOWS)]
        found += [Case(T=T, S=1501, N=8, K=2, bias=bias) for bias in ("1NTS", "B11S", "BNT1")]
        found += [Case(T=T, S=1501, N=8, K=2, dropout=0.3, position=(16, 48))]
        found += [Case(T=T, S=1501, N=8, K=2, segments=2), Case(T=T, S=999, boolean=("B11S",))]
    for H, Hv in HEAD_DIMS:
        found += [Case(T=5, S=1025, N=8, K=4, H=H, Hv=Hv), Case(T=20, S=1025, H=H, Hv=Hv, **CAUSAL)]
    found += [Case(B=3, T=1, S=70000, N=4, K=1, H=128), Case(B=1, T=64, S=9999, N=1, K=1)]
    found += [Case(T=2, S=600, N=8, K=2, scale=scale) for scale in (-0.3, 0.0)]
    return found


def _f32_cases() -> list[Case]:
    """Every feature and head dim in f32, whose tiles, fragments and sums are others."""
    found = []
    f32 = functools.partial(Case, dtype="float32")
    for T, S in ODD_SIZES:
        found += [f32(T=T, S=S, **WINDOW), f32(T=T, S=S, H=128, N=4, bias="1NTS", dropout=0.1)]
    for H, Hv in HEAD_DIMS + ODD_HEAD_DIMS:
        found += [f32(T=130, S=150, H=H, Hv=Hv), f32(T=150, S=130, H=H, Hv=Hv, **CAUSAL)]
        found += [f32(T=150, S=130, H=H, Hv=Hv, bias="BN1S", dropout=0.2, soft_cap=3.0, **WINDOW)]
        found += [f32(T=150, S=130, H=H, Hv=Hv, precision="tf32")]
    for mask in MASKS:
        found += [f32(T=200, S=270, soft_cap=2.0, **mask), f32(T=200, S=270, segments=2, **mask)]
        found += [f32(T=200, S=270, dropout=0.5, lengths=((200, 270), (0, 100)), **mask)]
        found += [f32(T=200, S=270, H=128, boolean=("BNTS",), lengths=((77, 0), (3, 1)), **mask)]
        found += [f32(T=200, S=270, H=128, dropout=0.1, precision="tf32", **mask)]
    for bias in BIASES:
        found += [f32(T=201, S=77, bias=bias), f32(T=77, S=201, H=128, bias=bias, **CAUSAL)]
    for N, K in GROUPS:
        found += [f32(T=130, S=150, N=N, K=K, **BOTTOM_RIGHT)]
    for scale in (-0.3, 0.0, 2.5):
        found += [f32(T=100, S=90, scale=scale, **CAUSAL)]
    found += [f32(T=130, S=150, dropout=0.3, position=(48, 160)), f32(lse_gradient=False)]
    return found


def cases() -> list[Case]:
    """Every value of every factor, and 100 seeded draws of all factors together."""
    found = []
    for H, Hv in ODD_HEAD_DIMS + WIDE_HEAD_DIMS:
        found += [Case(T=130, S=150, H=H, Hv=Hv), Case(T=1025, S=257, H=H, Hv=Hv, **CAUSAL)]
        found += [Case(T=65, S=129, N=4, H=H, Hv=Hv, dtype="float16", **WINDOW)]
        found += [Case(T=200, S=270, H=H, Hv=Hv, lengths=((77, 0), (200, 131)), soft_cap=2.0)]
        found += [Case(T=129, S=77, N=6, H=H, Hv=Hv, segments=1, dropout=0.2)]
        found += [Case(T=77, S=129, H=H, Hv=Hv, boolean=("B11S",))]
    for H, Hv in ODD_HEAD_DIMS:
        found += [Case(T=77, S=129, H=H, Hv=Hv, bias=bias) for bias in ("1NTS", "BN1S", "BNT1")]
    for T, S in ODD_SIZES:
        found += [Case(T=T, S=S, H=320), Case(T=T, S=S, H=300, **BOTTOM_RIGHT)]
    for mask in MASKS:
        found += [Case(T=700, S=650, N=4, K=2, H=320, Hv=280, **mask)]
        found += [Case(T=300, S=400, H=512, lengths=((300, 20), (0, 390)), **mask)]
        found += [Case(T=270, S=300, H=264, dropout=0.1, soft_cap=2.0, **mask)]
    for boolean in BOOLEANS:
        found += [Case(T=150, S=300, H=264, boolean=boolean, segments=2)]
    found += [Case(T=257, S=385, H=4096), Case(B=1, T=129, S=140, N=1, K=1, H=16384)]
    # Tensor cores round sums towards zero: 65536 terms leave the logsumexp an error of 1e-4.
    found += [Case(B=1, T=129, S=140, N=1, K=1, H=65536, lse_gradient=False)]
    found += [Case(T=300, S=129, H=4095, dtype="float16", **CAUSAL)]
    for T, S in ODD_SIZES:
        found += [Case(T=T, S=S), Case(T=T, S=S, H=128, **CAUSAL)]
        found += [Case(T=T, S=S, **BOTTOM_RIGHT)]
    for H, Hv in HEAD_DIMS:
        found += [Case(T=130, S=150, H=H, Hv=Hv), Case(T=150, S=130, H=H, Hv=Hv, **CAUSAL)]
    for mask in MASKS:
        found += [Case(T=200, S=270, **mask), Case(T=270, S=200, dtype="float16", **mask)]
        found += [Case(T=200, S=270, soft_cap=2.0, **mask)]
    for N, K in GROUPS:
        found += [Case(T=130, S=150, N=N, K=K, **CAUSAL), Case(T=130, S=150, N=N, K=K, H=128)]
    for lengths in (((200, 270), (0, 100)), ((77, 0), (3, 1)), ((130, 128), (129, 63))):
        for mask in MASKS:
            found += [Case(T=200, S=270, lengths=lengths, **mask)]
    for scale in (-0.3, 0.0, 2.5):
        found += [Case(T=100, S=90, scale=scale, **CAUSAL), Case(T=100, S=90, scale=scale)]
    found += [Case(T=100, S=90, scale=-0.4, soft_cap=1.5), Case(lse_gradient=False)]

    found += _element_cases() + _packed_cases() + _f32_cases()
    found += split_cases()

    rng = np.random.default_rng(1)
    for _ in range(100):
        T, S = ODD_SIZES[rng.integers(len(ODD_SIZES))]
        dims = HEAD_DIMS + ODD_HEAD_DIMS + WIDE_HEAD_DIMS
        H, Hv = dims[rng.integers(len(dims))]
        N, K = GROUPS[rng.integers(len(GROUPS))]
        lengths = None
        if rng.random() < 0.3:
            drawn = rng.integers(0, (T + 1, S + 1), (2, 2))
            lengths = tuple((int(query), int(key)) for query, key in drawn)
        found.append(
            Case(
                T=T,
                S=S,
                N=N,
                K=K,
                H=H,
                Hv=Hv,
                dtype=str(rng.choice(["bfloat16", "float16"])),
                soft_cap=5.0 if rng.random() < 0.3 else None,
                lse_gradient=bool(rng.random() < 0.5),
                lengths=lengths,
                bias=None if max(H, Hv) > 256 or rng.random() > 0.4 else str(rng.choice(BIASES)),
                bias_dtype="float32" if rng.random() < 0.3 else None,
                segments=int(rng.choice([0, 0, 0, 1, 2])),
                boolean=BOOLEANS[rng.integers(4)] if rng.random() < 0.2 else (),
                dropout=float(rng.choice([0.0, 0.0, 0.1, 0.5])),
                position=(32, 16) if rng.random() < 0.2 else None,
                **MASKS[rng.integers(len(MASKS))],
            )
        )
    return found


def poisoned(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """The same arrays with NaN beyond the lengths."""
    if case.lengths is None:
        return operands, dout, dlse
    query, key, value, dout = (np.array(x) for x in (*operands[:3], dout))
    bias = None if operands.bias is None else np.array(operands.bias)
    if bias is not None:
        longest = tuple(map(max, zip(*case.lengths, strict=True)))
        for b in range(len(bias)):
            query_length, key_length = longest if len(bias) == 1 else case.lengths[b]
            if bias.shape[2] > 1:
                bias[b, :, query_length:] = np.nan
            if bias.shape[3] > 1:
                bias[b, :, :, key_length:] = np.nan
    dlse = None if dlse is None else np.array(dlse)
    for b, (query_length, key_length) in enumerate(case.lengths):
        for array in (query, dout) if dlse is None else (query, dout, dlse):
            array[b, query_length:] = np.nan
        for array in (key, value):
            array[b, key_length:] = np.nan
    return operands._replace(query=query, key=key, value=value, bias=bias), dout, dlse


def passed(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """What the call of a case is given: poisoned beyond the lengths, and packed if it says so."""
    dirty = poisoned(case, operands, dout, dlse)
    return packing.packed(case, *dirty) if case.packed else dirty


def run_case(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple:
    """The results of :func:`run` in the shapes of the arrays of the case."""
    arrays, *cotangents = passed(case, operands, dout, dlse)
    results = run(arrays, case.options, *cotangents)
    return packing.unpacked(case, results) if case.packed else results


def run(operands: Operands, options: Options, dout: Any, dlse: Any) -> tuple:
    """(out, lse), (dq, dk, dv, dbias) of one jitted program; dbias is None without a bias."""
    from jax_memeff import vjp

    operands, dout, dlse = jax.tree.map(jnp.asarray, (operands, dout, dlse))
    return _run(operands, options, dout, dlse, vjp.attention)


@functools.partial(jax.jit, static_argnums=(1, 4))
def _run(operands, options, dout, dlse, attention):
    def forward(query, key, value, bias):
        inputs = operands._replace(query=query, key=key, value=value, bias=bias)
        out, lse = attention(inputs, options)
        return (out, lse) if dlse is not None else out

    results, transpose = jax.vjp(forward, *operands[:4])
    gradients = transpose(dout if dlse is None else (dout, dlse))
    out, lse = results if dlse is not None else (results, None)
    return (out, lse), gradients
