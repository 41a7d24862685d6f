"""The calls and machines of test_emulated.py."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import emulator
import pytest
import test_kernels
from attention_case import Case, passed
from kernel_cases import BOTTOM_RIGHT, CAUSAL, SHARED_KEYS, WINDOW

from jax_memeff.codegen.spec import KernelSpec


@dataclasses.dataclass(frozen=True)
class Run:
    """A case on a machine. With ``splits`` kernels may split the keys."""

    case: Case
    arch: str = "sm_80"
    seed: int = 0
    multiprocessors: int = 3
    splits: bool = False
    gradients: bool = True
    unattended: bool = False
    """Whether tiles of keys and values to which no row attends are NaN."""

    def __str__(self) -> str:
        return f"{self.arch}-{self.case}-seed{self.seed}"

    def start(self) -> None:
        """Turns this process into the machine. Runs in the process of ``machine``."""
        emulator.configure(self.arch, multiprocessors=self.multiprocessors, seed=self.seed)

    @contextlib.contextmanager
    def strategy(self) -> Iterator[None]:
        """Splits keys only if the run asks for it, because most cases are small enough to split."""
        with contextlib.nullcontext() if self.splits else test_kernels.without_splits():
            yield

    def kernels(self) -> list[KernelSpec]:
        """The kernels that :func:`results` needs, so that the machine can compile several at a
        time.
        """
        operands, _, _ = passed(self.case, *self.case.arrays(None))
        directions = (None, self.case.needs_grad) if self.gradients else (None,)
        with pytest.MonkeyPatch.context() as patch, self.strategy():
            patch.setenv("JAX_MEMEFF_ARCHS", self.arch)
            found = [
                test_kernels.kernels_of(operands, self.case.options, needs) for needs in directions
            ]
        return [spec for specs in found for spec in specs.values()]


def on_three_schedules(case: Case, **options: Any) -> list[Run]:
    return [Run(case, seed=seed, **options) for seed in range(3)]


LENGTHS = ((130, 150), (77, 33), (0, 150))
EVERYTHING = Case(
    B=3,
    T=130,
    S=150,
    H=66,
    Hv=40,
    dtype="float16",
    soft_cap=2.0,
    lengths=LENGTHS,
    bias="1NTS",
    segments=1,
    boolean=("B11S",),
    dropout=0.2,
    **WINDOW,
)
# Ids in blocks are unsorted; sorted ids include negative ones.
IN_TILES: Any = {"segments": 2, "block": 128, "bias": "1NTS", "mask_seed": 13}
MAPPED = (
    Case(T=400, S=530, N=4, K=2, lengths=((400, 530), (77, 390)), **IN_TILES, **BOTTOM_RIGHT),
    Case(T=300, S=390, N=3, K=1, boolean=("BN1S", "1NT1"), block=128, bias="BNTS", dropout=0.2),
)
# Batch indices whose gradients are summed read the same bias.
SHARED = (*SHARED_KEYS, ("bias", 3, 2), ("boolean", 2, 3))
SUMMED = functools.partial(Case, B=6, shared=SHARED, bias_gradient=2)
PACKED = ((300, 700), (77, 33), (0, 150))
LONG_PACKED = ((600, 570), (600, 60), (500, 0))
# Packed sequences with tiles of none, some or all valid elements.
IN_BLOCKS: Any = {"B": 3, "T": 300, "S": 700, "lengths": PACKED, "packed": True, "block": 64}
PACKED_BLOCKS = [
    Run(Case(**{**IN_BLOCKS, **features}), arch=arch)
    for arch, features in (
        ("sm_90a", {"segments": 1, "deterministic": True, **CAUSAL}),
        ("sm_90a", {"H": 256, "boolean": ("BN1S",)}),
        ("sm_80", {"segments": 2, "boolean": ("1NTS",), "deterministic": True}),
        ("sm_80", {"segments": 1, "bias": "1NTS", **WINDOW}),
    )
]
# More sequences than a warp has lanes, of lengths far apart.
MANY = tuple((7 * i % 40, 13 * i % 60) for i in range(69))
OF_MANY: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("sm_90a", (*MANY, (300, 400)), {}),
    ("sm_90a", ((300, 400), *MANY), {"deterministic": True, **BOTTOM_RIGHT}),
    ("sm_80", (*MANY[:9], (300, 400), *MANY[9:]), {"deterministic": True}),
    ("sm_80", ((300, 400), *MANY), CAUSAL),
)
BY_TOKENS = [
    Run(Case(B=70, T=300, S=400, lengths=lengths, packed=True, **features), arch, seed)
    for seed, (arch, lengths, features) in enumerate(OF_MANY)
]
SM80 = [
    *on_three_schedules(Case(B=1, T=200, S=150, N=4, K=2, **CAUSAL)),
    *on_three_schedules(EVERYTHING),
    Run(Case(B=2, T=70, S=90, dtype="float32", bias="BN1S", lengths=((70, 90), (33, 50)))),
    Run(Case(B=1, T=70, S=150, N=2, K=1, H=264, **CAUSAL)),
    Run(Case(B=3, T=130, S=150, H=264, bias="1NTS", lengths=LENGTHS, packed=True)),
    Run(Case(B=1, T=70, S=150, N=2, K=1, H=257, dtype="float32", **CAUSAL), arch="sm_86"),
    Run(Case(B=2, T=70, S=90, N=2, K=1, H=264, bias="11TS", deterministic=True, **WINDOW)),
    Run(Case(B=1, T=70, S=90, N=4, K=2, H=128, dtype="float16", **CAUSAL), arch="sm_75"),
    Run(Case(B=3, T=130, S=150, H=128, lengths=LENGTHS, packed=True, **BOTTOM_RIGHT)),
    Run(Case(B=1, T=5, S=700, N=4, K=1, **BOTTOM_RIGHT), splits=True, gradients=False),
    Run(
        Case(B=2, T=5, S=900, N=4, K=2, segments=1, boolean=("BN1S",), block=128),
        splits=True,
        gradients=False,
    ),
    Run(SUMMED(T=70, S=90, bias="BNTS", boolean=("B1TS",), dropout=0.2)),
    Run(Case(B=6, T=70, S=90, N=2, K=1, H=264, shared=SHARED_KEYS)),
    Run(Case(B=6, T=5, S=500, K=1, shared=SHARED_KEYS), splits=True, gradients=False),
]
# A bias of one number per row is applied where rows end: in the forward, or in the combine kernel
# if keys are split. Some rows have no keys, and some lie beyond the lengths.
ROWS = ((5, 700), (3, 400), (0, 700), (5, 0))
SM80 += [
    Run(Case(B=4, T=5, S=S, N=4, K=1, bias=bias, lengths=lengths), splits=True, gradients=False)
    for S, bias, lengths in ((700, "BNT1", ROWS), (60, "1NT1", ((5, 60), (3, 40), (0, 60), (5, 0))))
]
SM80 += [
    Run(Case(B=3, T=130, S=150, H=264, bias="1NT1", lengths=((130, 150), (77, 0), (0, 150)))),
    Run(Case(B=3, T=130, S=150, N=2, K=1, bias="BNT1", lengths=LENGTHS)),
]
SINKS = functools.partial(Case, sinks=True)
SM80 += [
    Run(SINKS(B=3, T=130, S=150, N=4, K=2, lengths=LENGTHS, dropout=0.2, **CAUSAL)),
    Run(SINKS(B=3, T=130, S=150, bias="BNT1", lengths=LENGTHS, packed=True)),
    Run(SINKS(B=3, T=130, S=150, H=264, soft_cap=2.0, lengths=((130, 150), (77, 0), (0, 150)))),
    Run(SINKS(B=4, T=5, S=700, N=4, K=1, lengths=ROWS), splits=True, gradients=False),
    Run(SINKS(B=4, T=5, S=700, N=4, K=1, bias="BNT1", lengths=ROWS), splits=True, gradients=False),
    Run(SINKS(B=1, T=5, S=60, N=4, K=1), splits=True, gradients=False),
]
# Rows without keys, with and without a sink.
MAXIMA = functools.partial(Case, row_maxima=True)
EMPTY = ((130, 150), (77, 0), (0, 150))
SM80 += [
    Run(MAXIMA(B=3, T=130, S=150, N=4, K=2, bias="BNT1", sinks=True, lengths=EMPTY, **CAUSAL)),
    Run(MAXIMA(B=3, T=130, S=150, H=264, bias="11TS", sinks=True, lengths=EMPTY)),
    Run(MAXIMA(B=3, T=130, S=150, dropout=0.2, lengths=LENGTHS, packed=True, **WINDOW)),
    # Scores of a standard deviation of 8: maxima rise by more than the slack of a reference.
    Run(MAXIMA(B=1, T=130, S=500, scale=1.0)),
]
# At head dim 256 two warps share rows of the forward.
SM80 += on_three_schedules(
    MAXIMA(
        B=3, T=130, S=150, H=256, N=4, K=2, soft_cap=2.0, sinks=True, dropout=0.2, lengths=LENGTHS
    )
)
SM80 += [
    Run(MAXIMA(B=1, T=130, S=500, H=250, Hv=200, scale=1.0)),
    Run(Case(B=3, T=130, S=150, H=256, segments=1, lengths=LENGTHS, packed=True, **CAUSAL)),
]
# Backwards with one tile of queries; without a bias warps at head dim 256 divide S and dP.
ONE_TILE = functools.partial(Case, B=2, T=230, S=150, N=4, K=2, lengths=LENGTHS[:2])
SM80 += [
    Run(ONE_TILE(H=256, segments=1, deterministic=True, **WINDOW), seed=1),
    Run(ONE_TILE(H=256, bias="1NTS", dropout=0.2), seed=2),
    Run(ONE_TILE(H=256, Hv=128, **CAUSAL)),
    Run(ONE_TILE(H=128, dtype="float32", deterministic=True, **CAUSAL), seed=1),
    Run(ONE_TILE(H=96, bias="1NTS", **CAUSAL), arch="sm_86", seed=2),
    Run(ONE_TILE(H=128, soft_cap=2.0, segments=1, deterministic=True), arch="sm_86"),
]
# The other GPUs with 99 KB. Those from sm_90 on add four floats at a time to sums in global memory.
SMALL = functools.partial(Case, B=1, T=130, S=150, N=2, K=1)
SM80 += [
    Run(case, arch, seed)
    for seed, case in enumerate(
        (
            SMALL(**CAUSAL),
            SMALL(H=128, soft_cap=2.0, deterministic=True),
            SMALL(B=2, bias="1NTS", dropout=0.2, **WINDOW),
            SMALL(B=2, H=128, bias="111S", deterministic=True),
            SMALL(H=256, **CAUSAL),
            SMALL(B=2, dtype="float32", bias="1NTS", deterministic=True),
        )
    )
    for arch in ("sm_89", "sm_120")
]
SM80 += [
    Run(Case(B=1, T=5, S=700, N=4, K=1, H=128), arch, splits=True, gradients=False)
    for arch in ("sm_89", "sm_120")
]
SM80 += [Run(case, seed=3, unattended=True) for case in MAPPED]
SM90 = [
    *on_three_schedules(
        Case(B=2, T=300, S=270, N=4, K=2, **CAUSAL), arch="sm_90a", multiprocessors=2
    ),
    Run(Case(B=1, T=300, S=200, H=128, dropout=0.2, soft_cap=3.0, **WINDOW), arch="sm_90a"),
    Run(Case(B=1, T=200, S=300, H=192, Hv=128, soft_cap=3.0, segments=1), arch="sm_90a"),
    Run(Case(B=1, T=200, S=270, N=2, K=1, H=256, dropout=0.2), arch="sm_90a", multiprocessors=1),
    Run(Case(B=3, T=130, S=150, H=128, lengths=LENGTHS, packed=True, **CAUSAL), arch="sm_90a"),
    *PACKED_BLOCKS,
    *BY_TOKENS[:2],
    *(Run(Case(B=2, T=300, S=940, N=2, H=H), "sm_90a", 1, multiprocessors=5) for H in (88, 128)),
    Run(Case(B=3, T=130, S=150, lengths=LENGTHS, bias="1NTS", segments=1), arch="sm_90a"),
    Run(Case(B=2, T=200, S=150, N=4, H=128, boolean=("1NTS",), segments=2), arch="sm_90a"),
]
# Backwards with persistent CTAs, which divide 16 to 32 KV blocks. Some of those have no query.
SM90 += [
    Run(case, arch="sm_90a", seed=multiprocessors, multiprocessors=multiprocessors)
    for multiprocessors, case in zip(
        (17, 3, 2, 5),
        (
            Case(B=3, T=120, S=400, N=4, K=2, lengths=((120, 400), (70, 380), (90, 129))),
            Case(B=3, T=260, S=400, lengths=((260, 400), (0, 150), (77, 33))),
            Case(B=2, T=300, S=400, H=40, dtype="float16", **WINDOW),
            Case(B=2, T=150, S=400, H=56, N=4, lengths=((150, 130), (90, 400))),
        ),
        strict=True,
    )
]
CONSUMER_GROUPS = [
    Run(case, arch="sm_90a", seed=2, multiprocessors=2, splits=True, gradients=False)
    for case in (
        Case(B=1, T=200, S=570, N=2, K=1, **CAUSAL),
        Case(B=3, T=130, S=450, H=128, bias="1NTS", dropout=0.2, lengths=LENGTHS, **WINDOW),
        Case(B=3, T=130, S=450, bias="BNT1", lengths=((130, 450), (77, 0), (0, 450))),
        SINKS(B=3, T=130, S=450, lengths=((130, 450), (77, 0), (0, 450))),
    )
]
# Two tiles of 128 rows, or one of 256, where the plain tile has 192; each tile of head dim 32.
FILLING = functools.partial(Case, B=9, T=197, S=197, N=8)
NARROW = functools.partial(Case, B=3, T=200, S=152, H=32, lengths=LENGTHS)
SM90 += [
    Run(case, "sm_90a", splits=case.T == 197, gradients=False)
    for case in (
        FILLING(**CAUSAL),
        FILLING(K=2),
        FILLING(H=32, bias="1NTS", dropout=0.2, **CAUSAL),
        FILLING(H=32, K=4, segments=1, soft_cap=2.0),
        NARROW(bias="1NTS", dropout=0.2, **CAUSAL),
        NARROW(**WINDOW),
        NARROW(segments=1, **CAUSAL),
        NARROW(boolean=("BN1S",), segments=1, dropout=0.2, **WINDOW),
    )
]
# Apart from the others: all of them take long, and neighbours run on the same day.
SM90 += BY_TOKENS[2:]
SM90 += [
    Run(SINKS(B=2, T=200, S=150, N=4, K=2, deterministic=True, **CAUSAL), arch="sm_90a"),
    Run(SINKS(B=2, T=130, S=150, H=128, bias="1NT1", lengths=LENGTHS[:2]), arch="sm_90a"),
    Run(SINKS(B=1, T=130, S=150, N=2, K=1, H=256), arch="sm_90a"),
]
SM90 += [
    Run(MAXIMA(B=2, T=200, S=300, N=4, K=2, sinks=True, **CAUSAL), arch="sm_90a"),
    Run(MAXIMA(B=1, T=140, S=570, sign=-1, dtype="float16"), arch="sm_90a", gradients=False),
    Run(MAXIMA(B=1, T=140, S=570, sign=1, soft_cap=2.0), arch="sm_90a", gradients=False),
    Run(MAXIMA(B=3, T=130, S=152, H=128, lengths=LENGTHS, packed=True), arch="sm_90a"),
    Run(MAXIMA(B=1, T=130, S=300, dtype="float32"), arch="sm_90a", gradients=False),
    Run(MAXIMA(B=1, T=200, S=600, scale=1.0, **CAUSAL), arch="sm_90a"),
]
CONSUMER_GROUPS += [
    Run(case, "sm_90a", seed=2, multiprocessors=2, splits=True, gradients=False)
    for case in (
        MAXIMA(B=3, T=130, S=450, sinks=True, lengths=((130, 450), (77, 0), (0, 450))),
        MAXIMA(B=1, T=130, S=900, scale=1.0),
        # Few rows, whose keys are split without the maxima.
        MAXIMA(B=1, T=5, S=700, N=4, K=1),
    )
]
SM90 += [
    Run(case, "sm_90a", seed=3, multiprocessors=1, gradients=not case.dropout, unattended=True)
    for case in MAPPED
]
SM90.append(
    Run(
        dataclasses.replace(MAPPED[0], N=2, K=1, H=256, bias=None, mask_seed=4),
        "sm_90a",
        seed=3,
        unattended=True,
    )
)
SM90 += [
    Run(case, arch="sm_90a", seed=1, multiprocessors=2)
    for case in (
        Case(B=1, T=200, S=570, dtype="float16", sign=-1),
        Case(B=1, T=140, S=570, H=128, sign=1),
        Case(B=3, T=200, S=152, H=128, bias="1NTS", dropout=0.2, lengths=LENGTHS, **CAUSAL),
        Case(B=2, T=140, S=200, K=1, bias="11TS", bias_dtype="float32", soft_cap=2.0, **WINDOW),
        Case(B=3, T=130, S=152, bias="BNTS", lengths=LENGTHS, packed=True),
        Case(B=2, T=140, S=152, K=1, H=256, Hv=24, bias="1NTS", dropout=0.2, lengths=LENGTHS[:2]),
        SUMMED(T=140, S=150, N=2, bias="B1TS", boolean=("B11S",), **CAUSAL),
        Case(B=6, T=140, S=150, K=1, H=256, bias="BNTS", shared=(*SHARED_KEYS, ("bias", 3, 1))),
        Case(B=6, T=70, S=150, bias="BNTS", shared=(("bias", 1, 1),), bias_gradient=1),
    )
]
FLOAT32 = [
    Run(dataclasses.replace(case, dtype="float32"), "sm_90a", seed, gradients=case.bias is None)
    for seed, case in enumerate(
        (
            Case(B=2, T=300, S=270, N=4, K=2, **CAUSAL),
            Case(B=3, T=200, S=150, N=3, K=1, H=100, Hv=68, dropout=0.2, lengths=LENGTHS),
            Case(B=3, T=130, S=150, H=128, lengths=LENGTHS, packed=True, **BOTTOM_RIGHT),
            Case(B=1, T=140, S=570, H=128, bias="1NTS", soft_cap=2.0, segments=1, **WINDOW),
            *MAPPED[:1],
            Case(B=2, T=200, S=270, N=3, K=1, soft_cap=2.0, boolean=("BN1S", "1NT1"), block=128),
            Case(B=3, T=300, S=700, Hv=128, lengths=PACKED, packed=True, segments=1, block=64),
        )
    )
]
FLOAT32 += on_three_schedules(
    Case(B=1, T=330, S=200, N=2, K=1, H=128, dtype="float32"), arch="sm_90a"
)
# The kernel for large head dims, in column chunks.
FLOAT32 += [Run(Case(T=70, S=40, H=200, dtype="float32", deterministic=True), "sm_90a")]
# Head dims above 256: one and several row tiles, an even or odd number of KV blocks, and tiles
# without rows or without keys.
LARGE = functools.partial(Case, B=1, H=512, K=1)
SHARED_MASK = (*SHARED_KEYS, ("boolean", 2, 3))
LARGE_DIMS = [
    *on_three_schedules(LARGE(T=130, S=300, **CAUSAL), arch="sm_90a", gradients=False),
    Run(LARGE(T=300, S=150), "sm_90a", gradients=False),
    *(
        Run(case, "sm_90a", seed, multiprocessors=1 + seed % 3, gradients=case.packed)
        for seed, case in enumerate(
            (
                LARGE(T=70, S=64),
                LARGE(T=64, S=150, H=320, N=3, dtype="float16", **BOTTOM_RIGHT),
                LARGE(T=200, S=130, H=384, **WINDOW),
                LARGE(T=65, S=200, H=576, Hv=512, N=4, K=2, **CAUSAL),
                LARGE(T=70, S=90, H=440, Hv=264, N=1, soft_cap=2.0, row_maxima=True),
                LARGE(B=3, T=130, S=150, lengths=EMPTY, segments=1, sinks=True),
                LARGE(B=3, T=130, S=150, H=264, lengths=LENGTHS, packed=True, sinks=True),
                LARGE(B=3, T=130, S=150, H=320, lengths=LENGTHS, packed=True, **BOTTOM_RIGHT),
                LARGE(B=6, T=70, S=90, N=1, H=320, boolean=("B1TS",), shared=SHARED_MASK),
                LARGE(B=3, T=200, S=152, H=320, position=((160, 0, 48), (128, 16, 0)), **CAUSAL),
                LARGE(T=130, S=500, H=320, N=1, bias="1NT1", scale=1.0, row_maxima=True),
            )
        )
    ),
]
# Their backward: clusters whose last rows are beyond the tensors, without rows, without keys, or
# with one block.
LARGE_GRADIENTS = [
    *on_three_schedules(LARGE(T=130, S=200, N=2, **CAUSAL), arch="sm_90a"),
    *on_three_schedules(LARGE(T=65, S=200, N=1, H=1024, **CAUSAL), arch="sm_90a"),
    *(
        Run(case, "sm_90a", seed, multiprocessors=1 + seed % 3)
        for seed, case in enumerate(
            (
                LARGE(T=64, S=64, N=1, H=320),
                LARGE(T=300, S=150, N=4, K=2, H=320, dtype="float16", **BOTTOM_RIGHT),
                LARGE(T=70, S=130, H=384, soft_cap=2.0, **WINDOW),
                LARGE(T=65, S=200, N=2, H=576, Hv=512, **CAUSAL),
                LARGE(T=140, S=90, N=1, H=576, Hv=512, soft_cap=2.0),
                LARGE(T=140, S=90, N=2, H=600, Hv=584, soft_cap=2.0),
                LARGE(B=2, T=70, S=90, N=1, H=1024, Hv=8, lengths=((70, 20), (0, 60)), packed=True),
                LARGE(T=70, S=90, H=440, Hv=264, N=1, scale=-0.1),
                LARGE(B=3, T=130, S=150, H=320, lengths=EMPTY, segments=1, sinks=True),
                LARGE(B=3, T=130, S=150, N=4, K=2, lengths=LENGTHS, packed=True, **CAUSAL),
                LARGE(B=3, T=200, S=152, H=320, position=((160, 0, 48), (128, 16, 0)), **CAUSAL),
                LARGE(B=6, T=70, S=90, N=1, H=320, boolean=("B1TS",), shared=SHARED_MASK),
                LARGE(T=130, S=300, H=320, N=1, bias="1NT1"),
            )
        )
    ),
]
# Each batch index has its own positions, so that some rows see every KV block and others few or
# none.
EACH: Any = {"B": 3, "T": 200, "S": 152, "position": ((160, 0, 48), (128, 16, 0))}
POSITIONS = [
    Run(Case(**{**EACH, **features}), arch, seed=2, multiprocessors=2)
    for arch, features in (
        ("sm_80", {"N": 4, "K": 2, "lengths": LENGTHS, **CAUSAL}),
        ("sm_80", {"dropout": 0.2, "lengths": LENGTHS, "packed": True, **WINDOW}),
        ("sm_80", {"bias": "1NTS", "deterministic": True, "boolean": ("B11S",), **WINDOW}),
        ("sm_80", {"N": 2, "K": 1, "H": 264, "bias": "11TS", "dropout": 0.2, **BOTTOM_RIGHT}),
        ("sm_90a", {"N": 4, "K": 2, **CAUSAL}),
        ("sm_90a", {"H": 128, "dropout": 0.2, "lengths": LENGTHS, "packed": True, **CAUSAL}),
        ("sm_90a", {"K": 1, "H": 256, "bias": "1NTS", "dropout": 0.2, **WINDOW}),
        ("sm_90a", {"bias": "11TS", "segments": 1, "lengths": LENGTHS, **BOTTOM_RIGHT}),
    )
]
POSITIONS += [
    Run(Case(**{**EACH, **features}), arch, seed=3, multiprocessors=2, splits=True, gradients=False)
    for arch, features in (
        ("sm_80", {"T": 5, "S": 700, "N": 4, "K": 1, **BOTTOM_RIGHT}),
        ("sm_90a", {"S": 570, "K": 1, "dropout": 0.2, **CAUSAL}),
        ("sm_90a", {"dtype": "float32", **WINDOW}),
    )
]
DETERMINISTIC = [
    Run(dataclasses.replace(case, deterministic=True), arch=arch)
    for arch, case in (
        ("sm_80", Case(B=1, T=70, S=400, N=2, K=1, dtype="float32", **BOTTOM_RIGHT)),
        ("sm_86", Case(T=70, S=150, N=3, K=1, dtype="float32", bias="11TS", dropout=0.2)),
        (
            "sm_80",
            Case(B=3, T=130, S=150, dtype="float32", bias="1N1S", lengths=LENGTHS, packed=True),
        ),
        # CTAs process Q blocks that their neighbours in semaphore order skip.
        ("sm_80", Case(B=1, T=200, S=900, dtype="float32", boolean=("BNTS",), block=64)),
        ("sm_90a", Case(B=1, T=100, S=500, N=2, K=1, bias="1NTS", **WINDOW)),
        ("sm_90a", Case(B=3, T=150, S=140, N=4, K=2, bias="111S", bias_dtype="float32")),
        # Bits of float16 show differences of a few roundings of float32.
        ("sm_90a", Case(B=1, T=300, S=600, N=4, K=2, dtype="float16")),
        ("sm_90a", Case(B=3, T=300, S=700, H=128, dtype="float16", lengths=PACKED, packed=True)),
        ("sm_90a", Case(B=1, T=300, S=1400, H=128, dtype="float16", boolean=("1NTS",), block=128)),
        ("sm_90a", LARGE(T=140, S=300, H=320, dtype="float16", **CAUSAL)),
        # More key heads than are interleaved.
        ("sm_90a", Case(B=9, T=70, S=200, dtype="float16")),
        ("sm_90a", Case(B=9, T=400, S=300, H=128, dtype="float16", **CAUSAL)),
        ("sm_80", Case(B=9, T=200, S=300, H=64, dtype="float16", **CAUSAL)),
    )
]
# Two CTAs divide the query heads, whatever the number of multiprocessors.
DIVIDED = Case(B=9, T=590, S=130, N=14, K=1, deterministic=True, dtype="float16", **CAUSAL)
DETERMINISTIC += [Run(DIVIDED, arch="sm_90a", splits=True)]
SHARES = [
    Run(case, "sm_90a", seed=3, multiprocessors=9, splits=True)
    for case in (
        Case(B=1, T=600, S=270, N=2, K=1, **CAUSAL),
        # CTAs divide query heads, and the kernel of the bias gradient finds its keys nevertheless.
        Case(B=1, T=256, S=200, N=8, K=1, dropout=0.2, soft_cap=2.0, **CAUSAL),
        Case(B=2, T=256, S=150, N=8, K=2, H=128, bias="1NTS", lengths=((256, 150), (40, 0))),
        Case(B=6, T=256, S=150, N=4, K=1, sinks=True, shared=SHARED_KEYS, **CAUSAL),
        Case(B=3, T=600, S=570, N=8, K=1, lengths=LONG_PACKED, packed=True, **CAUSAL),
    )
]
# Lists of keys are pages of one key, for kernels with split keys, and for tiles of one row. Other
# masks are applied to the lists.
LISTED = functools.partial(Case, B=3, T=13, S=70, N=4, K=2, keys=("BKT", 9))
LISTED_PACKED: Any = {"lengths": ((13, 70), (7, 33), (0, 60)), "packed": True}
LISTS = [
    Run(case, arch, seed, 5, splits=seed % 3 != 0, gradients=case.packed or seed % 4 == 0)
    for seed, (arch, case) in enumerate(
        (arch, case)
        for case in (
            LISTED(**CAUSAL),
            LISTED(keys=("1KT", 70), H=128, soft_cap=2.0, sinks=True, **BOTTOM_RIGHT),
            LISTED(keys=("B1T", 97), K=4, dtype="float16", lengths=((13, 70), (7, 33), (0, 9))),
            LISTED(keys=("11T", 1), N=8, K=1, segments=1, boolean=("B1TS", "111S"), **WINDOW),
            LISTED(keys=("BKT", 33), sinks=True, **LISTED_PACKED, **BOTTOM_RIGHT),
            LISTED(keys=("B1T", 33), H=72, Hv=88, segments=2, boolean=("B11S",), **LISTED_PACKED),
            LISTED(N=2, dtype="float32", position=((9, 0, 64), (0, 16, 32)), **WINDOW),
            LISTED(
                B=6,
                K=1,
                shared=(("key", 2, 3), ("value", 2, 3), ("boolean", 2, 3)),
                boolean=("B1TS",),
            ),
            LISTED(B=6, K=2, shared=(("key", 2, 3), ("value", 6, 1))),
        )
        for arch in ("sm_80", "sm_90a")
    )
]
# With anything that depends on the positions of keys, and in backwards, lists are bits.
BITS = [
    Run(case, arch, seed, 3)
    for seed, (arch, case) in enumerate(
        (
            ("sm_90a", LISTED(T=70, S=150, keys=("BKT", 40), bias="1NTS", dropout=0.2)),
            ("sm_80", LISTED(T=70, S=150, keys=("1KT", 9), deterministic=True, **CAUSAL)),
            ("sm_90a", LISTED(T=130, H=128, keys=("11T", 33), boolean=("B1TS", "1N1S"))),
            ("sm_80", LISTED(keys=("B1T", 80), dropout=0.2, **LISTED_PACKED, **WINDOW)),
            ("sm_90a", LISTED(bias="BN1S", boolean=("B1TS",), sinks=True, **LISTED_PACKED)),
            (
                "sm_90a",
                LISTED(T=130, keys=("B1T", 33), position=((9, 0, 64), (0, 16, 32)), **CAUSAL),
            ),
            ("sm_80", LISTED(projections=True, K=4, S=13, dropout=0.2, segments=1)),
            ("sm_90a", LISTED(N=2, H=264, keys=("1KT", 33), bias="111S")),
            ("sm_90a", LISTED(dtype="float32", keys=("BKT", 70), bias="BNT1", row_maxima=True)),
            (
                "sm_90a",
                LISTED(
                    B=6, T=70, K=1, shared=(("key", 2, 3), ("boolean", 2, 3)), boolean=("B1TS",)
                ),
            ),
        )
    )
]
LISTS += [Run(LISTED(projections=True, K=4, S=13, sinks=True, **CAUSAL), "sm_80", splits=True)]
RUNS = (
    LISTS
    + BITS
    + SM80
    + SM90
    + CONSUMER_GROUPS
    + SHARES
    + FLOAT32
    + LARGE_DIMS
    + LARGE_GRADIENTS
    + POSITIONS
)
