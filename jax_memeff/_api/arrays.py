"""The arrays that users pass: a table of their dims and dtypes, and the check that reads it.

Every function with query, key and value has a :class:`Layout`. Dims of one name have one size,
which the first array that has it determines. Lengths are not here: ``checks.lengths`` of masks
takes them, because a ``Mask`` may hold them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call import values
from jax_memeff._call.mask import Mask
from jax_memeff._call.values import score_dtype
from jax_memeff.codegen.features.pages import SIZES, is_size

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = "float8_e4m3fn"
POOL_DTYPES = ("bfloat16", "float16", FLOAT8, "float32", "float64")
INTEGERS = ("integers",)
"""Integers of any dtype. NumPy arrays stay on the host, where their values can be read."""


class ArrayArgument(NamedTuple):
    """A row of a layout."""

    name: str
    dims: str
    """The names of its dims. ``B?`` is absent from all arrays of a call or from none; ``B+1`` is
    one more than B; a dim with ``~`` may be 1 or absent, and is broadcast; ``|`` separates forms
    of different rank."""
    dtypes: tuple[str, ...] = ()
    """The names of the dtypes that it may have; all if there are none."""
    like: str = ""
    """The array whose dtype it must have, if not one of ``dtypes``."""
    pool: str = ""
    """The pool whose dtype it must have, unless that is float8: then it may be any float."""
    scales: str = ""
    """The pool that it scales; only float8 has scales."""
    optional: bool = False
    why: str = ""
    """What its shape follows from, for messages."""
    if_fewer: str = ""
    """The remedy for too few dims; ``{name}`` is the name."""
    if_more: str = ""
    """Likewise for too many."""

    @property
    def forms(self) -> list[list[str]]:
        """The names of the dims in each form that it may have, without ``?``."""
        found = [form.split() for form in self.dims.split("|")]
        if found[0][0].endswith("?"):
            found = [[dim.rstrip("?") for dim in found[0]], found[0][1:]]
        return found


class Layout(NamedTuple):
    """The arrays of a function. Those before it determine the sizes that a row has to have."""

    rows: tuple[ArrayArgument, ...]
    symbolic: tuple[str, ...] = ()
    """The dims whose sizes ``jax.export`` may have made symbolic."""


class Checked(NamedTuple):
    """The arrays of a call by name, None where an optional one is, with the dim B of ``B?``."""

    arrays: dict[str, Any]
    sizes: dict[str, int]
    """The sizes of all dims by name."""
    batched: bool
    """Whether the user's arrays had the dim B of ``B?``."""


_MERGE = "; merge its leading dims with {name}.reshape, or map over them with jax.vmap"
_QUERY = ArrayArgument("query", "B? T N H", FLOATS, if_more=_MERGE)
_KEY = ArrayArgument("key", "B? S K H", like="query", if_more=_MERGE)
_VALUE = ArrayArgument("value", "B? S K Hv", like="query", if_more=_MERGE)

RING = Layout((_QUERY, _KEY, _VALUE), ("B",))
PADDED = RING._replace(rows=(_QUERY, _KEY, _VALUE._replace(optional=True)))
"""Without values they are columns of the keys."""

QKV_PACKED = Layout((ArrayArgument("qkv", "B? T 3 N H", FLOATS, if_more=_MERGE),), ("B",))


def _tokens(row: ArrayArgument, dims: str) -> ArrayArgument:
    return row._replace(
        dims=dims,
        why="because the sequences follow one another",
        if_more="; padded sequences need dot_product_attention",
    )


PACKED = Layout(
    (
        _tokens(_QUERY, "total_q N H"),
        _tokens(_KEY, "total_k K H"),
        _tokens(_VALUE._replace(optional=True), "total_k K Hv"),
        ArrayArgument("cu_seqlens_q", "B+1", INTEGERS, why="one more than there are sequences"),
        ArrayArgument("cu_seqlens_k", "B+1", INTEGERS, why="the length of cu_seqlens_q"),
    ),
    ("total_q", "total_k", "B+1"),
)

PAGED_QUERY = (ArrayArgument("query", "B T N H", FLOATS, pool="key_pages"),)
NEW_TOKENS = (
    ArrayArgument("key", "B T K H", pool="key_pages"),
    ArrayArgument("value", "B T K Hv", pool="value_pages", optional=True),
)


def paged(new: tuple[ArrayArgument, ...], has_starts: bool) -> Layout:
    """The layout of a call with pages.

    Args:
        new: the arrays of new tokens as ``[B, T, ...]``.
        has_starts: whether these are ``[tokens, ...]``, because ``query_starts`` is given.
    """
    if has_starts:
        why = "because query_starts is given"
        new = tuple(x._replace(dims=x.dims.replace("B T", "tokens"), why=why) for x in new)
    else:
        remedy = "; pass query_starts for sequences that follow one another"
        new = tuple(x._replace(if_fewer=remedy) for x in new)
    starts = "one more than page_table has rows"
    return Layout(
        (
            ArrayArgument("key_pages", "pages page_size K H", POOL_DTYPES),
            ArrayArgument("value_pages", "pages page_size K Hv", like="key_pages", optional=True),
            ArrayArgument("page_table", "B max_pages", INTEGERS),
            *new,
            ArrayArgument("query_starts", "B+1", INTEGERS, optional=True, why=starts),
            *(
                ArrayArgument(
                    f"{pool}_scale",
                    "K | pages K",
                    ("float32",),
                    scales=f"{pool}_pages",
                    optional=True,
                    why="a number for each key head",
                )
                for pool in ("key", "value")
            ),
        )
    )


_LOGITS = "one logit for each head of query"
OF_SCORES = Layout(
    (
        ArrayArgument("bias", "B~ N~ T~ S~", FLOATS, optional=True),
        ArrayArgument("sinks", "N", ("float32",), like="query", optional=True, why=_LOGITS),
    ),
    ("B",),
)
"""What every function with scores takes besides."""

_TITLES = {
    "B": "batch size",
    "H": "head dim",
    "Hv": "head dim",
    "K": "number of heads",
    "N": "number of heads",
    "S": "sequence length",
    "T": "number of tokens",
    "pages": "number of pages",
    "page_size": "page size",
    "tokens": "number of tokens",
    "total_k": "number of tokens",
}
"""The dims that several arrays have, in messages."""


def checked(
    layout: Layout,
    sizes: Mapping[str, int] | None = None,
    query_dtype: Any = None,
    **given: Any,
) -> Checked:
    """The arrays of a call, each compared with its row and with those before it.

    Args:
        layout: the rows.
        sizes: sizes that are known already, all of query.
        query_dtype: the dtype of query, if it is not among the rows.
        given: the user's arguments by name.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
        jax_memeff.UnsupportedError: a size is symbolic that must be static.
    """
    arrays: dict[str, Any] = {}
    dtypes: dict[str, Any] = {} if query_dtype is None else {"query": query_dtype}
    known = {dim: (size, "query") for dim, size in (sizes or {}).items()}
    batched: bool | None = None
    for row in layout.rows:
        value = given[row.name]
        if value is None and row.optional:
            arrays[row.name] = None
            continue
        if row.scales:
            _require_float8(row, arrays[row.scales])
        array = _converted(row, value)
        if "~" in row.dims:
            _check_dtype(row, array, dtypes)
            values.broadcasts_to_scores(row.name, array, [known[dim][0] for dim in "BNTS"])
        else:
            form = _form(row, tuple(array.shape), known)
            _check_dtype(row, array, dtypes)
            if "?" in row.dims and batched is None:
                batched = "B" in form
                known |= {} if batched else {"B": (1, row.name)}
            elif "?" in row.dims and batched != ("B" in form):
                raise ValueError(
                    f"{row.name} must have the rank of {layout.rows[0].name}, "
                    f"{len(row.forms[not batched])}, got shape {array.shape}"
                )
            _check_sizes(layout, row, array, form, known)
        arrays[row.name] = array[None] if batched is False else array
        dtypes[row.name] = array.dtype
    _check_heads(known, arrays)
    return Checked(arrays, {dim: size for dim, (size, _) in known.items()}, batched is not False)


def _converted(row: ArrayArgument, value: Any) -> Any:
    if row.dtypes == INTEGERS:
        array = values.integers(row.name, value)
    else:
        # JAX converts NumPy's float64 before dtypes are compared.
        array = jnp.asarray(values.array(row.name, value))
    values.require_countable(row.name, array.shape)
    return array


def require_float(name: str, array: Any) -> None:
    """Raise ``TypeError`` unless the dtype is one of ``FLOATS``."""
    if array.dtype.name not in FLOATS:
        _refuse_dtype(name, array, FLOATS)


def _refuse_dtype(name: str, array: Any, expected: tuple[str, ...]) -> NoReturn:
    one_of = f"one of {', '.join(expected)}" if expected[1:] else expected[0]
    raise TypeError(
        f"{name} must be {one_of}, got {array.dtype}; cast it, for example {name}.astype('float32')"
    )


def _check_dtype(row: ArrayArgument, array: Any, dtypes: Mapping[str, Any]) -> None:
    name = array.dtype.name
    if row.dtypes == INTEGERS:
        return
    if row.like:
        expected = dtypes[row.like]
        if array.dtype != expected and name not in row.dtypes:
            others = "".join(f", or {x}" for x in row.dtypes if x != expected.name)
            raise TypeError(
                f"{row.name} must have the dtype of {row.like}, {expected}{others}, got "
                f"{array.dtype}; pass {row.name}.astype({row.like}.dtype)"
            )
    elif row.dtypes and name not in row.dtypes:
        _refuse_dtype(row.name, array, row.dtypes)
    if row.pool and array.dtype != (pool := dtypes[row.pool]):
        if pool.name != FLOAT8:
            raise TypeError(
                f"{row.name} must have the dtype of {row.pool}, {pool}, got {array.dtype}; pass "
                f"{row.name}.astype({row.pool}.dtype)"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            # A cast to float8 would lose the range that a scale keeps.
            raise TypeError(
                f"{row.name} must have a float dtype, because {row.pool} is {pool}, got "
                f"{array.dtype}; pass {row.name}.astype('float32')"
            )


def _require_float8(row: ArrayArgument, pool: Any) -> None:
    """Raise for the scale of a pool that has none."""
    if pool is None:
        raise ValueError(
            f"{row.name} must be None without {row.scales}, got an array: key_scale also scales "
            "the values"
        )
    if pool.dtype.name != FLOAT8:
        raise ValueError(
            f"{row.name} must be None, because {row.scales} is {pool.dtype} and only {FLOAT8} has "
            "scales; got an array"
        )


def _form(row: ArrayArgument, shape: tuple[int, ...], known: Mapping[str, Any]) -> list[str]:
    """The names of an array's dims."""
    for form in row.forms:
        if len(form) == len(shape):
            return form
    has_fewer = len(shape) < min(map(len, row.forms))
    remedy = row.if_fewer if has_fewer else row.if_more
    _refuse_shape(row, shape, known, remedy.format(name=row.name))


def _check_sizes(
    layout: Layout,
    row: ArrayArgument,
    array: Any,
    form: list[str],
    known: dict[str, tuple[int, str]],
) -> None:
    """Compare an array's sizes with those that are known, and add its own to them."""
    shape = tuple(array.shape)
    static = [size for dim, size in zip(form, shape, strict=True) if dim not in layout.symbolic]
    if layout.symbolic:
        values.require_static_sequences(**{row.name: static})
    else:
        values.require_static(
            {row.name: static},
            where="paged calls need static sizes",
            remedy="export a program for each size, or one for the largest: lengths may be 0",
        )
    for dim, size in zip(form, shape, strict=True):
        name, own = (dim[:-2], size - 1) if dim.endswith("+1") else (dim, size)
        expected, owner = (int(dim), "") if dim.isdigit() else known.get(name, (own, ""))
        is_negative = isinstance(own, int) and own < 0
        if name == "page_size" and not is_size(own):
            raise ValueError(
                f"{row.name} must have a page size of {SIZES}, got {own} in shape {shape}"
            )
        if own == expected and not is_negative:
            known.setdefault(name, (own, row.name))
            continue
        # Head dims are the same on all devices.
        end = "" if dim in ("H", "Hv") or not owner else values.of_one_device()
        if len(shape) == 1 or "|" in row.dims or not owner:
            _refuse_shape(row, shape, known, end)
        raise ValueError(
            f"{row.name} must have the {_TITLES[name]} of {owner}, {expected}, got {own} in shape "
            f"{shape}{end}"
        )


def _refuse_shape(
    row: ArrayArgument, shape: tuple[int, ...], known: Mapping[str, tuple[int, str]], end: str
) -> NoReturn:
    def text(dims: list[str]) -> str:
        sizes = [
            known[dim.removesuffix("+1")][0] for dim in dims if dim.removesuffix("+1") in known
        ]
        names = f"[{', '.join(dims)}]".replace("+", " + ")
        if len(sizes) < len(dims) or len(dims) > 2:
            return names
        numbers = (size + dim.endswith("+1") for dim, size in zip(dims, sizes, strict=True))
        return f"{names} = [{', '.join(map(str, numbers))}]"

    first, *others = map(text, row.forms)
    optional = ", or {} without the batch dim" if "?" in row.dims else " or {}"
    why = row.why and f", {row.why}"
    raise ValueError(
        f"{row.name} must have shape {first}{''.join(map(optional.format, others))}{why}, got "
        f"shape {shape}{end}"
    )


def _check_heads(known: Mapping[str, tuple[int, str]], arrays: Mapping[str, Any]) -> None:
    """Query heads share key heads evenly."""
    if "N" not in known or "K" not in known:
        return
    (heads, query), (key_heads, key) = known["N"], known["K"]
    if (heads != 0) if key_heads == 0 else (heads % key_heads != 0):
        sizes = [
            known[dims[0]][0] if dims[0] in known else known.get(dims[1], (0, ""))[0]
            for dims in (("T", "total_q"), ("S", "total_k"))
        ]
        remedy = f"; {values.SWAPPED}" if sizes[1] and sizes[0] % sizes[1] == 0 else ""
        if key == "key_pages" and heads % arrays[key].shape[1] == 0:
            remedy = "; if pages are [K, page_size, H], pass jnp.swapaxes(pool, 1, 2) of each pool"
        of_key = "key's" if key == "key" else f"{key}'"
        raise ValueError(
            f"{query}'s number of heads must be a multiple of {of_key}, {key_heads}, got {heads} "
            f"in shape {tuple(arrays[query].shape)}{remedy}{values.of_one_device()}"
        )


def require_no_mask_or_function(bias: Any) -> None:
    """Raise ``TypeError`` for a bias that is another argument of the call."""
    if isinstance(bias, Mask) or bias is Mask:
        got, name = "a Mask", "mask"
    elif callable(bias):
        got, name = "a function", "score_mod"
    elif isinstance(bias, int | float):
        # The same number everywhere changes nothing. FlashAttention has dropout_p at this place.
        got, name = f"the number {bias}", "dropout_rate, if it is one"
    else:
        return
    raise TypeError(f"bias must be an array to add to the scores, got {got}; pass it as {name}")


def bias_and_sinks(
    bias: Any, sinks: Any, query_dtype: Any, scores_shape: tuple[int, int, int, int]
) -> tuple[jax.Array | None, jax.Array | None]:
    """The bias, of rank 4, in query's dtype or in that of the scores; and the sinks, [1, N], in the
    dtype of the scores.
    """
    require_no_mask_or_function(bias)
    if getattr(bias, "dtype", None) == np.bool_:
        raise TypeError(
            "bias must be an array to add to the scores, got a boolean array; pass it as mask"
        )
    sizes = dict(zip("BNTS", scores_shape, strict=True))
    arrays = checked(OF_SCORES, sizes, query_dtype, bias=bias, sinks=sinks).arrays
    bias, sinks = arrays["bias"], arrays["sinks"]
    if bias is not None:
        if bias.dtype not in (query_dtype, np.dtype("float32")):
            # jax.nn does the same. The gradient is returned in the given dtype.
            bias = bias.astype(score_dtype(query_dtype))
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if sinks is not None:
        sinks = sinks.astype(score_dtype(query_dtype))[None]
    return bias, sinks
