"""Every row of the table of arrays is enforced, with a message that names the argument."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_memeff._api.arrays import (
    FLOAT8,
    INTEGERS,
    NEW_TOKENS,
    PACKED,
    PADDED,
    PAGED_QUERY,
    QKV_PACKED,
    RING,
    ArrayArgument,
    Layout,
    checked,
    paged,
)

pytestmark = pytest.mark.quick

SIZES = {
    "B": 2,
    "T": 5,
    "S": 7,
    "N": 4,
    "K": 2,
    "H": 8,
    "Hv": 6,
    "3": 3,
    "total_q": 9,
    "total_k": 11,
    "tokens": 10,
    "pages": 3,
    "page_size": 16,
    "max_pages": 12,
}
LAYOUTS = {
    "padded": PADDED,
    "ring": RING,
    "qkv": QKV_PACKED,
    "packed": PACKED,
    "paged": paged(PAGED_QUERY, has_starts=False),
    "paged tokens": paged(PAGED_QUERY, has_starts=True),
    "append": paged(NEW_TOKENS, has_starts=False),
    "append tokens": paged(NEW_TOKENS, has_starts=True),
}
ROWS = [(name, row.name) for name, layout in LAYOUTS.items() for row in layout.rows]


def array(row: ArrayArgument, form: int = 0, **sizes: int) -> Any:
    own = SIZES | sizes
    shape = [own[x.removesuffix("+1")] + x.endswith("+1") for x in row.forms[form]]
    if row.dtypes == INTEGERS:
        return np.zeros(shape, np.int32)
    is_pool = row.name.endswith("_pages")
    return jnp.zeros(shape, FLOAT8 if is_pool else "float32")


def good(layout: Layout) -> dict[str, Any]:
    return {row.name: array(row) for row in layout.rows}


def row_of(layout: Layout, name: str) -> ArrayArgument:
    return next(row for row in layout.rows if row.name == name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_of_these_shapes_pass(name):
    layout = LAYOUTS[name]
    found = checked(layout, **good(layout))
    assert found.sizes.items() <= SIZES.items() | {("3", 3)} and found.batched
    optional = {row.name: None for row in layout.rows if row.optional and "pages" not in row.name}
    assert checked(layout, **good(layout) | optional).sizes["H"] == SIZES["H"]


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_every_size_is_compared(name, argument):
    """With each other array that has a dim of the same name, whichever comes first."""
    layout = LAYOUTS[name]
    row = row_of(layout, argument)
    for form, dims in enumerate(row.forms[: 1 if "?" in row.dims else None]):
        for dim in {x.removesuffix("+1") for x in dims}:
            others = [x.name for x in layout.rows if x is not row and f" {dim}" in f" {x.dims}"]
            if not others and not dim.isdigit():
                continue
            wrong = {argument: array(row, form, **{dim: SIZES[dim] + 16})}
            with pytest.raises(ValueError, match=rf"{SIZES[dim] + 16}|{SIZES[dim] + 17}") as caught:
                checked(layout, **good(layout) | wrong)
            message = str(caught.value)
            assert any(message.startswith(own) for own in (argument, *others, "query's")), message


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_every_rank_and_dtype_is_checked(name, argument):
    layout = LAYOUTS[name]
    own = good(layout)[argument]
    for shape in ((1, 1, *own.shape), ()):
        with pytest.raises(ValueError, match=rf"^{argument} must have shape \[.*got shape"):
            wrong: Any = jnp.zeros(shape, own.dtype)
            checked(layout, **good(layout) | {argument: wrong})
    with pytest.raises(TypeError, match=rf"^{argument} must .*, got (dtype )?complex64"):
        checked(layout, **good(layout) | {argument: own.astype("complex64")})


@pytest.mark.parametrize("name", ["padded", "ring", "qkv"])
def test_the_batch_dim_is_absent_from_all_or_none(name):
    layout = LAYOUTS[name]
    without: dict[str, Any] = {key: x[0] for key, x in good(layout).items()}
    found = checked(layout, **without)
    assert not found.batched and found.sizes["B"] == 1
    assert all(x.shape[0] == 1 for x in found.arrays.values())
    for row in layout.rows[1:]:
        with pytest.raises(
            ValueError, match=f"{row.name} must have the rank of {layout.rows[0].name}"
        ):
            checked(layout, **without | {row.name: array(row)})
