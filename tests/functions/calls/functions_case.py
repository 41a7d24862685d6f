"""Calls with functions of the user, and their definition in dense JAX.

The definition shares no code with the package but the counters of dropout: it calls the user's
function once for each element, by ``jax.vmap``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, dot_product_attention
from jax_memeff._call import dropout

B, N, T, S, H, Hv = 2, 4, 32, 32, 8, 6
LENGTHS = np.array([20, 32])
DROPOUT_KEY = jax.random.key(5)
RATE = 0.25
WINDOW = 7

Arrays = dict[str, jax.Array]
Function = Callable[[Arrays], tuple[jax.Array, jax.Array]]
"""A function from arrays to output [B, T, N, Hv] and logsumexp [B, T, N]."""

SCORE_FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[[Arrays], Any] | None]] = {
    "alibi": (
        ("slopes",),
        lambda a: lambda s, b, h, q, k: s + a["slopes"][h] * (k - q),
    ),
    "table": (
        ("table",),
        lambda a: lambda s, b, h, q, k: s + a["table"][h, q - k + S],
    ),
    "gain": (
        ("columns", "gain", "slopes"),
        lambda a: (
            lambda s, b, h, q, k: a["gain"][b] * jnp.tanh(s * a["slopes"][h]) + a["columns"][k]
        ),
    ),
    "elements": (
        ("rows", "square"),
        lambda a: lambda s, b, h, q, k: s * (1 + a["square"][q, k]) + a["rows"][b, q],
    ),
    # NaN above the diagonal, and rows that it masks.
    "roots": (
        ("slopes",),
        lambda a: (
            lambda s, b, h, q, k: jnp.where(
                q % 5 == 4, -jnp.inf, s * a["slopes"][h] * jnp.sqrt((q - k + 1).astype(s.dtype))
            )
        ),
    ),
    "none": ((), None),
}
"""The arrays that a function reads, and a maker of the function from these arrays."""

SHAPES = {
    "slopes": (N,),
    "table": (N, T + S + 1),
    "gain": (B,),
    "columns": (S,),
    "square": (T, S),
    "rows": (B, T),
}


def prefix(b, h, q, k):
    return (k < 5 * b + 3) & (h != 1)


def lengths_and(mask: Mask) -> Mask:
    return mask & Mask.lengths(LENGTHS, LENGTHS)


MASKS: dict[str, Mask] = {
    "causal": Mask.causal(),
    "prefix": Mask.causal() | Mask.function(prefix),
    "not": Mask.causal() & ~Mask.window(WINDOW, -3),
    "lengths": lengths_and(Mask.function(lambda b, h, q, k: (q + k) % 3 != h)),
    "ends": lengths_and(Mask.window(4, 0, "bottom_right") | Mask.lengths(key=np.array([2, 3]))),
}


def valid_elements(mask: str) -> np.ndarray:
    """The masks by their definition, bool[B, N, T, S]."""
    b, h, q, k = np.ix_(*(np.arange(size) for size in (B, N, T, S)))
    causal, length = k <= q, LENGTHS[b]
    found = {
        "causal": causal,
        "prefix": causal | prefix(b, h, q, k),
        "not": causal & ~((k >= q - WINDOW) & (k <= q - 3)),
        "lengths": (q < length) & (k < length) & ((q + k) % 3 != h),
        "ends": (q < length) & (k < length) & ((k <= q) & (k >= q - 4) | (k < b + 2)),
    }[mask]
    return np.broadcast_to(found, (B, N, T, S))


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str = "dense"
    function: str = "table"
    mask: str = "causal"
    key_heads: int = N
    dtype: str = "float32"
    bias: bool = False
    dropout: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        words = [self.layout, self.function, self.mask, f"{self.key_heads}heads", self.dtype]
        words += [
            name for name in ("bias", "dropout", "sinks", "deterministic") if getattr(self, name)
        ]
        return "-".join([*words, *([] if self.soft_cap is None else ["cap"])])

    @property
    def possible(self) -> bool:
        # A function that is NaN above the diagonal needs a mask there.
        return self.function != "roots" or self.mask in ("causal", "not")

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the call in its dtype, with those that the function reads."""
        rng = np.random.default_rng(7)
        K = self.key_heads
        shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
        shapes |= {"bias": (B, N, T, S)} if self.bias else {}
        shapes |= {"sinks": (N,)} if self.sinks else {}
        names, _ = SCORE_FUNCTIONS[self.function]
        shapes |= {name: SHAPES[name] for name in names}
        drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        return {name: x.astype(jnp.dtype(self.dtype)) for name, x in drawn.items()}

    def arguments(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        _, own = SCORE_FUNCTIONS[self.function]
        return {
            "mask": MASKS[self.mask],
            "score_mod": None if own is None else own(dict(arrays)),
            "bias": arrays.get("bias"),
            "sinks": arrays.get("sinks"),
            "logits_soft_cap": self.soft_cap,
            "dropout_rate": RATE if self.dropout else 0.0,
            "dropout_key": DROPOUT_KEY if self.dropout else None,
            "return_residual": True,
            "deterministic_backward": self.deterministic,
        }

    def ours(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        return _LAYOUTS[self.layout](self, arrays)

    def placed(self, arrays: Mapping[str, Any]) -> Arrays:
        """The arrays, sharded as the layout says."""
        if self.layout not in ("automatic", "explicit"):
            return jax.tree.map(jnp.asarray, dict(arrays))
        axis_type = AxisType.Auto if self.layout == "automatic" else AxisType.Explicit
        mesh = jax.make_mesh(
            (2, 2), ("data", "tensor"), (axis_type,) * 2, devices=jax.devices("cpu")[:4]
        )
        heads = ("data", None, "tensor")
        specs = dict.fromkeys(("query", "key", "value"), heads) | {"bias": ("data", "tensor")}
        if self.layout == "automatic":
            # JAX cannot index a dim that is sharded over an explicit axis.
            specs |= {"gain": ("data",), "rows": ("data",), "slopes": ("tensor",)}
        return {
            name: jax.device_put(x, NamedSharding(mesh, P(*specs.get(name, ()))))
            for name, x in arrays.items()
        }

    def defined(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Output and logsumexp by their definition, in the dtype of the arrays."""
        group = N // self.key_heads
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        highest = jax.lax.Precision.HIGHEST
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision=highest) * H**-0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        valid = jnp.asarray(valid_elements(self.mask))
        _, own = SCORE_FUNCTIONS[self.function]
        if own is not None:
            indices = jnp.meshgrid(*(jnp.arange(size) for size in scores.shape), indexing="ij")
            # Masked elements read what element 0 reads, which is valid.
            indices = [jnp.where(valid, index, 0) for index in indices]
            flat = (x.ravel() for x in (scores, *indices))
            scores = jax.vmap(own(arrays))(*flat).reshape(scores.shape)
            valid &= scores > -jnp.inf
            scores = jnp.where(valid, scores, 0)
        scores = scores + arrays.get("bias", 0)
        sinks = arrays.get("sinks", jnp.full(N, -jnp.inf))
        sinks = jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1)).astype(scores.dtype)
        if self.mask in ("lengths", "ends"):
            in_rows = (np.arange(T) < LENGTHS[:, None])[:, None, :, None]
            sinks = jnp.where(in_rows, sinks, -jnp.inf)
        live = valid.any(-1, keepdims=True) | (sinks > -jnp.inf)
        scores = jnp.where(valid, scores, jnp.where(live, -jnp.inf, 0))
        lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], -1), -1, keepdims=True)
        weights = jnp.where(valid, jnp.exp(scores - lse), 0)
        if self.dropout:
            with jax.ensure_compile_time_eval():
                state = jax.tree.map(np.asarray, dropout.state(DROPOUT_KEY, B, N))
            threshold = dropout.threshold(RATE)
            kept = oracle.kept_elements(state, threshold, T, S, None)
            weights = weights * kept * (256 / (256 - threshold))
        out = jnp.einsum("bnts,bsnh->btnh", weights, value, precision=highest)
        lse = jnp.where(live, lse, -jnp.inf)[..., 0]
        return out, lse.transpose(0, 2, 1)


def _dense(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    return dot_product_attention(query, key, value, **case.arguments(arrays))


def _vmap(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    return vmapped(lambda arrays: _dense(case, arrays), arrays)


def vmapped(function: Function, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """A vmap over two queries and two of each captured array, with one key."""
    axes = {name: None if name in ("key", "bias") else 0 for name in arrays}
    two = {name: x if axes[name] is None else jnp.stack([x, -x / 2]) for name, x in arrays.items()}
    return jax.vmap(function, in_axes=(axes,))(two)


def _packed(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The sequences one after the other, with three tokens of no sequence between them."""
    first = jnp.array([0, T + 3, 2 * T + 3])

    def pack(x: jax.Array) -> jax.Array:
        gap = jnp.full((3, *x.shape[2:]), jnp.nan, x.dtype)
        return jnp.concatenate([x[0], gap, x[1]])

    packed: Any = jax_memeff.varlen_attention
    out, lse = packed(
        *(pack(arrays[name]) for name in ("query", "key", "value")),
        first,
        first,
        T,
        S,
        **case.arguments(arrays),
    )
    places = first[:2, None] + np.arange(T)
    return out[places], lse[places]


def _ring(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    by_rows: dict[str, P] = dict.fromkeys(("query", "key", "value"), P(None, "ring"))
    by_rows["bias"] = P(None, None, "ring")

    def local(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        arguments = case.arguments(arrays)
        return jax_memeff.ring_attention(query, key, value, axis_name="ring", **arguments)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({name: by_rows.get(name, P()) for name in arrays},),
        out_specs=(P(None, "ring"), P(None, "ring")),
    )(arrays)


_LAYOUTS: dict[str, Callable[[Case, Arrays], tuple[jax.Array, jax.Array]]] = {
    "dense": _dense,
    "packed": _packed,
    "vmap": _vmap,
    "ring": _ring,
    "automatic": _dense,
    "explicit": _dense,
}

AXES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(_LAYOUTS),
    "function": tuple(SCORE_FUNCTIONS),
    "mask": tuple(MASKS),
    "dtype": ("float32", "float64", "bfloat16"),
    "key_heads": (N, 2),
    "bias": (False, True),
    "dropout": (False, True),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "deterministic": (False, True),
}


@functools.cache
def sample(seed: int = 0) -> list[Case]:
    """Random cases in which every possible pair of values of two axes occurs."""
    rng = np.random.default_rng(seed)
    lengths = np.array([len(values) for values in AXES.values()])
    one, other = np.triu_indices(len(AXES), 1)
    sizes = lengths[one] * lengths[other]
    first = np.cumsum(sizes) - sizes

    def pairs(choices: np.ndarray) -> np.ndarray:
        """The numbers of the pairs of each row of ``choices``."""
        return first + choices[:, one] * lengths[other] + choices[:, other]

    def case(choice: np.ndarray) -> Case:
        names = zip(AXES, choice, strict=True)
        return Case(**{name: AXES[name][index] for name, index in names})

    def drawn(count: int) -> np.ndarray:
        return rng.integers(lengths, size=(count, len(AXES)))

    missing = np.zeros(sizes.sum(), bool)
    some = drawn(4000)
    missing[pairs(some[[case(choice).possible for choice in some.tolist()]])] = True
    found = []
    while missing.any():
        choices = drawn(200)
        gains = missing[pairs(choices)].sum(1)
        for index in np.argsort(-gains, kind="stable"):
            if gains[index] and (best := case(choices[index].tolist())).possible:
                found.append(best)
                missing[pairs(choices[index : index + 1])] = False
                break
    return found
