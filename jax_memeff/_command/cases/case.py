"""One call. Nothing here imports JAX, because the parent process of ``verify`` reads it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["padded", "packed", "paged"]

MOST_SCORES = 1 << 21
"""The oracle materializes all scores, about twenty arrays of them in float64."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its sizes, and the features that differ from the defaults."""

    kind: Kind = "padded"
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
    keys: bool = False
    """Whether each row has a list of a quarter of the keys, with repeats."""
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
    def is_timed(self) -> bool:
        """Whether it is timed. The times of smaller calls would be those of the host."""
        return not self.fits_oracle

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def keys_of_row(self) -> int:
        """The length of a row's list of keys, or all keys."""
        return -(-self.S // 4) if self.keys else self.S

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
