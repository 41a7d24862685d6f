"""Test calls of attention: their arrays, running them, and comparing with the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import packing

from jax_memeff._call import dropout
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import DropoutState, NeedsGrad, Operands, QkvPackedOperands
from jax_memeff._call.options import Divisors, Options
from jax_memeff._call.scaling import Scaling


class Zeros:
    """Has the methods of a generator of NumPy that :meth:`Case.arrays` calls."""

    def standard_normal(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        return np.zeros(shape, dtype)

    def random(self, shape: Any) -> np.ndarray:
        return np.zeros(shape)

    def integers(self, *_: int, size: Any, dtype: Any = np.int64) -> np.ndarray:
        return np.zeros(size, dtype)

    def permuted(self, x: np.ndarray, axis: int) -> np.ndarray:
        return x


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and features of one call; ``lengths`` are (query, key) pairs, one per batch index."""

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
    bias: str | None = None
    """A letter of "BNTS" for each full dim and 1 for each broadcast one: "1NTS"."""
    bias_dtype: str | None = None
    segments: int = 0
    boolean: tuple[str, ...] = ()
    block: int | None = None
    """Boolean masks and unsorted ids are constant in blocks of this many positions."""
    keys: tuple[str, int] | None = None
    """Lists of keys: a letter of "BKT" for each full dim and 1 for each broadcast one, and the
    number of entries: distinct, in any order, some of them no key."""
    dropout: float = 0.0
    precision: Literal["tf32x3", "tf32"] = "tf32x3"
    position: tuple[int, int] | tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The global positions of row 0 and column 0, for all batch indices or for each."""
    packed: bool = False
    """Whether the sequences of ``lengths`` are packed, with gaps between them."""
    projections: bool = False
    """Whether query, key and value are one array."""
    deterministic: bool = False
    shared: tuple[tuple[str, int, int], ...] = ()
    """Operands that a ``vmap`` broadcasts: name, number of batch indices, and divisor. "boolean" is
    the first boolean mask.
    """
    bias_gradient: int = 0
    """The number of batch indices per gradient of a broadcast bias; see ``Divisors``."""
    sign: int = 0
    """If it is 1 or -1, all scores have this sign, and the maximum of each row rises by many powers
    of two from tile to tile, in the order of the forward.
    """
    sinks: bool = False
    """Whether there are sinks. If there are several heads, one has a sink of -inf."""
    row_maxima: bool = False
    """The forward also returns the largest score of each row."""
    mask_seed: int | None = None
    """The seed of bias and element masks; by default they are drawn after query, key and value."""

    def __str__(self) -> str:
        words = [
            f"B{self.B}T{self.T}S{self.S}N{self.N}K{self.K}H{self.H}v{self.value_dim}",
            self.dtype,
            self.mask_name,
        ]
        words += ["softcap"] if self.soft_cap else []
        words += [f"scale{self.scale:g}"] if self.scale is not None else []
        words += ["packed" if self.packed else "lengths"] if self.lengths else []
        words += [f"bias{self.bias}{self.bias_dtype or ''}"] if self.bias else []
        words += [f"{self.segments}segments"] if self.segments else []
        words += [f"mask{dims}" for dims in self.boolean]
        words += [f"blocks{self.block}"] if self.block else []
        words += ["{}keys{}".format(*self.keys)] if self.keys else []
        words += [f"dropout{self.dropout:g}"] if self.dropout else []
        words += [self.precision] if self.precision != "tf32x3" else []
        first = ["_".join(map(str, np.atleast_1d(x))) for x in self.position or ()]
        words += ["at" + "x".join(first)] if first else []
        words += ["projections"] if self.projections else []
        words += ["deterministic"] if self.deterministic else []
        words += [f"{elements}by{divisor}{name}" for name, elements, divisor in self.shared]
        words += [f"sum{self.bias_gradient}"] if self.bias_gradient else []
        words += [f"sign{self.sign}"] if self.sign else []
        words += ["sinks"] if self.sinks else []
        words += ["maxima"] if self.row_maxima else []
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
        threshold = dropout.threshold(self.dropout)
        return Options(
            Scaling(scale, self.soft_cap),
            dropout_threshold=threshold,
            precision=self.precision,
            deterministic_backward=self.deterministic,
            row_maxima=self.row_maxima,
            divisors=self.divisors,
        )

    @property
    def divisors(self) -> Divisors:
        own = {name: divisor for name, _, divisor in self.shared}
        if "boolean" in own:
            own["mask.booleans.0"] = own.pop("boolean")
        return Divisors.of(own, {"bias": self.bias_gradient})

    @property
    def needs_grad(self) -> NeedsGrad:
        """The gradients that kernels compute; the gradient of a bias per row needs no kernel."""
        needs_bias = self.bias is not None and self.bias[3] == "S"
        return NeedsGrad(True, True, True, bias=needs_bias, sinks=self.sinks)

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(1 if dim == "1" else getattr(self, dim) for dim in dims)

    def arrays(self, seed: int | None = 0) -> tuple[Operands, Any, Any]:
        """Operands, dout and dlse (or None), NumPy in the case's dtype, all finite.

        Arrays that a vmap broadcasts are repeated here for each batch index. Without a seed the
        numbers are zeros, which is much faster: shapes and dtypes alone decide about kernels.
        """
        rng: Any = Zeros() if seed is None else np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)

        def draw(*shape, dtype: Any = dtype) -> Any:
            return rng.standard_normal(shape, np.float32).astype(dtype)

        operands = Operands(
            *self.with_sign(
                draw(self.B, self.T, self.N, self.H), draw(self.B, self.S, self.K, self.H)
            ),
            draw(self.B, self.S, self.K, self.value_dim),
            *self.draw_bias_and_mask(
                rng
                if self.mask_seed is None or seed is None
                else np.random.default_rng(self.mask_seed)
            ),
            None,
            None if self.position is None else self.global_position,
        )
        operands = self.with_shared(operands, lambda x, n, divisor: x[self.indices(n, divisor)])
        if self.dropout:
            operands = operands._replace(dropout=self.draw_dropout(rng))
        dout = draw(self.B, self.T, self.N, self.value_dim)
        dlse = draw(self.B, self.T, self.N, dtype=np.float32) if self.lse_gradient else None
        if self.sinks:
            operands = operands._replace(sinks=self.draw_sinks(rng))
        return operands, dout, dlse

    def draw_sinks(self, rng: np.random.Generator) -> Any:
        sinks = 2 * rng.standard_normal((1, self.N), np.float32)
        sinks[0, 1:2] = -np.inf
        return sinks

    def with_sign(self, query: Any, key: Any) -> tuple[Any, Any]:
        if not self.sign:
            return query, key
        position = np.arange(self.S, dtype=np.float32)[:, None, None] / self.S
        size = 1 + 7 * (1 - position if self.sign > 0 else position)
        return abs(query), (self.sign * size * abs(key)).astype(key.dtype)

    def indices(self, elements: int, divisor: int) -> np.ndarray:
        """The batch index of an array that each batch index of the call reads."""
        return np.arange(self.B) // divisor % elements

    def with_shared(self, operands: Operands, function: Any) -> Operands:
        """The arrays, with ``function(array, elements, divisor)`` for each that is broadcast."""
        for name, elements, divisor in self.shared:
            if name == "boolean":
                first, *others = operands.mask.booleans
                booleans = function(first, elements, divisor), *others
                mask = dataclasses.replace(operands.mask, booleans=booleans)
                operands = operands._replace(mask=mask)
            else:
                array = function(getattr(operands, name), elements, divisor)
                operands = operands._replace(**{name: array})
        return operands

    @property
    def global_position(self) -> Position:
        first: Any = np.array(self.position, np.int32)
        return Position(first[0], first[1])

    def draw_dropout(self, rng: np.random.Generator) -> DropoutState:
        words: Any = rng.integers(2**32, size=(self.B, 2), dtype=np.uint32)
        batch_base: Any = np.arange(self.B, dtype=np.uint32) * np.uint32(self.N)
        head_index: Any = np.arange(self.N, dtype=np.uint32)
        return DropoutState(words, batch_base, head_index)

    def draw_bias_and_mask(self, rng: np.random.Generator) -> tuple[Any, Mask]:
        bias = None if self.bias is None else self.draw_bias(rng)
        return bias, self.full_mask & self.element_mask(rng)

    def draw_bias(self, rng: np.random.Generator) -> Any:
        """A bias of normal numbers, with -inf (or what counts as -inf) in some elements and whole
        rows.
        """
        bias = rng.standard_normal(self.shape(self.bias or ""), np.float32)
        bias[rng.random(bias.shape) < 0.02] = -np.inf
        bias[rng.random(bias.shape[:3]) < 0.04] = -np.inf
        if (dtype := jnp.dtype(self.bias_dtype or self.dtype)) != np.float16:
            bias[rng.random(bias.shape) < 0.02] = -2e38
        return bias.astype(dtype)

    def element_mask(self, rng: np.random.Generator) -> Mask:
        mask = Mask()
        for index in range(self.segments):
            # The first ids are sorted, with negative ones among them; the others are unsorted.
            ids = [
                self.in_blocks(rng.integers(-1, 3, size=(self.B, length)).astype(np.int32))
                for length in (self.T, self.S)
            ]
            mask &= Mask.segments(*(ids if index else map(np.sort, ids)))
        for dims in self.boolean:
            probability = 0.3 if self.block else 0.8
            drawn = rng.random(self.shape(dims)) < probability
            mask &= Mask.boolean(self.in_blocks(self.in_blocks(drawn), axis=2))
        if self.keys:
            dims, count = self.keys
            others = max(count // 4, count - self.S, 1)
            entries = np.arange(-others, self.S + others, dtype=np.int32)
            drawn = rng.permuted(
                np.broadcast_to(entries, (*self.shape(dims), entries.size)), axis=3
            )
            mask &= Mask.keys(drawn[..., :count], unique_indices=True)
        return mask

    def in_blocks(self, array: Any, axis: int = -1) -> Any:
        """The array, constant in blocks of ``block`` elements along ``axis``."""
        if self.block is None or array.shape[axis] == 1:
            return array
        position = np.arange(array.shape[axis])
        return np.take(array, position - position % self.block, axis)


def poisoned(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """The arrays with NaN beyond the lengths."""
    if case.lengths is None:
        return operands, dout, dlse
    query, key, value, dout = (np.array(x) for x in (*operands[:3], dout))
    bias = None if operands.bias is None else np.array(operands.bias)
    if bias is not None:
        longest = tuple(map(max, zip(*case.lengths, strict=True)))
        for b in range(len(bias)):
            query_length, key_length = longest if len(bias) == 1 else case.lengths[b]
            if bias.shape[2] > 1:
                bias[b, :, query_length:] = np.nan
            if bias.shape[3] > 1:
                bias[b, :, :, key_length:] = np.nan
    dlse = None if dlse is None else np.array(dlse)
    for b, (query_length, key_length) in enumerate(case.lengths):
        for array in (query, dout) if dlse is None else (query, dout, dlse):
            array[b, query_length:] = np.nan
        for array in (key, value):
            array[b, key_length:] = np.nan
    return operands._replace(query=query, key=key, value=value, bias=bias), dout, dlse


def passed(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple[Operands, Any, Any]:
    """The arrays that a call gets: NaN beyond the lengths, and packed if the case asks for it.

    An array that a vmap broadcasts has no NaN, because each of its batch indices has several
    lengths.
    """
    dirty = poisoned(case, operands, dout, dlse)
    arrays, *cotangents = packing.packed(case, *dirty) if case.packed else dirty
    for name in {name for name, _, _ in case.shared} - {"boolean"}:
        arrays = arrays._replace(**{name: getattr(operands, name)})
    own = case.with_shared(arrays, lambda x, n, divisor: x[: n * divisor : divisor])
    return own, *cotangents


def run_case(case: Case, operands: Operands, dout: Any, dlse: Any) -> tuple:
    """The results of :func:`run` in the shapes of the arrays of the case."""
    arrays, *cotangents = passed(case, operands, dout, dlse)
    if case.projections:
        together: Any = np.stack(arrays[:3], 2)
        operands_together = QkvPackedOperands(together, *arrays[3:7], arrays.sinks)
        results, (dqkv, *others) = run(operands_together, case.options, *cotangents)
        return results, (*jnp.unstack(dqkv, axis=2), *others)
    run_operands = run_shared if case.shared else run
    results = run_operands(arrays, case.options, *cotangents)
    return packing.unpacked(case, results) if case.packed else results


def run(operands: Operands | QkvPackedOperands, options: Options, dout: Any, dlse: Any) -> tuple:
    """(out, lse), (dq, dk, dv, dbias, dsinks) of one jitted program; None of what is absent.

    Row maxima follow lse if the options ask for them.
    """
    from jax_memeff._op import vjp

    operands, dout, dlse = jax.device_put((operands, dout, dlse))
    return _run(operands, options, dout, dlse, vjp.attention)


@functools.partial(jax.jit, static_argnums=1)
def run_shared(operands: Operands, options: Options, dout: Any, dlse: Any) -> tuple:
    """As :func:`run` through the primitives, whose gradients of broadcast arrays have the whole
    batch.
    """
    from jax_memeff._op import primitives, vjp

    out, lse, *maxima = primitives.forward(operands, options)
    needs_grad = NeedsGrad(
        True, True, True, bias=operands.bias is not None, sinks=operands.sinks is not None
    )
    gradients = vjp.cotangents(operands, options, (out, lse), dout, dlse, needs_grad)
    *arrays, _ = gradients  # without captured arrays
    return (out, lse, *maxima), tuple(arrays)


@functools.partial(jax.jit, static_argnums=(1, 4))
def _run(operands, options, dout, dlse, attention):
    arrays = (*operands._fields[: operands._fields.index("bias") + 1], "sinks")

    def forward(differentiable):
        out, lse, *maxima = attention(operands._replace(**differentiable), options)
        return (out, lse) if dlse is not None else out, maxima

    given = {name: getattr(operands, name) for name in arrays}
    results, transpose, maxima = jax.vjp(forward, given, has_aux=True)
    (gradients,) = transpose(dout if dlse is None else (dout, dlse))
    out, lse = results if dlse is not None else (results, None)
    return (out, lse, *maxima), tuple(gradients[name] for name in arrays)
