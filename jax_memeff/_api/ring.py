"""Context parallelism: attention over a sequence that is sharded over the devices of a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_memeff import _compat as compat
from jax_memeff._api.arguments import PaddedArguments, choice, in_full, with_defaults
from jax_memeff._api.arrays import RING, checked
from jax_memeff._api.call import canonical, checked_mask, max_logits, padded_lengths, results
from jax_memeff._blockwise.functions import is_masked
from jax_memeff._call import functions, sinks
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.offsets import MOST_POSITION, Offsets
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.values import flag, takes_objects
from jax_memeff._ring import all_to_all, attention
from jax_memeff._ring.attention import valid_rows
from jax_memeff._ring.products import Method, Ring
from jax_memeff._ring.schedule import LAYOUTS, Layout
from jax_memeff._sharding.local import top_left

AxisName = Hashable
"""The name of a mesh axis, or a tuple of names."""


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: AxisName,
    layout: Layout = "contiguous",
    method: Method = "ring",
    return_residual: Literal[False] = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: AxisName,
    layout: Layout = "contiguous",
    method: Method = "ring",
    return_residual: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: AxisName,
    layout: Layout = "contiguous",
    method: Method = "ring",
    return_residual: bool = False,
    return_max_logits: Literal[True],
    **arguments: Unpack[PaddedArguments],
) -> tuple[jax.Array, ...]: ...


@in_full
@takes_objects
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: AxisName,
    layout: Layout = "contiguous",
    method: Method = "ring",
    return_residual: bool = False,
    return_max_logits: bool = False,
    **arguments: Unpack[PaddedArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute exact attention over a sequence sharded over a mesh axis; call it in ``shard_map``.

    Every device has a part of the queries and the corresponding part of the keys and values. Keys
    and values travel from device to device while each device computes with those that it has.
    Results are merged by their logsumexps. In the backward, the gradients of key and value travel
    with them. Output, logsumexp and gradients are those of :func:`jax_memeff.dot_product_attention`
    on one device, up to rounding, and dropout drops the same elements. No device ever has the whole
    sequence.

    T and S are local lengths. The global ones are n * T and n * S, where n is the size of the axis.

    Args:
        query: ``[B, T, N, H]``, the rows of this device. B may be missing, here and below.
        key: ``[B, S, K, H]``, the columns of this device.
        value: ``[B, S, K, Hv]``.
        bias: Its rank is at most 4; it is left-padded with 1s, and each dim is 1 or that of
            ``[B, N, T, n * S]``: the rows of this device in its order, and the columns of all
            devices in natural order. Its gradient has the same shape.
        mask: A boolean array of any shape that bias may have, or a :class:`jax_memeff.Mask`:
            windows and lengths are global, segment ids ``[B, T]`` and ``[B, S]`` belong to the rows
            and columns of this device, boolean arrays have the same shapes as bias. Lists of keys
            raise an error.
        axis_name: The mesh axis (or a tuple of axes) that the sequence is sharded over.
        layout: ``"contiguous"``: device r has the r-th part of the sequence. ``"zigzag"``: the
            layout of :func:`jax_memeff.zigzag`, in which a causal mask gives all devices equal
            work.
        method: ``"ring"``; ``"all_gather"``: every device gathers keys and values first, with fewer
            and larger transfers and kernels, and memory for the keys and values of the whole
            sequence; or ``"all_to_all"``: every device gets the whole sequence of N / n heads. Then
            N must be a multiple of n, and K a multiple or a divisor of it.
        return_residual: As in ``dot_product_attention``.
        return_max_logits: Likewise, of the whole sequence: every device gets the same ``[B, N]``.
        other arguments: As in ``dot_product_attention``, except:

            - ``is_causal`` and ``local_window_size`` count positions of the whole sequence, in
              natural order. A product of a part of the queries and a part of the keys is skipped if
              it is fully masked, and keys that no device needs are not sent.
            - ``query_seq_lengths`` and ``key_value_seq_lengths`` are ``[B]`` global lengths, the
              same on all devices.
            - ``score_mod`` and ``Mask.function`` get positions of the whole sequence, in natural
              order, and read the same arrays on every device.
            - ``offsets`` locate the batch and the heads of this device, for dropout, if these are
              sharded too. The ring sets the positions: ``query`` and ``key`` must be 0.
            - ``dropout_key`` is the same on all devices. With dropout, T and S (in zigzag layout,
              their halves) must be multiples of 16, except with ``"all_to_all"``.

    Returns:
        This device's rows of the output, ``[B, T, N, Hv]`` in query's dtype; with
        ``return_residual`` or ``return_max_logits``, a tuple of it, the logsumexp ``[B, T, N]`` and
        the largest scores ``[B, N]``, both in f32 (f64 for f64).

    Raises:
        ValueError: The axis is not bound, local lengths do not fit the layout, a bottom-right
            window is combined with lengths, or as ``dot_product_attention`` says.
        TypeError, jax_memeff.UnsupportedError: as ``dot_product_attention`` says.

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
    Context" (https://arxiv.org/abs/2310.01889), section 3.

    >>> import functools, jax, jax.numpy as jnp, jax_memeff
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> n = len(jax.devices())
    >>> mesh = Mesh(jax.devices(), ("sequence",))
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16 * n, 4, 8))
    >>> ring = functools.partial(
    ...     jax_memeff.ring_attention, axis_name="sequence", layout="zigzag", is_causal=True
    ... )
    >>> spec = P(None, "sequence")
    >>> sharded = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec))
    >>> out = sharded(*(jax_memeff.zigzag(x, 1, n) for x in (query, key, value)))
    >>> one_device = jax_memeff.dot_product_attention(query, key, value, is_causal=True)
    >>> bool(jnp.allclose(jax_memeff.unzigzag(out, 1, n), one_device, atol=1e-5))
    True
    """
    with_residual = flag("return_residual", return_residual)
    with_max_logits = flag("return_max_logits", return_max_logits)
    named = with_defaults(PaddedArguments, arguments)
    choice("layout", layout, LAYOUTS)
    choice("method", method, get_args(Method))
    devices = _devices(axis_name)
    projections, sizes, batched = checked(RING, query=query, key=key, value=value)
    batch, heads, rows, columns = (sizes[dim] for dim in "BNTS")
    by_heads = method == "all_to_all"
    scores_shape = (batch, heads, rows, devices * columns)
    longest = devices * rows, devices * columns
    _lengths_suit(axis_name, layout, rows, columns)
    _positions_fit(axis_name, longest)
    if by_heads:
        all_to_all.check_heads(axis_name, devices, heads, sizes["K"])
    _whole_columns(axis_name, "bias", bias, columns, devices)
    _whole_columns(axis_name, "mask", mask, columns, devices)
    _no_positions(axis_name, named["offsets"])
    is_array = mask is not None and not isinstance(mask, Mask)
    dtype, array = projections["query"].dtype, mask if is_array else None
    dim, key_heads = sizes["H"], sizes["K"]
    options, combined, arrays = canonical(dtype, dim, scores_shape, key_heads, bias, array, named)
    if not by_heads:
        _chunks_suit(axis_name, layout, rows, columns, options)
    _no_local_arrays(mask)
    combined &= padded_lengths(named, batch, longest, batched)
    if isinstance(mask, Mask):
        combined &= mask.without_block_masks()
        if mask.has_function():
            arrays["functions"] = functions.state(batch, heads, named["offsets"])
    combined = _canonical(combined, scores_shape, columns, longest, named["offsets"])
    _same_on_all_devices(axis_name, "query", combined.query_lengths)
    _same_on_all_devices(axis_name, "key", combined.key_lengths)
    options = dataclasses.replace(
        options, row_maxima=with_max_logits, has_whole_rows=method != "ring"
    )
    ring = Ring(axis_name, devices, layout, method, options)
    # The ring sets the positions.
    arrays["position"] = None
    operands = Operands(**projections, mask=combined, **arrays)

    def of_maxima(row_maxima: jax.Array) -> jax.Array:
        return lax.pmax(max_logits(row_maxima, operands), axis_name)

    return results(_attend(operands, ring), with_residual, batched, of_maxima)


def _attend(operands: Operands, ring: Ring) -> tuple[jax.Array, ...]:
    # The index makes all operands vary over the ring's axis, as the results do.
    index = lax.axis_index(ring.axis_name)
    operands, _ = compat.cast_to_common_varying_axes((operands, index))
    if ring.method == "all_to_all":
        return all_to_all.attention(operands, ring)
    bias = operands.bias
    if bias is None or bias.shape[3] != 1:
        return attention.attention(operands, ring)
    # A bias of one number per row shifts the row's logsumexp and maximum, and nothing else.
    alone = operands._replace(bias=None, sinks=None)
    out, lse, *row_maxima = attention.attention(alone, ring)
    bias = jnp.broadcast_to(bias, (*lse.shape[:1], lse.shape[2], lse.shape[1], 1))
    shift = jnp.swapaxes(bias[..., 0], 1, 2)
    masked = is_masked(shift) | jnp.isneginf(lse)
    out = jnp.where(masked[..., None], 0, out)
    lse, *row_maxima = (jnp.where(masked, -jnp.inf, x + shift) for x in (lse, *row_maxima))
    if operands.sinks is None:
        return out, lse, *row_maxima
    is_valid = valid_rows(operands, ring)
    joined, lse = sinks.joined(out.astype(lse.dtype), lse, operands.sinks[:, None], is_valid)
    return joined.astype(out.dtype), lse, *row_maxima


def _devices(axis_name: AxisName) -> int:
    try:
        hash(axis_name)
    except TypeError:
        raise TypeError(
            f"axis_name must be a mesh axis or a tuple of them, got {axis_name!r:.80} of type "
            f"{type(axis_name).__name__}; pass a tuple"
        ) from None
    try:
        return lax.axis_size(axis_name)
    except NameError:
        bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
        raise ValueError(
            f"axis_name: expected a mesh axis that the surrounding jax.shard_map makes manual, got "
            f"{axis_name!r}; the axes here are: {bound}. Call ring_attention inside jax.shard_map "
            f"over a mesh that has {axis_name!r}, and shard the sequence over it"
        ) from None


def _lengths_suit(axis_name: AxisName, layout: Layout, rows: int, columns: int) -> None:
    chunks = LAYOUTS[layout]
    for name, length in (("query", rows), ("key", columns)):
        if length % chunks:
            raise ValueError(
                f"{name}: layout {layout!r} needs a multiple of {chunks} positions on each device "
                f"of axis {axis_name!r}, got {length}; pad the sequence to a multiple of "
                f"{chunks} times the size of the axis, and mask the padding with "
                "key_value_seq_lengths"
            )


def _chunks_suit(
    axis_name: AxisName, layout: Layout, rows: int, columns: int, options: Options
) -> None:
    """Check that every chunk begins at a position that the call's features accept."""
    multiple, cause = options.position_multiple
    multiple *= LAYOUTS[layout]
    for name, length in (("query", rows), ("key", columns)):
        if length % multiple:
            raise ValueError(
                f"{name}: with {cause}, layout {layout!r} needs a multiple of {multiple} positions "
                f"on each device of axis {axis_name!r}, got {length}; pad the sequence, and mask "
                "the padding with key_value_seq_lengths"
            )


def _positions_fit(axis_name: AxisName, longest: tuple[int, int]) -> None:
    for name, length in zip(("query", "key"), longest, strict=True):
        if length > MOST_POSITION:
            raise ValueError(
                f"{name}: the devices of axis {axis_name!r} must have at most {MOST_POSITION} "
                f"positions together, got {length}"
            )


def _whole_columns(axis_name: AxisName, name: str, value: Any, columns: int, devices: int) -> None:
    """Refuse a bias or boolean mask whose columns are not broadcast and not of all devices."""
    shape = getattr(value, "shape", ())
    if value is None or isinstance(value, Mask) or not shape or shape[-1] in (1, devices * columns):
        return
    raise ValueError(
        f"{name}: expected 1 column, or those of all {devices} devices of axis {axis_name!r}, "
        f"{devices * columns} in natural order, got shape {tuple(shape)}; do not shard the last "
        f"dim of {name} over {axis_name!r}"
    )


def _same_on_all_devices(axis_name: AxisName, name: str, lengths: Any) -> None:
    axes = set(axis_name if isinstance(axis_name, tuple) else (axis_name,))
    if lengths is not None and compat.varying_axes(lengths) & axes:
        raise ValueError(
            f"{name} lengths: expected those of the whole sequence, the same on every device of "
            f"axis {axis_name!r}, got an array that differs over it; add up the lengths of the "
            f"parts with jax.lax.psum over {axis_name!r}, or do not shard them over it"
        )


def _no_positions(axis_name: AxisName, offsets: Offsets | None) -> None:
    for name in ("query", "key"):
        position: Any = getattr(offsets, name, 0)
        is_array = isinstance(position, jax.Array) or getattr(position, "ndim", 0) > 0
        if is_array or position != 0:
            got = f"an array of shape {position.shape}" if is_array else position
            raise ValueError(
                f"offsets.{name}: expected 0, got {got}; leave it out, because the device's index "
                f"along axis {axis_name!r} sets the positions"
            )


def _no_local_arrays(mask: Any) -> None:
    """Refuse lists of keys, and arrays of one device under ``|`` or ``~``: other devices have the
    other elements.
    """
    if isinstance(mask, Mask) and mask.key_lists:
        raise ValueError(
            "mask: Mask.keys is not supported in a ring, because the keys of a list are on several "
            "devices; gather keys and values (jax.lax.all_gather) and call dot_product_attention"
        )
    pending = list(mask.excluded) if isinstance(mask, Mask) else []
    while pending:
        other = pending.pop()
        pending += other.excluded
        for name, arrays in (("segments", other.segment_ids), ("boolean", other.booleans)):
            if arrays:
                raise ValueError(
                    f"mask: Mask.{name} under | or ~ is not supported in a ring, because every "
                    "device has only a part of its array; gather the array and read it in "
                    "Mask.function, or combine the masks with &"
                )


def _canonical(
    mask: Mask,
    scores_shape: tuple[int, int, int, int],
    columns: int,
    longest: tuple[int, int],
    offsets: Offsets | None,
) -> Mask:
    """The mask as the ring reads it: one top-left window, global lengths, local segment ids."""
    batch, heads, rows, _ = scores_shape
    of_lengths = dataclasses.replace(mask, segment_ids=(), booleans=())
    segments = Mask(segment_ids=mask.segment_ids)
    checked_mask(of_lengths, (batch, heads, *longest))
    checked_mask(segments, (batch, heads, rows, columns))
    checked_mask(Mask(booleans=mask.booleans), scores_shape)
    canonical = of_lengths.canonical(batch, *longest) & segments.canonical(batch, rows, columns)
    booleans = Mask(booleans=mask.booleans).canonical(batch, rows, columns)
    canonical = top_left(canonical & booleans, *longest)
    return compiled(canonical, Frame.of(canonical, longest, offsets))
