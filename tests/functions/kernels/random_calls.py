"""Random calls with functions, in random shapes, and their definition in dense JAX.

The definition shares no code with the package but the counters of dropout. Everything that a call
must not read is NaN: elements of captured arrays that no valid score reads, rows beyond the
lengths, gaps between packed sequences, and the memory before and after each array.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from packing import Packing
from random_functions import FUNCTIONS, MASKS, Arrays, Index, Sizes, score_function

import jax_memeff
from jax_memeff import Mask
from jax_memeff._call import dropout

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""The allowed relative error in the Frobenius norm."""

DROPOUT_KEY = jax.random.key(5)
RATE, CAP = 0.25, 3.0

AXES: dict[str, tuple[Any, ...]] = {
    "function": tuple(FUNCTIONS),
    "mask": tuple(MASKS),
    "layout": ("dense", "lengths", "packed", "vmap", "decode"),
    "head_dims": ((64, 64), (128, 128), (256, 256), (192, 128), (320, 320), (40, 72)),
    "dtype": ("bfloat16", "float16", "float32"),
    "grouped": (False, True),
    "bias": (False, True),
    "dropout": (False, True),
    "soft_cap": (False, True),
    "sinks": (False, True),
    "deterministic": (False, True),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A kind of call, and the seed of its sizes and numbers."""

    function: str
    mask: str
    layout: str
    head_dims: tuple[int, int]
    dtype: str
    grouped: bool
    bias: bool
    dropout: bool
    soft_cap: bool
    sinks: bool
    deterministic: bool
    seed: int = 0

    def __str__(self) -> str:
        flags = ("grouped", "bias", "dropout", "soft_cap", "sinks", "deterministic")
        sizes = self.sizes
        words = [self.function, self.mask, self.layout, "H{}v{}".format(*self.head_dims)]
        words += [self.dtype, *(name for name in flags if getattr(self, name))]
        words += [f"B{sizes.B}T{sizes.T}S{sizes.S}N{sizes.N}K{sizes.K}", f"seed{self.seed}"]
        return "-".join(words)

    @functools.cached_property
    def sizes(self) -> Sizes:
        rng = np.random.default_rng([self.seed, 1])
        B, K = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        N = K * (int(rng.integers(2, 5)) if self.grouped else 1)
        decode = self.layout == "decode"
        T = int(rng.integers(1, 5) if decode else rng.integers(20, 300))
        S = int(rng.integers(200, 2500) if decode else rng.integers(20, 300))
        rows, columns = (T,) * B, (S,) * B
        if self.layout in ("lengths", "packed"):
            rows = tuple(rng.integers(T // 2, T + 1, B).tolist())
            columns = tuple(rng.integers(S // 2, S + 1, B).tolist())
        return Sizes(B, T, S, N, K, rows, columns)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """The definition of the mask, bool[B, N, T, S]."""
        s = self.sizes
        index: Index = np.ix_(*map(np.arange, (s.B, s.N, s.T, s.S)))  # type: ignore[assignment]
        found = MASKS[self.mask].valid(s, index) & s.valid(index[0], index[2], index[3])
        return np.broadcast_to(found, (s.B, s.N, s.T, s.S))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays with finite numbers where the call may read, and NaN elsewhere."""
        s, (H, Hv) = self.sizes, self.head_dims
        rng = np.random.default_rng([self.seed, 2])
        shapes: dict[str, tuple[int, ...]] = {
            "query": (s.B, s.T, s.N, H),
            "key": (s.B, s.S, s.K, H),
            "value": (s.B, s.S, s.K, Hv),
        }
        shapes |= {"bias": (s.B, s.N, s.T, s.S)} if self.bias else {}
        found = {name: rng.standard_normal(x).astype(self.dtype) for name, x in shapes.items()}
        for name, lengths in {"query": s.rows, "key": s.columns, "value": s.columns}.items():
            for b, length in enumerate(lengths):
                found[name][b, length:] = np.nan
        if self.sinks:
            found["sinks"] = rng.standard_normal(s.N).astype(np.float32)
        own = FUNCTIONS[self.function]
        indices = own.indices(s, tuple(np.nonzero(self.valid)))  # type: ignore[arg-type]
        for name, shape in own.shapes(s).items():
            found[name] = np.full(shape, np.nan, np.float32)
            found[name][indices[name]] = rng.standard_normal(shape).astype(np.float32)[
                indices[name]
            ]
        return found

    def cotangents(self, draw: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents of output and logsumexp, in float64 with the precision of the dtype."""
        s, rng = self.sizes, np.random.default_rng([self.seed, 3 + draw])
        rows = (*((2,) if self.layout == "vmap" else ()), s.B, s.T, s.N)
        dout, dlse = (rng.standard_normal(x) for x in ((*rows, self.head_dims[1]), rows))
        return tuple(x.astype(self.dtype).astype(np.float64) for x in (dout, dlse))  # type: ignore

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        return {
            "mask": MASKS[self.mask].mask(self.sizes),
            "score_mod": score_function(self.function, self.sizes, arrays),
            "bias": arrays.get("bias"),
            "sinks": arrays.get("sinks"),
            "logits_soft_cap": CAP if self.soft_cap else None,
            "dropout_rate": RATE if self.dropout else 0.0,
            "dropout_key": DROPOUT_KEY if self.dropout else None,
            "return_residual": True,
            "deterministic_backward": self.deterministic,
        }

    def ours(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Output [B, T, N, Hv] and logsumexp [B, T, N]."""
        if self.layout == "vmap":
            return vmapped(self._dense, arrays)
        return self._packed(arrays) if self.layout == "packed" else self._dense(arrays)

    def _dense(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        arguments = self.arguments(arrays)
        if self.layout == "lengths":
            arguments["mask"] &= self._lengths
        return jax_memeff.dot_product_attention(
            arrays["query"], arrays["key"], arrays["value"], **arguments
        )

    @property
    def _lengths(self) -> Mask:
        return Mask.lengths(np.array(self.sizes.rows), np.array(self.sizes.columns))

    def _packed(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """The sequences one after the other, with NaN in the gaps."""
        s = self.sizes
        rows, columns = _with_gaps(s.rows, s.T), _with_gaps(s.columns, s.S)

        arguments = self.arguments(arrays)
        arguments["mask"] &= self._lengths
        varlen_attention: Any = jax_memeff.varlen_attention
        out, lse = varlen_attention(
            _packed(arrays["query"], rows),
            _packed(arrays["key"], columns),
            _packed(arrays["value"], columns),
            *(np.array([*p.starts, p.tokens - _GAP], np.int32) for p in (rows, columns)),
            s.T,
            s.S,
            **arguments,
        )
        places = np.stack([np.minimum(x + np.arange(s.T), rows.tokens - 1) for x in rows.starts])
        inside = (np.arange(s.T) < np.array(s.rows)[:, None])[..., None]
        return jnp.where(inside[..., None], out[places], 0), jnp.where(
            inside, lse[places], -jnp.inf
        )

    def defined(
        self, arrays: Arrays, *, constant_normalizer: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Output and logsumexp by the definition, in the dtype of the arrays, which must be finite.

        A constant normalizer passes no derivative of the output.
        """
        run = functools.partial(self._defined, constant_normalizer)
        return vmapped(run, arrays) if self.layout == "vmap" else run(arrays)

    def _defined(self, constant_normalizer: bool, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        s = self.sizes
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        key, value = (jnp.repeat(x, s.N // s.K, 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * self.head_dims[0] ** -0.5
        if self.soft_cap:
            scores = CAP * jnp.tanh(scores / CAP)
        valid: Any = self.valid
        # Masked elements read what a valid element reads.
        allowed = [int(x[0]) if x.size else 0 for x in np.nonzero(valid)]
        grid = np.meshgrid(*map(np.arange, valid.shape), indexing="ij")
        index = tuple(np.where(valid, x, own) for x, own in zip(grid, allowed, strict=True))
        function = FUNCTIONS[self.function]
        elements = {
            name: arrays[name][own]
            for name, own in function.indices(s, index).items()  # type: ignore[arg-type]
        }
        scores = function.score(scores, elements | {"distance": index[3] - index[2]})
        valid = valid & (scores > -jnp.inf)
        scores = jnp.where(valid, scores, 0) + arrays.get("bias", 0)
        sinks = arrays.get("sinks", jnp.full(s.N, -jnp.inf))
        in_rows = (np.arange(s.T) < np.array(s.rows)[:, None])[:, None, :, None]
        sinks = jnp.where(in_rows, sinks[:, None, None].astype(scores.dtype), -jnp.inf)
        live = valid.any(-1, keepdims=True) | (sinks > -jnp.inf)
        scores = jnp.where(valid, scores, jnp.where(live, -jnp.inf, 0))
        lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], -1), -1, keepdims=True)
        normalizer = jax.lax.stop_gradient(lse) if constant_normalizer else lse
        weights = jnp.where(valid, jnp.exp(scores - normalizer), 0)
        if self.dropout:
            with jax.ensure_compile_time_eval():
                state = jax.tree.map(np.asarray, dropout.state(DROPOUT_KEY, s.B, s.N))
            threshold = dropout.threshold(RATE)
            kept = oracle.kept_elements(state, threshold, s.T, s.S, None)
            weights = weights * kept * (256 / (256 - threshold))
        out = jnp.einsum("bnts,bsnh->btnh", weights, value)
        return out, jnp.where(live, lse, -jnp.inf)[..., 0].swapaxes(1, 2)


_GAP = 7


def _with_gaps(lengths: tuple[int, ...], longest: int) -> Packing:
    """Starts with gaps before the first sequence, after the last one, and after some others."""
    between = (min(_GAP, longest - length) for length in lengths[:-1])
    return Packing(lengths, (_GAP, *between, _GAP))


def _packed(x: jax.Array, packing: Packing) -> jax.Array:
    parts = []
    for gap, own in itertools.zip_longest(packing.gaps, zip(x, packing.lengths, strict=True)):
        parts.append(jnp.full((gap, *x.shape[2:]), jnp.nan, x.dtype))
        if own is not None:
            parts.append(own[0][: own[1]])
    return jnp.concatenate(parts)


def vmapped(function: Any, arrays: Arrays) -> Any:
    """A vmap over two queries and two of each captured array, with one key and bias."""
    axes = {name: None if name in ("key", "bias") else 0 for name in arrays}
    two = {name: x if axes[name] is None else jnp.stack([x, -x / 2]) for name, x in arrays.items()}
    return jax.vmap(function, in_axes=(axes,))(two)


def drawn(kinds: int = 100, sizes: int = 5, seed: int = 0) -> list[Call]:
    """Draws ``kinds`` kinds of calls, each in ``sizes`` sizes, which share most of their kernels.

    Every pair of values of two axes occurs: each step takes the one of 50 random kinds that has the
    most new pairs.
    """
    rng = np.random.default_rng(seed)
    seen: set[Any] = set()
    found = []
    for kind in range(kinds):
        choices = rng.integers([len(values) for values in AXES.values()], size=(50, len(AXES)))
        candidates = [
            tuple((name, AXES[name][i]) for name, i in zip(AXES, own, strict=True))
            for own in choices.tolist()
        ]
        best = max(candidates, key=lambda own: len({*itertools.combinations(own, 2)} - seen))
        seen |= {*itertools.combinations(best, 2)}
        found += [Call(**dict(best), seed=sizes * kind + i) for i in range(sizes)]
    return found


def covering(calls: list[Call]) -> list[Call]:
    """A few small calls in which every value of every axis occurs."""
    small = [call for call in calls if call.sizes.B * call.sizes.N * call.sizes.S < 1500]
    missing = {(name, value) for name, values in AXES.items() for value in values}
    found = []
    while missing:
        best = max(small, key=lambda call: len({*dataclasses.asdict(call).items()} & missing))
        missing -= {*dataclasses.asdict(best).items()}
        found.append(best)
    return found
