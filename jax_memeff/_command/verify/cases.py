"""The calls that ``verify`` runs. Nothing here imports JAX, because the parent process reads it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal

from jax_memeff.codegen import gpu
from jax_memeff.codegen.features import (
    BIAS,
    BOOLEAN,
    DETERMINISTIC,
    DROPOUT,
    FEATURES,
    FUNCTIONS,
    MASK,
    PAGES,
    ROW_MAXIMA,
    SEGMENTS,
    SINKS,
    SOFT_CAP,
    VARLEN,
)
from jax_memeff.codegen.features.mask import NO_BOUND

MOST_SCORES = 1 << 21
"""The oracle materializes all scores, about twenty arrays of them in float64."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its sizes, and the features that differ from the defaults."""

    kind: Literal["padded", "packed", "paged"] = "padded"
    B: int = 2
    T: int = 130
    S: int = 150
    N: int = 4
    K: int = 2
    H: int = 64
    Hv: int | None = None
    dtype: str = "bfloat16"
    causal: Literal["top_left", "bottom_right"] | None = None
    window: tuple[int, int] | None = None
    """Keys to the left and to the right of the diagonal."""
    lengths: tuple[tuple[int, int], ...] | None = None
    """Query and key length of each sequence; NaN lies beyond."""
    segments: bool = False
    boolean: str = ""
    """The dims of a boolean mask, a letter of "BNTS" or 1 each: "B1TS"."""
    mask_function: str = ""
    """``"blocks"``, or the user's MODULE:NAME."""
    score_function: str = ""
    """``"alibi"`` or ``"distances"``, whose arrays have gradients, or the user's MODULE:NAME."""
    soft_cap: float | None = None
    bias: str = ""
    """The dims of the bias, as those of ``boolean``."""
    bias_dtype: str = ""
    dropout: float = 0.0
    sinks: bool = False
    max_logits: bool = False
    page_size: int = 0
    latent: bool = False
    batch_invariant: bool = False
    fast: bool = False
    """``precision="default"``: float32 is multiplied as one TF32 product."""
    deterministic: bool = False
    gradients: bool = True
    tangents: bool = False
    """Tangents of query, key and value (forward mode) instead of gradients."""

    @property
    def fits_oracle(self) -> bool:
        """Whether the oracle checks it. Others are compared with the blockwise path in float32."""
        return self.B * self.N * self.T * self.S <= MOST_SCORES

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def name(self) -> str:
        """Sizes and features without blanks, so that it can be an argument of a shell."""
        sizes = f"B{self.B}T{self.T}S{self.S}N{self.N}K{self.K}H{self.H}"
        if self.Hv is not None:
            sizes += f"v{self.Hv}"
        words = [self.kind, self.dtype, sizes]
        shown = {"kind", "dtype", "gradients", "B", "T", "S", "N", "K", "H", "Hv"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in shown or value == field.default:
                continue
            if field.name == "lengths":
                value = "_".join(f"{query}x{key}" for query, key in value)
            elif isinstance(value, tuple):
                value = "_".join(map(str, value))
            word = field.name.replace("_", "")
            words.append(word if value is True else f"{word}={value}")
        if not self.gradients and not self.tangents:
            words.append("forward")
        return "-".join(words)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Case:
        """The case with these fields, whose tuples became lists in JSON."""
        if fields.get("window"):
            fields = fields | {"window": tuple(fields["window"])}
        if fields.get("lengths"):
            fields = fields | {"lengths": tuple(map(tuple, fields["lengths"]))}
        return cls(**fields)


_LENGTHS = ((130, 150), (77, 0), (0, 90))
"""A whole sequence, one without keys, and one without queries."""
_PACKED: dict[str, Any] = {"kind": "packed", "B": 3, "lengths": ((130, 150), (33, 70), (0, 90))}
_STEPS: dict[str, Any] = {
    "kind": "paged",
    "B": 3,
    "S": 704,
    "lengths": ((5, 700), (5, 33), (5, 3)),
    "T": 5,
    "causal": "bottom_right",
    "gradients": False,
}
_DECODE: dict[str, Any] = {"T": 3, "S": 1000, "N": 8, "K": 2, "gradients": False}

_MANY: dict[str, Any] = {"B": 9, "N": 8, "K": 4}
"""So many rows that no kernel splits the keys of a row."""

_FIRST = (
    Case(**_MANY, causal="top_left"),
    Case(**_MANY, H=128, causal="top_left", deterministic=True),
    Case(dtype="float16", H=128, N=2, causal="top_left"),
    Case(**_MANY, T=70, dtype="float16", H=256),
    Case(dtype="float32", causal="top_left"),
    Case(B=3, lengths=_LENGTHS, causal="bottom_right"),
    Case(**_PACKED, causal="top_left"),
    Case(**_DECODE, B=1, causal="bottom_right"),
    Case(**_STEPS, H=128, page_size=16),
    Case(**_MANY, bias="1NTS", H=128),
    Case(**_MANY, dropout=0.1, causal="top_left"),
    Case(H=256, N=2, K=1, causal="top_left"),
    Case(score_function="alibi", causal="top_left"),
    Case(H=320, N=2, K=1, T=70, S=90),
    Case(tangents=True, gradients=False, causal="top_left"),
    Case(window=(40, 17), segments=True),
    Case(boolean="B1TS", T=201, S=77),
    Case(**_STEPS, N=16, K=1, H=576, Hv=512, page_size=64, latent=True),
    Case(mask_function="blocks", score_function="distances", H=128),
    Case(B=3, lengths=_LENGTHS, sinks=True, soft_cap=3.0),
    Case(dtype="float32", H=128, N=2, K=2, fast=True),
    Case(H=192, Hv=128, causal="top_left"),
    Case(H=32, T=257, S=255, dropout=0.5, bias="BNTS"),
    Case(**_PACKED, H=128, bias="1NTS", dropout=0.2, deterministic=True),
    Case(B=4, T=2048, S=2048, N=16, K=16, H=64, causal="top_left"),
    Case(B=4, T=2048, S=2048, N=16, K=4, H=128, causal="top_left"),
    Case(B=16, T=1, S=8192, N=32, K=8, H=128, gradients=False),
)
"""Each family of kernels, then combinations; the last ones are large enough to be timed."""


def _others() -> list[Case]:
    """What only ``--all`` runs: odd sizes, dtypes and head dims, each feature with others."""
    found = [
        Case(T=T, S=S, H=H, causal=causal)
        for (T, S), H in itertools.product(
            ((1, 1), (3, 65), (63, 64), (128, 129), (257, 255), (700, 40)), (64, 128)
        )
        for causal in (None, "bottom_right")
    ]
    for dtype, H in itertools.product(
        ("float16", "bfloat16", "float32"), (7, 8, 40, 66, 72, 80, 96, 100, 136, 160, 248)
    ):
        found.append(Case(dtype=dtype, H=H, causal="top_left"))
    found += [Case(H=H, Hv=Hv, N=2, K=1) for H, Hv in ((40, 72), (24, 200), (72, 520), (512, 64))]
    found += [Case(N=N, K=K, deterministic=True) for N, K in ((2, 2), (3, 1), (8, 1), (6, 2))]
    for H in (64, 128, 256):
        found += [
            Case(H=H, bias=bias, bias_dtype=dtype)
            for bias in ("BNTS", "B1TS", "11TS", "BN1S", "111S", "BNT1")
            for dtype in ("", "float32")
        ]
        found += [Case(H=H, dropout=rate, window=(40, 17)) for rate in (0.1, 0.5, 0.9)]
        found += [Case(H=H, soft_cap=2.0, segments=True), Case(H=H, boolean="1NTS", sinks=True)]
        found += [Case(H=H, score_function=name) for name in ("alibi", "distances")]
        found += [Case(H=H, mask_function="blocks", dropout=0.2, deterministic=True)]
        found += [Case(H=H, max_logits=True, causal="top_left")]
        found += [Case(**_PACKED, H=H, window=(40, 17)), Case(**_PACKED, H=H, sinks=True)]
        found += [Case(**_DECODE, H=H, B=B, bias="1NTS") for B in (1, 5)]
        found += [Case(**_STEPS, H=H, page_size=size) for size in (16, 64, 256)]
        found += [Case(**_STEPS, H=H, page_size=64, batch_invariant=True)]
    return found


def chosen(*, every: bool) -> list[Case]:
    """The cases of a run, each once: the first ones, and with ``every`` the others."""
    return list(dict.fromkeys((*_FIRST, *(_others() if every else ()))))


def on_gpu(cases: Iterable[Case], arch: str) -> list[Case]:
    """The cases for an architecture: sm_75 multiplies float16, but not bfloat16."""
    if "bf16" in gpu.of(arch).dtypes:
        return list(cases)
    return list(
        dict.fromkeys(
            dataclasses.replace(case, dtype="float16") if case.dtype == "bfloat16" else case
            for case in cases
        )
    )


_TESTED = (
    *(BIAS, BOOLEAN, DETERMINISTIC, DROPOUT, FUNCTIONS, MASK, PAGES, ROW_MAXIMA, SEGMENTS),
    *(SINKS, SOFT_CAP, VARLEN),
)
"""The features that the oracle has."""

_BIAS_DIMS = {"full": "BNTS", "common": "1NTS", "columns": "BN1S", "rows": "BNT1"}
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "tf32": "float32"}


def like(options: argparse.Namespace) -> Case:
    """The user's call, of the flags of ``explain`` and the sizes.

    Raises:
        ValueError: a flag is missing, or the oracle lacks the feature.
    """
    if options.dtype is None or options.head_dim is None:
        raise ValueError("--like needs the call: expected at least --dtype and --head-dim")
    if options.dtype not in _DTYPES:
        raise ValueError(f"expected one of {', '.join(_DTYPES)}, got --dtype {options.dtype}")
    for feature in FEATURES:
        if feature not in _TESTED and feature.from_flags(options) != feature.off:
            raise ValueError(f"verify has no case with {feature.title}: leave its flag out")
    if options.float8:
        raise ValueError("verify has no case with float8 pages: leave --float8 out")
    _require_sizes(options)
    window = 64 if options.window == NO_BOUND else options.window
    case = Case(
        B=options.batch,
        T=options.queries or options.seq,
        S=options.seq,
        N=options.heads,
        K=1 if options.latent else options.kv_heads,
        H=options.head_dim,
        Hv=options.value_dim,
        dtype=_DTYPES[options.dtype],
        fast=options.dtype == "tf32",
        causal="top_left" if options.causal else None,
        window=None if window is None else (window, 0),
        segments=options.segments,
        boolean="B1TS" if options.boolean else "",
        soft_cap=3.0 if options.soft_cap else None,
        score_function=options.score_function or "",
        mask_function=options.mask_function or "",
        dropout=0.1 if options.dropout else 0.0,
        bias=_BIAS_DIMS[options.bias_layout or "full"] if options.bias else "",
        bias_dtype="float32" if options.bias == "32" else "",
        sinks=options.sinks,
        max_logits=options.row_maxima,
        deterministic=options.deterministic,
    )
    lengths = tuple((case.T - 7 * b % case.T, case.S - 5 * b % case.S) for b in range(case.B))
    if options.varlen:
        return dataclasses.replace(case, kind="packed", lengths=lengths)
    if options.page_size:
        return dataclasses.replace(
            case,
            kind="paged",
            S=-(-case.S // options.page_size) * options.page_size,
            lengths=tuple((case.T, key) for _, key in lengths),
            causal="bottom_right",
            page_size=options.page_size,
            latent=options.latent,
            batch_invariant=options.batch_invariant,
            gradients=False,
        )
    return case


def _require_sizes(options: argparse.Namespace) -> None:
    if options.heads % options.kv_heads:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}"
        )
