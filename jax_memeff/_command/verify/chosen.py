"""The cases that ``verify`` runs. Nothing here imports JAX, because the parent process reads it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from jax_memeff._command.cases.case import Case
from jax_memeff.codegen import gpu

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
    Case(**_STEPS, H=128, page_size=1),
    Case(**_MANY, bias="1NTS", H=128),
    Case(**_MANY, dropout=0.1, causal="top_left"),
    Case(H=256, N=2, K=1, causal="top_left"),
    Case(score_function="alibi", causal="top_left"),
    Case(H=320, N=2, K=1, T=70, S=90),
    Case(dtype="float32", H=320, N=2, K=1, T=70, S=90),
    Case(tangents=True, gradients=False, causal="top_left"),
    Case(window=(40, 17), segments=True),
    Case(boolean="B1TS", T=201, S=77),
    Case(**_STEPS, N=16, K=1, H=576, Hv=512, page_size=64, latent=True),
    Case(**_STEPS, N=16, K=1, H=576, Hv=512, page_size=64, latent=True, keys=True),
    Case(T=40, N=16, K=1, H=576, Hv=512, latent=True, keys=True),
    Case(keys=True, causal="top_left"),
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
        found += [Case(**_STEPS, H=H, page_size=size) for size in (1, 8, 16, 64, 256)]
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
