"""Writes the support table from the code generator: ``python docs/support_table.py``.

docs/support.md has the whole table, and README.md the rows without kernels. Both are between
``<!-- support:begin NAME -->`` and ``<!-- support:end -->``; a test fails when one is out of date.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_memeff.codegen.features import BIAS, FEATURES, PAGES, together
from jax_memeff.codegen.problem import GRADIENTS, Problem
from jax_memeff.codegen.select import select
from jax_memeff.codegen.strategy import QUERY_ROWS, Strategy
from jax_memeff.errors import UnsupportedError

DOCS = Path(__file__).parent
PAGES_WITH_ROWS = (DOCS / "support.md", DOCS.parent / "README.md")
_BLOCK = re.compile(r"(<!-- support:begin (\w+) -->\n).*?(<!-- support:end -->)", re.DOTALL)
_PLAIN = Problem("forward", "bf16", 64, 64, "sm_90a")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: problems that differ from a plain one by ``changes``, each with
    ``features``, and with ``strategies``.
    """

    title: str
    changes: tuple[Mapping[str, Any], ...] = ({},)
    features: tuple[Mapping[str, Any], ...] = ({},)
    strategies: tuple[Strategy, ...] = (Strategy(),)

    @functools.cached_property
    def cells(self) -> tuple[str, ...]:
        return self._cell("forward"), self._cell("backward"), self._tangent_cell(), "yes"

    @property
    def is_exception(self) -> bool:
        """Whether a forward or a backward has no kernel."""
        return self.cells[:2] != ("yes", "yes")

    def _tangent_cell(self) -> str:
        """Tangents have kernels on Hopper; others are computed on the blockwise path. Paged calls
        have no derivative.
        """
        if any(asked.get("pages", PAGES.off).size for asked in self.features):
            return "no"
        return "yes" if self._cell("tangent") == "yes" else "blockwise"

    def _cell(self, direction: str) -> str:
        """ "yes" when a kernel exists for every problem, else what its absence means."""
        for change, asked, strategy in itertools.product(
            self.changes, self.features, self.strategies
        ):
            needs_grad = GRADIENTS if direction == "backward" and asked.get("bias") else ()
            problem = dataclasses.replace(
                _PLAIN, direction=direction, features=asked, needs_grad=needs_grad, **change
            )
            try:
                select(problem, strategy if direction == "forward" else Strategy())
            except UnsupportedError as error:
                in_jax = any("computed in plain JAX" in reason for reason in error.reasons)
                return "blockwise" if in_jax else "no"
        return "yes"


def _dims(*dims: int) -> tuple[dict[str, Any], ...]:
    return tuple({"head_dim": dim, "value_dim": dim} for dim in dims)


_MULTIPLES_OF_8 = range(24, 257, 8)
_OTHER_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120")

ROWS = (
    Row("float16, bfloat16", ({"dtype": "f16"}, {"dtype": "bf16"})),
    Row("float32", ({"dtype": "f32"}, {"dtype": "tf32"})),
    Row("float64", ({"dtype": "f64"},)),
    Row("head dims from 24 to 256 that are multiples of 8", _dims(*_MULTIPLES_OF_8)),
    Row("other head dims up to 256", _dims(*(set(range(1, 257)) - set(_MULTIPLES_OF_8)))),
    Row("head dims from 257 to 65536", _dims(257, 264, 512, 1000, 4096, 65536)),
    Row("value dim ≠ head dim", ({"head_dim": 192, "value_dim": 128}, {"value_dim": 32})),
    Row("grouped-query and multi-query heads"),
    Row("one array of query, key and value (`dot_product_attention_packed`)"),
    *(Row(row.title, features=row.problems) for feature in FEATURES for row in feature.support),
    Row("gradient of the logsumexp"),
    Row(
        "all masks, bias, dropout and soft cap in one call",
        features=tuple({**together(), **bias} for bias in BIAS.every),
    ),
    Row(
        "packed sequences and bias with head dims above 256",
        _dims(512),
        ({"packed": True}, *BIAS.every),
    ),
    Row(
        "deterministic bias gradients with head dims above 256",
        _dims(512),
        tuple({"deterministic": True, **bias} for bias in BIAS.every),
    ),
    Row(
        "float32 with head dims above 256",
        ({**_dims(512)[0], "dtype": "f32"}, {**_dims(512)[0], "dtype": "tf32"}),
    ),
    Row(
        "few queries, as in decoding",
        strategies=tuple(filter(lambda each: each.splits_keys, map(Strategy, QUERY_ROWS))),
    ),
    Row("sm_90a (H100, H200)", ({"arch": "sm_90a"},)),
    Row(
        "other GPUs from sm_80 on (A100, L4, B200, RTX 50)",
        tuple({"arch": arch} for arch in _OTHER_ARCHS),
    ),
    Row("sm_75 (T4, RTX 20), float16", ({"arch": "sm_75", "dtype": "f16"},)),
    Row("GPUs before sm_75 (V100)", ({"arch": "sm_70", "dtype": "f16"},)),
)


def table(rows: Sequence[Row] = ROWS) -> str:
    """The rows in Markdown, with a line break at the end."""
    header = (
        "| | CUDA forward | CUDA backward | CUDA tangents (`forward_mode`) | blockwise path |\n"
    )
    header += "|---|---|---|---|---|\n"
    return header + "".join(f"| {row.title} | {' | '.join(row.cells)} |\n" for row in rows)


def exceptions() -> str:
    """How many rows have kernels, and the others."""
    others = [row for row in ROWS if row.is_exception]
    return (
        f"{len(ROWS) - len(others)} of {len(ROWS)} dtypes, head dims, features and GPUs have "
        "kernels forward and backward. The others:\n\n"
        f"{table(others)}"
    )


def updated(text: str) -> str:
    """``text`` with what belongs between its markers."""
    blocks = {"table": table, "exceptions": exceptions}
    return _BLOCK.sub(lambda block: block[1] + blocks[block[2]]() + block[3], text)


if __name__ == "__main__":
    for page in PAGES_WITH_ROWS:
        page.write_text(updated(page.read_text()))
