"""A call of ring attention on one device: its place in the ring, and the loop over its products.

A product is one block of keys with one block of rows (:mod:`jax_memeff._ring.schedule`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff import _compat as compat
from jax_memeff._blockwise.tiles import read_block, when
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.tiles import slice_tile
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._ring.schedule import (
    Layout,
    Product,
    Step,
    chunks_of_devices,
    steps,
    unzigzag,
    zigzag,
)

Method = Literal["ring", "all_gather", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static part of a call; hashable."""

    axis_name: Any
    devices: int
    layout: Layout
    method: Method
    options: Options
    is_differentiable: bool = False
    """Whether JAX can differentiate the passes, for forward mode and second derivatives. Packed
    transfers reinterpret bits, which have no derivative, and a loop whose length is data has no
    transpose, so a differentiable ring avoids both."""

    @property
    def chunks(self) -> np.ndarray:
        """The chunks of each device, int[devices, chunks]."""
        return chunks_of_devices(self.layout, self.devices)

    def shift(self, tree: Any, hops: int) -> Any:
        """The tree of the device ``hops`` places before this one, in one transfer."""
        if hops % self.devices == 0 or not jax.tree.leaves(tree):
            return tree
        pairs = [(rank, (rank + hops) % self.devices) for rank in range(self.devices)]
        send = functools.partial(lax.ppermute, axis_name=self.axis_name, perm=pairs)
        if self.is_differentiable:
            return jax.tree.map(send, tree)
        return _unpacked(send(_packed(tree)), tree)

    def gather(self, x: jax.Array) -> jax.Array:
        """The columns [B, S local, ...] of all devices, in natural order."""
        whole = lax.all_gather(x, self.axis_name, axis=1, tiled=True)
        return unzigzag(whole, 1, self.devices) if self.layout == "zigzag" else whole

    def scatter(self, x: jax.Array) -> jax.Array:
        """The transpose of ``gather``: the sum over all devices of this device's columns."""
        ordered = zigzag(x, 1, self.devices) if self.layout == "zigzag" else x
        return lax.psum_scatter(ordered, self.axis_name, scatter_dimension=1, tiled=True)


class Keys(NamedTuple):
    """The arrays that travel; each has one element per column."""

    key: jax.Array
    value: jax.Array
    segment_ids: tuple[jax.Array, ...]


class Sums(NamedTuple):
    """The running sums of the products: two pytrees."""

    rows: Any
    """Sums for the device's rows, which stay on the device."""
    keys: Any
    """Sums for the present columns, which travel with the keys."""


AddProduct = Callable[[Keys, Product, Sums], Sums]


@dataclasses.dataclass(frozen=True)
class RingCall:
    """One call: its local operands, and the sizes of a product.

    Unlike in an unsharded call, lengths count global positions, and bias and boolean masks have the
    columns of all devices.
    """

    operands: Operands
    ring: Ring

    @property
    def keys(self) -> Keys:
        ids = tuple(key_ids for _, key_ids in self.operands.mask.segment_ids)
        return Keys(self.operands.key, self.operands.value, ids)

    @property
    def rows(self) -> int:
        return self.operands.query.shape[1] // self.ring.chunks.shape[1]

    @property
    def columns(self) -> int:
        length = self.operands.key.shape[1]
        if self.ring.method == "all_gather":
            return length * self.ring.devices
        return length // self.ring.chunks.shape[1]

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
        """Zeros that vary over the same mesh axes as the operands; by default accumulators."""
        query = self.operands.query
        dtype = score_dtype(query.dtype) if dtype is None else dtype
        return compat.cast_to_common_varying_axes((jnp.zeros(shape, dtype), query))[0]

    def part(self, keys: Keys, product: Product) -> Operands:
        """The operands of one product."""
        operands, mask = self.operands, self.operands.mask
        ids = zip(mask.segment_ids, keys.segment_ids, strict=True)
        part_mask = Mask(
            top_left=mask.top_left,
            query_lengths=_lengths(mask.query_lengths, product.first_row, self.rows),
            key_lengths=_lengths(mask.key_lengths, product.first_column, self.columns),
            segment_ids=tuple(
                (self.of_rows(query_ids, product), self.of_columns(key_ids, product))
                for (query_ids, _), key_ids in ids
            ),
            booleans=tuple(self.of_scores(array, product) for array in mask.booleans),
            functions=mask.functions,
            captured=mask.captured,
            traced_windows=mask.traced_windows,
        )
        part = operands._replace(
            query=self.of_rows(operands.query, product),
            key=self.of_columns(keys.key, product),
            value=self.of_columns(keys.value, product),
            bias=self.of_scores(operands.bias, product),
            mask=part_mask,
            position=Position(product.first_row, product.first_column),
            sinks=None,  # rows start with them, before any product
        )
        return compat.cast_to_common_varying_axes(part)

    def of_rows(self, x: Any, product: Product) -> Any:
        """The rows of a product in [B, T local, ...]; None stays None, here and below."""
        return read_block(x, product.row, self.rows, 1)

    def of_columns(self, x: Any, product: Product) -> Any:
        """The columns of a product in [B, S present, ...]."""
        return read_block(x, product.column, self.columns, 1)

    def of_scores(self, x: Any, product: Product) -> Any:
        """The scores of a product in [1|B, 1|N, 1|T local, 1|S global]."""
        start, shape = (product.row, product.first_column), (self.rows, self.columns)
        return None if x is None else slice_tile(x, start, shape)

    def run(self, add_product: AddProduct, sums: Sums) -> Sums:
        """Add every product; the returned ``sums.keys`` belong to the device's own columns."""
        if self.ring.method == "all_gather":
            return self._run_gathered(add_product, sums)
        return self._run_ring(add_product, sums)

    def _run_gathered(self, add_product: AddProduct, sums: Sums) -> Sums:
        keys = jax.tree.map(self.ring.gather, self.keys)
        rank = lax.axis_index(self.ring.axis_name)
        gathered = jax.tree.map(
            lambda x: self.zeros((x.shape[0], self.columns, *x.shape[2:])), sums.keys
        )
        sums = sums._replace(keys=gathered)
        for index, chunks in enumerate(self.ring.chunks.T):
            row, first_row = index * self.rows, jnp.asarray(chunks * self.rows, jnp.int32)[rank]
            product = Product(*map(jnp.int32, (row, 0, first_row, 0)))
            sums = add_product(keys, product, sums)
        return sums._replace(keys=jax.tree.map(self.ring.scatter, sums.keys))

    def _run_ring(self, add_product: AddProduct, sums: Sums) -> Sums:
        ring, operands = self.ring, self.operands
        lengths = operands.query.shape[1], operands.key.shape[1]
        plan = steps(ring.layout, ring.devices, *lengths, operands.mask.top_left)
        if not plan:
            return sums
        rank = lax.axis_index(ring.axis_name)
        no_keys = sums.keys

        def step(carry: tuple[Keys, Sums], plan: Step, kind: _StepKind) -> tuple[Keys, Sums]:
            keys, sums = carry
            # The transfer does not depend on the products, so XLA can overlap them. It sends the
            # keys of the next step, and receives the sums of earlier devices for these keys.
            if kind.next_hops == kind.last_hops:
                following, arriving = ring.shift((keys, sums.keys), kind.next_hops)
            else:
                following = ring.shift(keys, kind.next_hops)
                arriving = ring.shift(sums.keys, kind.last_hops)
            products = [x[rank] for x in plan.products]

            def compute(index: Any, sums: Sums) -> Sums:
                return add_product(keys, Product(*(x[index] for x in products)), sums)

            sums = sums._replace(keys=no_keys)
            count = plan.counts[rank]
            if kind.count is None and not ring.is_differentiable:
                sums = lax.fori_loop(0, count, compute, sums)
            elif kind.count is None:
                for index in range(kind.products):
                    sums = when(index < count, functools.partial(compute, index), sums)
            else:
                for index in range(kind.count):
                    sums = compute(index, sums)
            return following, sums._replace(keys=jax.tree.map(jnp.add, arriving, sums.keys))

        carry = ring.shift(self.keys, plan[0].hops), sums
        for kind, same_kind in _loops(plan):
            carry = _repeat(functools.partial(step, kind=kind), carry, same_kind)
        sums = carry[1]
        rounded = jax.tree.map(lambda x: x.astype(operands.key.dtype), sums.keys)
        return sums._replace(keys=ring.shift(rounded, -plan[-1].hops))


class _StepKind(NamedTuple):
    """The common properties of steps that run in one loop."""

    last_hops: int
    """Hops from the previous step."""
    next_hops: int
    """Hops to the next step."""
    count: int | None
    """Products of every device; None if devices have different numbers."""
    products: int
    """The largest number of products."""


def _loops(plan: tuple[Step, ...]) -> list[tuple[_StepKind, list[Step]]]:
    """The steps, grouped into runs of consecutive steps of one kind."""
    between = [after.hops - before.hops for before, after in itertools.pairwise(plan)]
    kinds = (
        _StepKind(last, following, step.count, step.products.row.shape[1])
        for last, following, step in zip([0, *between], [*between, 0], plan, strict=True)
    )
    pairs = itertools.groupby(zip(kinds, plan, strict=True), key=lambda pair: pair[0])
    return [(kind, [step for _, step in same_kind]) for kind, same_kind in pairs]


def _repeat(body: Callable[[Any, Any], Any], carry: Any, inputs: list[Any]) -> Any:
    """``body(carry, input)`` for each of the inputs, in one loop."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    if len(inputs) == 1:
        return body(carry, jax.tree.map(lambda x: x[0], stacked))
    return lax.scan(lambda carry, x: (body(carry, x), None), carry, stacked)[0]


def _lengths(lengths: jax.Array | None, first: jax.Array, size: int) -> jax.Array | None:
    """The number of the ``size`` positions from ``first`` on that are within global lengths."""
    return None if lengths is None else jnp.clip(lengths - first, 0, size)


def _packed(tree: Any) -> jax.Array:
    """The elements of all arrays, concatenated, for one transfer; as bits if the dtypes differ.

    Transfers overlap the kernels of a step. By default XLA keeps only one transfer in flight, so of
    several transfers only one would overlap, and the devices would wait for the others.

    >>> _packed({"key": jnp.arange(2), "value": jnp.arange(4).reshape(2, 2)}).tolist()
    [0, 1, 0, 1, 2, 3]
    >>> _packed([jnp.zeros(4, "bfloat16"), jnp.zeros(3, "float32")])
    Array([0, 0, 0, 0, 0], dtype=uint32)
    """
    leaves = jax.tree.leaves(tree)
    unit = _unit(leaves)
    return jnp.concatenate([_in_units(leaf.ravel(), unit) for leaf in leaves])


def _unpacked(packed: jax.Array, like: Any) -> Any:
    """The inverse of :func:`_packed`; ``like`` is a tree of the same shapes and dtypes.

    >>> tree = {"key": jnp.arange(2), "value": jnp.ones((1, 3), "bfloat16")}
    >>> jax.tree.map(lambda x, y: bool((x == y).all()), _unpacked(_packed(tree), tree), tree)
    {'key': True, 'value': True}
    """
    leaves, structure = jax.tree.flatten(like)
    first, found = 0, []
    for leaf in leaves:
        last = first + leaf.size * leaf.dtype.itemsize // packed.dtype.itemsize
        part = lax.slice_in_dim(packed, first, last)
        found.append(_in_units(part, leaf.dtype).reshape(leaf.shape))
        first = last
    return jax.tree.unflatten(structure, found)


def _unit(leaves: Sequence[jax.Array]) -> Any:
    """A dtype in which the bits of every array can be read."""
    dtypes = {leaf.dtype for leaf in leaves}
    if len(dtypes) == 1:
        return dtypes.pop()
    size = math.gcd(4, *(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    return jnp.dtype(f"uint{8 * size}")


def _in_units(x: jax.Array, dtype: Any) -> jax.Array:
    """The bits of a flat array as a flat array of another dtype."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, dtype).ravel()
