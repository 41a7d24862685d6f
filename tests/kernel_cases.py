"""The calls that the kernels are tested with: one table for GPU tests and for what they compile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff.mask import Mask
from jax_memeff.options import Operands, Options


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

    def __str__(self) -> str:
        words = [
            f"B{self.B}T{self.T}S{self.S}N{self.N}K{self.K}H{self.H}v{self.value_dim}",
            self.dtype,
            self.mask_name,
        ]
        words += ["softcap"] if self.soft_cap else []
        words += [f"scale{self.scale:g}"] if self.scale is not None else []
        words += ["lengths"] if self.lengths else []
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
        return Options(scale=scale, soft_cap=self.soft_cap)

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
            None,
            self.full_mask,
            None,
            None,
        )
        dout = draw(self.B, self.T, self.N, self.value_dim)
        dlse = draw(self.B, self.T, self.N, dtype=np.float32) if self.lse_gradient else None
        return operands, dout, dlse


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
GROUPS = ((2, 2), (4, 2), (3, 1), (8, 1), (6, 2))


def cases() -> list[Case]:
    """Every value of every factor, and 60 seeded draws of all factors together."""
    found = []
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

    rng = np.random.default_rng(1)
    for _ in range(60):
        T, S = ODD_SIZES[rng.integers(len(ODD_SIZES))]
        H, Hv = HEAD_DIMS[rng.integers(len(HEAD_DIMS))]
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
                **MASKS[rng.integers(len(MASKS))],
            )
        )
    return found


def poisoned(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """The same arrays with NaN beyond the lengths."""
    if case.lengths is None:
        return operands, dout, dlse
    query, key, value, dout = (np.array(x) for x in (*operands[:3], dout))
    dlse = None if dlse is None else np.array(dlse)
    for b, (query_length, key_length) in enumerate(case.lengths):
        for array in (query, dout) if dlse is None else (query, dout, dlse):
            array[b, query_length:] = np.nan
        for array in (key, value):
            array[b, key_length:] = np.nan
    return operands._replace(query=query, key=key, value=value), dout, dlse


def run(operands: Operands, options: Options, dout: Any, dlse: Any) -> tuple:
    """(out, lse), (dq, dk, dv) of one jitted program."""
    from jax_memeff import vjp

    operands, dout, dlse = jax.tree.map(jnp.asarray, (operands, dout, dlse))
    return _run(operands, options, dout, dlse, vjp.attention)


@functools.partial(jax.jit, static_argnums=(1, 4))
def _run(operands, options, dout, dlse, attention):
    def forward(query, key, value):
        out, lse = attention(operands._replace(query=query, key=key, value=value), options)
        return (out, lse) if dlse is not None else out

    results, transpose = jax.vjp(forward, *operands[:3])
    gradients = transpose(dout if dlse is None else (dout, dlse))
    out, lse = results if dlse is not None else (results, None)
    return (out, lse), gradients
