"""The test calls of the kernels: one table for the GPU tests and for the kernels to compile."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from attention_case import Case

from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import NeedsGrad

CAUSAL = {"mask": Mask.causal(), "mask_name": "causal"}
BOTTOM_RIGHT = {"mask": Mask.causal("bottom_right"), "mask_name": "bottom_right"}
WINDOW = {"mask": Mask.window(40, 17), "mask_name": "window"}
BOTH_WINDOWS = {
    "mask": Mask.window(33, None, "bottom_right") & Mask.window(None, 50),
    "mask_name": "two_windows",
}
MASKS = ({}, CAUSAL, BOTTOM_RIGHT, WINDOW, BOTH_WINDOWS)

_QUERIES = (1, 1, 3, 63, 64, 65, 127, 128, 129, 255, 257, 1023, 1025, 40, 700)
_KEYS = (1, 3, 1, 65, 64, 63, 129, 128, 127, 257, 255, 1025, 1023, 700, 40)
ODD_SIZES = tuple(zip(_QUERIES, _KEYS, strict=True))
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
"""Head dims whose rows begin at multiples of 2, 4 and 8 bytes."""
LARGE_HEAD_DIMS = ((264, 264), (320, 320), (512, 64), (72, 520), (301, 299), (1000, 1000))
"""Head dims that accumulators cannot hold: kernels use steps and column chunks."""

BIASES = ("BNTS", "1NTS", "B1TS", "11TS", "BN1S", "B11S", "1N1S", "111S", "BNT1", "1NT1", "1111")
SUMMED_BIASES = ("1NTS", "B1TS", "11TS", "BN1S", "B11S", "1N1S", "111S")
"""Biases whose gradient sums over several CTAs, or over the heads of one CTA."""
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
        # Rows of 16-byte multiples use other copies than the odd sizes above.
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


def _head_dim_32_cases() -> list[Case]:
    """Features at head dim 32, which has more tiles on Hopper than other head dims."""
    found, case = [], functools.partial(Case, T=270, S=200, N=4, K=2, H=32)
    for mask in MASKS:
        found += [case(bias="1NTS", **mask), case(bias="BN1S", bias_dtype="float32", **mask)]
        found += [case(dropout=0.2, bias="1NTS", soft_cap=2.0, **mask)]
        found += [case(segments=1, **mask), case(boolean=("BNTS",), bias="11TS", **mask)]
        found += [case(segments=2, dropout=0.2, sinks=True, **mask)]
        found += [case(soft_cap=2.0, lengths=((270, 200), (33, 100)), **mask)]
        found += [Case(B=9, T=256, S=200, N=8, H=32, bias="1NTS", **mask)]
    return found


def _two_kernel_bias_cases() -> list[Case]:
    """A bias in the two-kernel backward of Hopper; both kernels read it."""
    found = []
    sequences = ((200, 264), (0, 100), (77, 0), (1, 1), (130, 33))
    for bias in ("BNTS", "1NTS", "BN1S", "BNT1"):
        wide = functools.partial(Case, T=200, S=264, N=4, K=2, H=256, bias=bias)
        found += [wide(**CAUSAL), wide(S=201, **WINDOW), wide(bias_dtype="float32", dropout=0.2)]
        found += [wide(H=192, Hv=128, dropout=0.2), wide(T=65, S=1040, dtype="float16")]
        found += [wide(soft_cap=2.0, lengths=((77, 264), (130, 9)))]
        found += [wide(segments=1, boolean=("BNTS",), block=64, **CAUSAL)]
        found += [wide(B=5, lengths=sequences, packed=True, **BOTTOM_RIGHT)]
    return found


def _packed_cases() -> list[Case]:
    """Packed sequences: alone, and with each other feature."""
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
    found += [packed(H=H, Hv=Hv, **WINDOW) for H, Hv in LARGE_HEAD_DIMS]
    found += [packed(H=264, N=4, K=2, bias="BNTS", dropout=0.2)]
    return found


def _hopper_large_dim_cases() -> list[Case]:
    """Clusters of CTAs that share or divide the work: the padded head dims, and each feature."""
    found = []
    dims = ((320, 320), (384, 384), (448, 448), (512, 512), (576, 512), (264, 512), (576, 8))
    for H, Hv in (*dims, (600, 584), (768, 768), (1024, 1024), (648, 1000)):
        of = functools.partial(Case, H=H, Hv=Hv)
        found += [of(T=T, S=S) for T, S in ((64, 64), (65, 129), (128, 192), (129, 1000))]
        found += [of(T=700, S=650, N=4, K=2, **mask) for mask in MASKS]
        found += [of(T=300, S=400, dtype="float16", N=8, K=1, row_maxima=True, **BOTTOM_RIGHT)]
        found += [of(T=300, S=400, sinks=True, lengths=((300, 20), (0, 390)), **CAUSAL)]
        found += [of(T=300, S=400, N=4, K=2, soft_cap=2.0, segments=1, **CAUSAL)]
        lengths = ((200, 270), (0, 100), (77, 0), (1, 1), (130, 33))
        found += [of(B=5, T=200, S=270, lengths=lengths, packed=True, soft_cap=2.0, **WINDOW)]
    for features in ({"segments": 2}, {"boolean": ("BNTS",)}, {"bias": "BNT1"}):
        found += [Case(T=300, S=400, N=4, K=2, H=512, **features, **CAUSAL)]
    of = functools.partial(Case, T=300, S=2000, scale=1.0, row_maxima=True)
    found += [of(H=H, sign=sign) for H in (512, 1024) for sign in (1, -1)]
    found += [Case(B=6, T=150, S=200, N=4, K=2, H=H, shared=SHARED_KEYS) for H in (512, 800)]
    return [*found, Case(B=40, T=300, S=300, N=4, K=4, H=320, **CAUSAL)]


def _head_split_cases() -> list[Case]:
    """Several CTAs of a Hopper backward divide the query heads that share a KV block."""
    found = [Case(B=6, T=400, S=300, N=8, K=1, shared=SHARED_KEYS, **CAUSAL)]
    for H, N, K in ((64, 8, 1), (64, 32, 2), (128, 16, 2), (96, 12, 3), (128, 24, 1), (40, 10, 1)):
        of = functools.partial(Case, T=700, S=650, N=N, K=K, H=H)
        found += [of(**CAUSAL), of(dropout=0.2, soft_cap=2.0, **BOTTOM_RIGHT)]
        found += [of(bias="1NTS", sinks=True, **CAUSAL), of(position=(48, 160), **CAUSAL)]
        found += [of(lengths=((700, 20), (0, 650)), **CAUSAL), of(B=1, T=129, S=1025)]
    return found


FEW_QUERIES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17)
LONG_KEYS = (1, 63, 513, 2049, 5000)


def split_cases() -> list[Case]:
    """Few queries and long keys: every feature with several sizes."""
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
        # Splits with a block mask; some of them have no valid block.
        found += [Case(T=5, S=1500, N=8, K=4, H=H, Hv=Hv, boolean=("BN1S",), block=128)]
        found += [Case(T=40, S=1500, H=H, Hv=Hv, segments=2, block=150, **CAUSAL)]
    found += [Case(B=3, T=1, S=70000, N=4, K=1, H=128), Case(B=1, T=64, S=9999, N=1, K=1)]
    found += [Case(T=2, S=600, N=8, K=2, scale=scale) for scale in (-0.3, 0.0)]
    return found


def _f32_cases() -> list[Case]:
    """Every feature and head dim in f32, which has other tiles, fragments and sums."""
    found = []
    f32 = functools.partial(Case, dtype="float32")
    for T, S in ODD_SIZES:
        found += [f32(T=T, S=S, **WINDOW), f32(T=T, S=S, H=128, N=4, bias="1NTS", dropout=0.1)]
    for H, Hv in HEAD_DIMS + ODD_HEAD_DIMS:
        found += [f32(T=130, S=150, H=H, Hv=Hv), f32(T=150, S=130, H=H, Hv=Hv, **CAUSAL)]
        found += [f32(T=150, S=130, H=H, Hv=Hv, bias="BN1S", dropout=0.2, soft_cap=3.0, **WINDOW)]
        found += [f32(T=150, S=130, H=H, Hv=Hv, precision="tf32")]
    for H, Hv in LARGE_HEAD_DIMS:
        found += [f32(T=130, S=270, H=H, Hv=Hv), f32(T=270, S=130, N=4, H=H, Hv=Hv, **CAUSAL)]
        found += [f32(T=150, S=270, H=H, Hv=Hv, bias="1NTS", dropout=0.2, soft_cap=3.0, **WINDOW)]
        found += [f32(T=150, S=130, H=H, Hv=Hv, precision="tf32")]
        lengths = ((130, 33), (0, 200), (150, 270))
        found += [f32(B=3, T=150, S=270, H=H, Hv=Hv, bias="BN1S", lengths=lengths, packed=True)]
    found += [f32(B=1, T=129, S=140, N=1, K=1, H=16384), f32(T=100, S=4100, H=264)]
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


SHARED_KEYS = (("key", 2, 1), ("value", 3, 2))


def _shared_cases() -> list[Case]:
    """Arrays that a vmap broadcasts, each with its own divisor, in every kernel."""
    found = []
    shared = functools.partial(Case, B=6, T=150, S=200, N=4, K=2)
    for H, Hv in ((64, 64), (128, 128), (192, 128), (256, 256), (264, 264), (66, 40)):
        found += [
            shared(H=H, Hv=Hv, shared=SHARED_KEYS),
            shared(H=H, Hv=Hv, shared=(("key", 1, 1),)),
        ]
        every = (*SHARED_KEYS, ("bias", 3, 1), ("boolean", 2, 3))
        found += [shared(H=H, Hv=Hv, bias="BNTS", boolean=("B1TS",), dropout=0.2, shared=every)]
    for bias in (bias for bias in BIASES if bias[0] == "B"):
        for deterministic in (False, True):
            case = shared(bias=bias, shared=(("bias", 2, 3),), deterministic=deterministic)
            found += [case, dataclasses.replace(case, H=128, shared=(*SHARED_KEYS, ("bias", 3, 1)))]
            sums = functools.partial(shared, bias=bias, deterministic=deterministic)
            found += [sums(H=128, shared=(("bias", 2, 3),), bias_gradient=3)]
            for H, together in ((64, 1), (64, 2), (264, 3)):
                found += [sums(H=H, shared=(("bias", 1, 1),), bias_gradient=together)]
        found += [shared(bias=bias, dtype="float32", shared=(*SHARED_KEYS, ("bias", 3, 2)))]
        lengths = ((150, 200), (0, 100), (77, 0), (1, 1), (130, 33), (64, 128))
        bias_alone = (("bias", 3, 2),)
        found += [shared(bias=bias, lengths=lengths, packed=True, shared=bias_alone, **CAUSAL)]
        found += [shared(T=5, S=1501, bias=bias, shared=(*SHARED_KEYS, ("bias", 3, 1)))]
    for mask in MASKS:
        found += [shared(boolean=("BNTS", "1N1S"), shared=(("boolean", 3, 1),), **mask)]
        found += [shared(segments=1, dropout=0.1, shared=SHARED_KEYS, **mask)]
        found += [shared(T=1, S=3001, N=8, K=1, H=128, shared=SHARED_KEYS, **mask)]
    return found


def dropout_cases() -> list[Case]:
    """Dropout with all elements valid, on tiles of every shape, without grouped heads."""
    found = []
    case = functools.partial(Case, T=200, S=136, dropout=0.3, position=(48, 160), scale=1.0)
    for H in (32, 64, 96, 128, 256, 264):
        found += [case(H=H), case(H=H, soft_cap=3.0)]
    for H in (64, 128):
        lengths = ((200, 136), (77, 100), (0, 5))
        found += [case(B=3, H=H, lengths=lengths), case(B=3, H=H, lengths=lengths, packed=True)]
        found += [case(H=H, dtype="float32"), case(H=H, dtype="float32", precision="tf32")]
        found += [case(H=H, bias="1NTS"), case(H=H, bias="BNTS", bias_dtype="float32")]
        found += [case(S=200, H=H, projections=True), case(H=H, dtype="float16")]
        # Few rows, which split the keys, and rows that see every key despite their mask.
        found += [case(T=3, H=H), case(T=40, H=H)]
        found += [case(H=H, mask=Mask.window(400, 400), mask_name="wide_window")]
        found += [dataclasses.replace(case(H=H, **CAUSAL), position=(192, 48))]
    return found


def deterministic_cases() -> list[Case]:
    """Every way to sum gradients in an order, with every mask."""
    found = []
    for mask in MASKS:
        found += [Case(T=300, S=333, N=6, H=128, **mask), Case(T=513, S=385, **mask)]
        found += [Case(T=300, S=333, lengths=((211, 333), (0, 100)), **mask)]
        found += [Case(B=1, T=1100, S=1300, N=8, dropout=0.2, segments=1, **mask)]
        found += [Case(T=333, S=300, N=4, bias=bias, **mask) for bias in BIASES]
    for H, Hv in HEAD_DIMS:
        found += [Case(T=150, S=280, H=H, Hv=Hv, bias="1NTS"), Case(T=150, S=280, H=H, Hv=Hv)]
    found += [Case(T=300, S=200, N=4, bias=bias, dropout=0.3, soft_cap=3.0) for bias in BIASES]
    lengths = ((100, 150), (333, 20), (0, 200))
    for bias in (None, *SUMMED_BIASES):
        found += [Case(B=3, T=333, S=200, bias=bias, lengths=lengths, dtype="float16")]
        found += [Case(B=3, T=333, S=200, bias=bias, lengths=lengths, packed=True, **CAUSAL)]
        found += [Case(T=130, S=150, bias=bias, dtype="float32", dropout=0.2, **WINDOW)]
    for H, Hv in LARGE_HEAD_DIMS[:3] + ODD_HEAD_DIMS[:3]:
        found += [Case(T=130, S=150, H=H, Hv=Hv), Case(T=130, S=150, N=4, H=H, Hv=Hv, **CAUSAL)]
        found += [Case(T=130, S=150, N=4, H=H, Hv=Hv, bias=bias) for bias in SUMMED_BIASES[:3]]
        found += [Case(B=3, T=333, S=200, H=H, Hv=Hv, bias="11TS", lengths=lengths, packed=True)]
        found += [Case(T=130, S=150, H=H, Hv=Hv, bias="1NTS", dtype="float32", soft_cap=2.0)]
    return [dataclasses.replace(case, deterministic=True) for case in found]


def frozen_cases() -> list[tuple[Case, NeedsGrad]]:
    """Each case with every proper subset of its gradients; each subset has its own kernels."""
    dims = ((64, 64), (128, 128), (192, 128), (256, 256), (320, 320))
    plain = [Case(T=200, S=150, N=4, K=2, H=H, Hv=Hv, **CAUSAL) for H, Hv in dims]
    plain.append(dataclasses.replace(plain[0], dtype="float32"))
    biased = [dataclasses.replace(case, bias="1NTS", dropout=0.2) for case in plain[:2]]
    choices = [
        NeedsGrad(query, key, value, bias)
        for query, key, value, bias in itertools.product((False, True), repeat=4)
    ]
    return [
        (case, needs_grad)
        for case in (*plain, *biased)
        for needs_grad in choices
        if any(needs_grad)
        and needs_grad != case.needs_grad
        and needs_grad.bias <= case.needs_grad.bias
    ]


def cases() -> list[Case]:
    """Every value of every feature; ``case_matrix.py`` has their combinations."""
    found = []
    for H, Hv in ODD_HEAD_DIMS + LARGE_HEAD_DIMS:
        found += [Case(T=130, S=150, H=H, Hv=Hv), Case(T=1025, S=257, H=H, Hv=Hv, **CAUSAL)]
        found += [Case(T=65, S=129, N=4, H=H, Hv=Hv, dtype="float16", **WINDOW)]
        found += [Case(T=200, S=270, H=H, Hv=Hv, lengths=((77, 0), (200, 131)), soft_cap=2.0)]
        found += [Case(T=129, S=77, N=6, H=H, Hv=Hv, segments=1, dropout=0.2)]
        found += [Case(T=77, S=129, H=H, Hv=Hv, boolean=("B11S",))]
        found += [Case(T=77, S=129, H=H, Hv=Hv, bias=bias) for bias in ("1NTS", "BN1S", "BNT1")]
    for T, S in ODD_SIZES:
        found += [Case(T=T, S=S, H=320), Case(T=T, S=S, H=300, **BOTTOM_RIGHT)]
    for mask in MASKS:
        found += [Case(B=9, T=197, S=197, N=8, dropout=rate, **mask) for rate in (0.0, 0.2)]
        found += [Case(T=700, S=650, N=4, K=2, H=320, Hv=280, **mask)]
        found += [Case(T=300, S=400, H=512, lengths=((300, 20), (0, 390)), **mask)]
        found += [Case(T=270, S=300, H=264, dropout=0.1, soft_cap=2.0, **mask)]
        found += [Case(T=270, S=300, H=264, bias="1NTS", dropout=0.1, soft_cap=2.0, **mask)]
    for bias in BIASES:
        found += [Case(T=150, S=300, N=4, K=2, H=264, bias=bias)]
    for boolean in BOOLEANS:
        found += [Case(T=150, S=300, H=264, boolean=boolean, segments=2)]
    found += [Case(T=257, S=385, H=4096), Case(B=1, T=129, S=140, N=1, K=1, H=16384)]
    found += [Case(B=1, T=129, S=140, N=1, K=1, H=65536)]
    found += [Case(T=300, S=129, H=4095, dtype="float16", **CAUSAL)]
    for H, dtype, sign in itertools.product(
        (64, 128, 256, 320), ("bfloat16", "float16", "float32"), (1, -1)
    ):
        found += [Case(T=200, S=700, N=4, H=H, dtype=dtype, sign=sign)]
    # Consumer groups with a 32-bit bias take the most shared memory of all kernels.
    for features in ({}, WINDOW, {"soft_cap": 2.0}, {"dropout": 0.2}, {"position": (160, 128)}):
        bias = {"bias": "1NTS", "bias_dtype": "float32", **features}
        found += [Case(T=20, S=77, dtype=dtype, **bias) for dtype in ("bfloat16", "float16")]
        found += [Case(T=200, S=570, H=128, **bias)]
    # More KV blocks than those that are ordered by work.
    found += [Case(B=40, T=140, S=150, N=8, K=8, **CAUSAL)]
    for T, S in ODD_SIZES:
        found += [Case(T=T, S=S), Case(T=T, S=S, H=128, **CAUSAL)]
        found += [Case(T=T, S=S, **BOTTOM_RIGHT)]
    for H, Hv in HEAD_DIMS:
        found += [Case(T=130, S=150, H=H, Hv=Hv), Case(T=150, S=130, H=H, Hv=Hv, **CAUSAL)]
    for mask in MASKS:
        found += [Case(T=200, S=270, **mask), Case(T=270, S=200, dtype="float16", **mask)]
        found += [Case(T=200, S=270, soft_cap=2.0, **mask)]
    # Arguments of tanh below and above 1, and caps with and without maxima.
    for H, dtype in itertools.product((64, 128, 256), ("bfloat16", "float16")):
        found += [Case(T=200, S=270, H=H, dtype=dtype, soft_cap=30.0, **CAUSAL)]
        found += [Case(T=700, S=650, H=H, dtype=dtype, soft_cap=30.0, scale=2.0)]
        found += [
            Case(T=200, S=270, H=H, dtype=dtype, soft_cap=100.0, scale=scale) for scale in (0.1, 9)
        ]
    for N, K in GROUPS:
        found += [Case(T=130, S=150, N=N, K=K, **CAUSAL), Case(T=130, S=150, N=N, K=K, H=128)]
    for lengths in (((200, 270), (0, 100)), ((77, 0), (3, 1)), ((130, 128), (129, 63))):
        for mask in MASKS:
            found += [Case(T=200, S=270, lengths=lengths, **mask)]
    for scale in (-0.3, 0.0, 2.5):
        found += [Case(T=100, S=90, scale=scale, **CAUSAL), Case(T=100, S=90, scale=scale)]
    found += [Case(T=100, S=90, scale=-0.4, soft_cap=1.5), Case(lse_gradient=False)]

    found += _element_cases() + _head_dim_32_cases() + _two_kernel_bias_cases()
    found += _packed_cases() + _f32_cases()
    found += split_cases() + deterministic_cases() + _shared_cases()
    found += _hopper_large_dim_cases() + _head_split_cases()
    return found
