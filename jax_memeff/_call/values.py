"""Checks of arrays and numbers that users pass. NumPy arrays stay on the host for these checks.

Every message names the argument, what was expected and what was passed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer

from jax_memeff.errors import UnsupportedError

INT32_MAX = 2**31 - 1

_P = ParamSpec("_P")
_R = TypeVar("_R")


class HoldsArrays:
    """The base of this package's pytrees that users pass as arguments."""


def held(value: Any) -> Any:
    """An argument with the arrays that its objects hold.

    An object with ``__jax_array__`` (``flax.nnx.Variable``, ``keras.Variable``) stands for the
    array that this method returns, also in a list, a tuple or a :class:`HoldsArrays`. Other pytrees
    stay as they are: they may be functions with parameters, such as modules.
    """
    if _is_no_container(value):
        return _held_by(value)
    leaves, tree = jax.tree.flatten(value, is_leaf=_is_no_container)
    arrays = list(map(_held_by, leaves))
    # Most arguments hold no objects, and to make a Mask takes longer than all of this.
    if all(map(operator.is_, arrays, leaves)):
        return value
    return jax.tree.unflatten(tree, arrays)


def _is_no_container(value: Any) -> bool:
    return not isinstance(value, (list, tuple, HoldsArrays))


def _held_by(value: Any) -> Any:
    # A class has the method, but no array. A symbolic size has it, too, and must remain a size.
    if isinstance(value, (jax.Array, np.ndarray, type)) or export.is_symbolic_dim(value):
        return value
    array = getattr(value, "__jax_array__", None)
    return value if array is None else array()


def takes_objects(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a public function take objects that hold arrays (:func:`held`) for all its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        untyped: Callable[..., Any] = function
        return untyped(*map(held, args), **{name: held(x) for name, x in kwargs.items()})

    return call


def methods_take_objects(made: type[_R]) -> type[_R]:
    """:func:`takes_objects` for all public methods of a class."""
    for name, member in list(vars(made).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, staticmethod):
            setattr(made, name, staticmethod(takes_objects(member.__func__)))
        elif callable(member):
            setattr(made, name, takes_objects(member))
    return made


def array(name: str, value: Any) -> Any:
    """``value`` as a JAX array, or as a NumPy array if it is not on a device yet.

    Raises:
        TypeError: it is not an array, is a masked array, or has a dtype that JAX lacks.
        ValueError: it is a list whose rows differ in length.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be an array, got a NumPy masked array, whose mask would be ignored; pass "
            f"{name}.filled(...), and its mask as a mask or as lengths"
        )
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (list, tuple)):
        value = _from_list(name, value)
    elif isinstance(value, (bool, int, float, complex, np.generic)):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} must be an array, got {type(value).__name__}{_conversion(name, value)}"
        )
    # NumPy counts timedeltas among the integers.
    foreign = value.dtype.kind == "m" or value.dtype in (np.longdouble, np.clongdouble)
    if foreign or not (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)):
        raise TypeError(
            f"{name} must be an array of numbers in a dtype that JAX has, got dtype {value.dtype}"
            + (
                " (as lists of None or of integers beyond 64 bits have)"
                if value.dtype == object
                else ""
            )
        )
    return _in_native_order(value)


def _conversion(name: str, value: Any) -> str:
    """The end of a message about something that is not an array: how to make one of it."""
    if isinstance(value, type):
        return f" {value.__name__}; pass an array"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "; trace the call with jax.eval_shape or with the lower method of jax.jit"
    if hasattr(value, "__dlpack__"):
        return f"; pass jax.dlpack.from_dlpack({name})"
    return f"; pass jnp.asarray({name})" if hasattr(value, "__array__") else ""


def _in_native_order(value: np.ndarray) -> np.ndarray:
    """Arrays from files may have the other byte order, which JAX does not convert."""
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def _from_list(name: str, value: list[Any] | tuple[Any, ...]) -> np.ndarray:
    try:
        return np.asarray(value)
    except TypeError as error:  # a traced array does not convert
        raise TypeError(
            f"{name} must be an array, got a {type(value).__name__} with traced values; pass "
            f"jnp.stack of it"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{name} must be an array, got a {type(value).__name__} whose rows differ in length: "
            f"{value!r:.80}"
        ) from error


def score_dtype(dtype: Any) -> np.dtype:
    """The dtype of the scores for a float dtype: float64 for float64, else float32.

    ``jnp.promote_types`` raises for 16 bits if ``jax_numpy_dtype_promotion`` is ``"strict"``.

    >>> score_dtype(jnp.bfloat16)
    dtype('float32')
    """
    wide = np.dtype(np.float64)
    return wide if dtype == wide else np.dtype(np.float32)


def is_host(value: Any) -> bool:
    """Whether the values can be read while the call is traced."""
    return isinstance(value, np.ndarray)


def integers(name: str, value: Any) -> Any:
    """``value`` as an array of integers."""
    if isinstance(value, (list, tuple)) and not value:
        value = np.zeros(0, np.int32)  # NumPy would choose a float
    value = array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {value.dtype}; pass .astype('int32')")
    return value


def clipped(value: Any, low: int, high: int) -> Any:
    """Integers clipped to [low, high], as int32. The range must fit int32.

    Values are clipped before the cast, which would wrap them around. Bounds that a small or
    unsigned dtype cannot hold are clipped to that dtype first.

    >>> clipped(np.array([-3, 2**40]), 0, 9).tolist(), clipped(np.array([200], np.uint8), -1, 999)
    ([0, 9], array([200], dtype=int32))
    """
    info = jnp.iinfo(value.dtype)
    value = value.clip(max(low, int(info.min)), min(high, int(info.max)))
    return value.astype(np.int32)


def static_number(name: str, value: Any, instead: str, instead_of_array: str = "") -> float:
    """A finite number; it becomes a constant of the kernel's launch, so it cannot be traced.

    Args:
        instead: the remedy for a traced number.
        instead_of_array: the remedy for several numbers.
    """
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a static number, got a traced value; {instead}")
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.shape != ():
        advice = instead_of_array and f"; {instead_of_array}"
        raise TypeError(f"{name} must be one number, got an array of shape {value.shape}{advice}")
    if not _is_number(value):
        raise TypeError(
            f"{name} must be a number, got {value!r:.80} of type {type(value).__name__}"
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer beyond float64") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _is_number(value: object) -> bool:
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        # NumPy treats timedeltas as integers.
        kinds = (jnp.floating, jnp.integer)
        return any(jnp.issubdtype(value.dtype, kind) for kind in kinds) and value.dtype.kind != "m"
    # float() would accept "0.5", True is not a scale, and classes have __float__ too.
    return hasattr(value, "__float__") and not isinstance(value, (bool, str, type))


def static_integer(name: str, value: Any, expected: str, instead: str) -> int:
    """A Python integer.

    Args:
        expected: the words after "must be" in the message.
        instead: the remedy for a traced integer.
    """
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be {expected}, got a traced value; {instead}")
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be {expected}, got {value!r:.80} of type {type(value).__name__}"
        ) from None


def size(
    name: str,
    value: Any,
    least: int = 0,
    most: int | None = INT32_MAX,
    instead: str = "make it static",
) -> int:
    """A Python integer from ``least`` to ``most``; None means no bound.

    Args:
        instead: the remedy for a traced integer.

    >>> size("rows", 3)
    3
    """
    number = static_integer(name, value, "a Python integer", instead)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def flag(
    name: str, value: Any, instead: str = "make it static (jax.jit's static_argnames helps)"
) -> bool:
    """True or False.

    Args:
        instead: the remedy for a traced value.
    """
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be True or False, got a traced value; {instead}")
    if not isinstance(value, (bool, np.bool_)):
        is_number = isinstance(value, int) or getattr(value, "shape", None) == ()
        advice = f"; pass bool({name})" if is_number else ""
        raise TypeError(f"{name} must be True or False, got {value!r:.80}{advice}")
    return bool(value)


def require_static(shapes: Mapping[str, Sequence[int]], where: str, remedy: str) -> None:
    """Raise for symbolic sizes of ``jax.export`` among named shapes.

    Raises:
        UnsupportedError: its message contains ``where`` (the path that needs static sizes), the
            shape, and the ``remedy``.
    """
    for name, shape in shapes.items():
        if any(export.is_symbolic_dim(size) for size in shape):
            sizes = ", ".join(map(str, shape))
            reasons = [f"{where}, got {name} [{sizes}]", remedy]
            raise UnsupportedError(reasons, "a size is symbolic that must be static")


def require_static_sequences(**shapes: Sequence[int]) -> None:
    """Raise for symbolic sizes among the shapes without the batch size of padded sequences, or
    without the number of tokens of packed ones.
    """
    require_static(
        shapes,
        where="only the batch size may be symbolic, and only on the blockwise path",
        remedy="export a program for each size, or one for the longest sequence and pass "
        "query_seq_lengths and key_value_seq_lengths; varlen_attention takes a symbolic number of "
        "tokens",
    )


def likely_batch(batch: int) -> int:
    """A batch size for heuristics. A symbolic one is not known when they are evaluated."""
    return 8 if export.is_symbolic_dim(batch) else batch


def require_countable(name: str, shape: Sequence[int]) -> None:
    """Raise ``ValueError`` for a size beyond int32, the type of positions and of indices."""
    if any(not export.is_symbolic_dim(size) and size > INT32_MAX for size in shape):
        raise ValueError(
            f"{name} must have sizes of at most {INT32_MAX}, got shape {tuple(shape)}; split the "
            "call"
        )


def broadcasts_to_scores(name: str, value: Any, scores_shape: Sequence[int]) -> None:
    """Raise for an array that does not broadcast to the scores [B, N, T, S]."""
    shape = tuple(value.shape)
    if len(shape) > 4:
        raise ValueError(
            f"{name} must have rank <= 4, got rank {len(shape)}: shape {shape}; merge its leading "
            f"dims with {name}.reshape(-1, {', '.join(map(str, shape[-3:]))})"
        )
    if not _broadcasts(shape, scores_shape):
        raise ValueError(
            f"{name} must broadcast to [B, N, T, S] = {list(scores_shape)} (each dim 1 or full, "
            f"left-padded with 1s), got shape {shape}{_other_dims(name, shape, scores_shape)}"
            f"{of_one_device()}"
        )


def _broadcasts(shape: tuple[int, ...], scores_shape: Sequence[int]) -> bool:
    """Whether an array, left-padded with 1s, broadcasts to the scores."""
    padded = (1,) * (4 - len(shape)) + shape
    return all(size in (1, full) for size, full in zip(padded, scores_shape, strict=True))


def _other_dims(name: str, shape: tuple[int, ...], scores_shape: Sequence[int]) -> str:
    """The end of a message about a shape that does not fit: other dims for which it would."""
    batch, heads, rows, columns = scores_shape
    if shape == (batch, columns):
        return f"; if its dims are [B, S], pass {name}[:, None, None, :]"
    if len(shape) == 3 and shape[0] == batch and _broadcasts(shape[1:], scores_shape):
        return f"; if its dims are [B, T, S], pass {name}[:, None]"
    # The rows are the heads of arrays [B, N, T, H], and the columns those of their keys.
    if columns and rows % columns == 0 and _broadcasts(shape, (batch, rows, heads, heads)):
        return f"; {SWAPPED}"
    return ""


SWAPPED = (
    "query, key and value have dims [B, T, N, H]: if yours are [B, N, T, H], as in PyTorch, pass "
    "jnp.swapaxes(x, 1, 2) of each"
)
"""The remedy for shapes that would fit in PyTorch's layout."""


def of_one_device() -> str:
    """A suffix for messages about mismatched sizes, if the call is inside ``jax.shard_map``."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return ""
    return (
        f"; these are the sizes on one device of jax.shard_map over {axes}: shard the batch and "
        "the heads of query, key and value over the same axes (in_specs)"
    )
