"""The support table of README.md, asked of the code generator: ``python docs/support_table.py``.

It stands between ``<!-- support:begin -->`` and ``<!-- support:end -->``; a test fails when it is
out of date.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

from jax_memeff.codegen.problem import (
    BIAS_LAYOUTS,
    BIASES,
    GRADIENTS,
    MASKS,
    QUERY_ROWS,
    Problem,
)
from jax_memeff.codegen.select import select
from jax_memeff.errors import UnsupportedError

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- support:begin -->\n).*?(<!-- support:end -->)", re.DOTALL)
_PLAIN = Problem("forward", "bf16", 64, 64, "sm_90a")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: problems that differ from a plain one by ``changes``."""

    feature: str
    changes: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        cells = (_cell(direction, self.changes) for direction in ("forward", "backward"))
        return f"| {self.feature} | {' | '.join(cells)} | yes |"


def _masks(*kinds: str) -> dict[str, Any]:
    return {"masks": frozenset(kinds)}


def _biases(**changes: Any) -> tuple[dict[str, Any], ...]:
    """A bias of every size and broadcast, in rows of any alignment, and its gradient."""
    return tuple(
        {"bias": bits, "bias_layout": layout, "bias_alignment": alignment, **changes}
        for bits, layout, alignment in itertools.product(BIASES[1:], BIAS_LAYOUTS, (2, 16))
    )


def _dims(*dims: int) -> tuple[dict[str, Any], ...]:
    return tuple({"head_dim": dim, "value_dim": dim} for dim in dims)


_EVERYTHING = {
    "masks": frozenset(MASKS),
    "soft_cap": True,
    "dropout": True,
    "varlen": True,
    "broadcast_batch": True,
}
_LARGE_DIM = {"head_dim": 512, "value_dim": 512}
_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")

ROWS = (
    Row("float16, bfloat16", ({"dtype": "f16"}, {"dtype": "bf16"})),
    Row("float32", ({"dtype": "f32"}, {"dtype": "tf32"})),
    Row("float64", ({"dtype": "f64"},)),
    Row("head dims up to 256", _dims(*range(1, 257))),
    Row("head dims from 257 to 65536", _dims(257, 264, 512, 1000, 4096, 65536)),
    Row("value dim ≠ head dim", ({"head_dim": 192, "value_dim": 128}, {"value_dim": 32})),
    Row("grouped-query and multi-query heads", ({},)),
    Row("causal, both alignments", (_masks("causal"),)),
    Row("window, both alignments", (_masks("window"), _masks("window", "causal"))),
    Row("sequence lengths", (_masks("query_lengths", "key_lengths"),)),
    Row("packed sequences (`varlen_attention`)", ({"varlen": True},)),
    Row("keys, values, biases and masks that a `vmap` shares", ({"broadcast_batch": True},)),
    Row("one array of query, key and value (`dot_product_attention_packed`)", ({},)),
    Row("segment ids", (_masks("segments"),)),
    Row("boolean mask", (_masks("boolean"),)),
    Row("bias of every broadcast, and its gradient", _biases()),
    Row("soft cap", ({"soft_cap": True},)),
    Row("dropout", ({"dropout": True},)),
    Row("gradient of the logsumexp", ({},)),
    Row("all masks, bias, dropout and soft cap in one call", _biases(**_EVERYTHING)),
    Row(
        "packed sequences and bias with head dims above 256",
        ({**_LARGE_DIM, "varlen": True}, *_biases(**_LARGE_DIM)),
    ),
    Row(
        "float32 with head dims above 256",
        ({**_LARGE_DIM, "dtype": "f32"}, {**_LARGE_DIM, "dtype": "tf32"}),
    ),
    Row("few queries, as in decoding", tuple({"query_rows": rows} for rows in QUERY_ROWS if rows)),
    Row(
        "`deterministic_backward=True`",
        ({"deterministic": True}, *_biases(**_LARGE_DIM, deterministic=True)),
    ),
    Row("GPUs from sm_80 on (A100, L4, H100, B200, RTX 50)", tuple({"arch": a} for a in _ARCHS)),
    Row("sm_75 (T4, RTX 20), float16", ({"arch": "sm_75", "dtype": "f16"},)),
    Row("GPUs before sm_75 (V100)", ({"arch": "sm_70", "dtype": "f16"},)),
)


def _cell(direction: str, changes: tuple[dict[str, Any], ...]) -> str:
    """ "yes" when a kernel exists for every problem, else what its absence means."""
    for change in changes:
        if direction == "forward" and "deterministic" in change:
            continue  # an option of the backward
        if direction == "backward" and "bias" in change:
            change = {**change, "needs_grad": GRADIENTS}
        try:
            select(dataclasses.replace(_PLAIN, direction=direction, **change))
        except UnsupportedError as error:
            return "not yet" if any(" yet" in reason for reason in error.reasons) else "no"
    return "yes"


def table() -> str:
    """The table in Markdown, with a line break at its end."""
    header = "| | CUDA forward | CUDA backward | blockwise path |\n|---|---|---|---|\n"
    return header + "".join(f"{row.text}\n" for row in ROWS)


def updated(text: str) -> str:
    """``text`` with the table between its markers."""
    return _BLOCK.sub(lambda block: block[1] + table() + block[2], text)


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
