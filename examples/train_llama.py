"""Train a Llama on packed documents, over all devices: by data, by heads and by the sequence.

    python examples/train_llama.py                          # under a minute on two CPU cores
    python examples/train_llama.py --tensor 2 --sequence 2  # the other devices divide the batch

``XLA_FLAGS=--xla_force_host_platform_device_count=8`` makes eight devices of a CPU. The model has
grouped heads, rotary positions, a SwiGLU, and a sliding window in every second layer. A document is
a function or class of Python's standard library. Rows are packed with documents, which segment ids
keep apart. Several devices compute a sequence as a ring, in zigzag layout.

The loss of the first batch is compared with that through ``jax.nn.dot_product_attention`` and a
boolean mask, on one device. The exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from training_text import VOCABULARY, packed_documents

from jax_memeff import Mask, dot_product_attention, ring_attention, zigzag
from jax_memeff.flax import rotary_embedding


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the model and length of the training."""

    layers: int
    width: int
    heads: int
    key_heads: int
    context: int
    window: int
    batch: int
    steps: int
    dtype: str


PRESETS = {
    "tiny": Preset(2, 64, 4, 2, 256, 48, 4, 8, "float32"),
    "cpu": Preset(4, 128, 8, 2, 512, 128, 8, 40, "float32"),
    "gpu": Preset(12, 1024, 16, 4, 8192, 1024, 8, 200, "bfloat16"),
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-3}
"""Limits of the relative difference of the first losses."""
SPECS = {"qkv": P(None, "tensor"), "out": P("tensor"), "up": P(None, None, "tensor")}
SPECS |= {"down": P("tensor"), "embedding": P()}
Attention = Callable[..., jax.Array]
Arrays = dict[str, Any]


def sharded_attention(mesh: Mesh) -> Attention:
    """Attention of ``[B, T, N, H]`` over the mesh, within ``documents`` ``[B, T]``."""
    tokens, heads = P("data", "sequence"), P("data", "sequence", "tensor")
    ring = functools.partial(ring_attention, axis_name="sequence", layout="zigzag")
    attention = dot_product_attention if mesh.shape["sequence"] == 1 else ring

    def over_mesh(query, key, value, documents, window):
        def local(query, key, value, documents):
            mask = Mask.segments(documents, documents) & Mask.window(window, 0)
            return attention(query, key, value, mask=mask)

        specs = (heads, heads, heads, tokens)
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads)
        return sharded(query, key, value, documents)

    return over_mesh


def dense_attention(query, key, value, documents, window):
    """The same through ``jax.nn``, with a boolean mask ``[B, 1, T, T]``."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
    seen = (distance >= 0) & (distance <= (query.shape[1] if window is None else window))
    mask = seen & (documents[:, :, None] == documents[:, None])
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])


def initial_weights(preset: Preset, seed: int) -> Arrays:
    """Float32 arrays of the host; ``SPECS`` says how the mesh divides them."""
    depth, hidden = preset.width // preset.heads, preset.width * 8 // 3 // 64 * 64
    group = preset.heads // preset.key_heads
    shapes = {
        "qkv": (preset.width, preset.key_heads, group + 2, depth),
        "out": (preset.heads, depth, preset.width),
        "up": (preset.width, 2, hidden),
        "down": (hidden, preset.width),
    }
    draw, std = np.random.default_rng(seed).standard_normal, preset.width**-0.5
    layers = [
        {name: std * draw(shape, np.float32) for name, shape in shapes.items()}
        for _ in range(preset.layers)
    ]
    return {"embedding": std * draw((VOCABULARY, preset.width), np.float32), "layers": layers}


def norm(x: jax.Array) -> jax.Array:
    """Divides each vector by the root of its mean square, in float32."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


def block(w: Arrays, x: jax.Array, batch: Arrays, window: int | None, attention: Attention):
    """One layer: attention and a SwiGLU, each behind a norm and added to its input."""
    heads = jnp.einsum("btd,dkgh->btkgh", norm(x), w["qkv"])
    key, value = heads[..., -2, :], heads[..., -1, :]
    query = heads[..., :-2, :].reshape(*x.shape[:2], -1, key.shape[-1])
    query, key = (rotary_embedding(y, batch["positions"]) for y in (query, key))
    out = attention(query, key, value, batch["documents"], window)
    x = x + jnp.einsum("btnh,nhd->btd", out, w["out"])
    gate, up = jnp.moveaxis(jnp.einsum("btd,dcf->btcf", norm(x), w["up"]), 2, 0)
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def mean_loss(weights: Arrays, batch: Arrays, preset: Preset, attention: Attention) -> jax.Array:
    """Over the tokens whose next token is in the same document."""
    weights = jax.tree.map(lambda w: w.astype(preset.dtype), weights)
    x = weights["embedding"][batch["tokens"]]
    # Saves the output and the logsumexp of each attention, and computes the rest of a layer again.
    policy = jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse")
    layer_of = jax.checkpoint(block, policy=policy, static_argnums=(3, 4))
    for number, layer in enumerate(weights["layers"]):
        window = preset.window if number % 2 == 0 else None
        x = layer_of(layer, x, batch, window, attention)
    logits = (norm(x) @ weights["embedding"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses, where=batch["has_target"])


def train(preset: Preset, mesh: Mesh, seed: int) -> dict[str, Any]:
    """The first loss through ``jax.nn``, every loss over the mesh, and tokens per second."""

    def place(path, x):
        return jax.device_put(x, NamedSharding(mesh, SPECS[path[-1].key]))

    def on_mesh(batch):
        tokens = NamedSharding(mesh, P("data", "sequence"))
        turned = {name: zigzag(x, 1, mesh.shape["sequence"]) for name, x in batch.items()}
        return jax.device_put(turned, tokens)

    weights = initial_weights(preset, seed)
    stream = packed_documents(preset.batch, preset.context, seed)
    first = next(stream)
    # One row at a time, because the scores of a batch may be too large for a device.
    rows = {name: x[:, None] for name, x in first.items()}
    dense = functools.partial(mean_loss, preset=preset, attention=dense_attention)
    by_row = jax.jit(lambda w, rows: jax.lax.map(lambda row: dense(w, row), rows))(weights, rows)
    expected = float(np.average(by_row, weights=first["has_target"].sum(1)))

    weights = jax.tree_util.tree_map_with_path(place, weights)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95))
    replicated = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: x if x.ndim else jax.device_put(x, replicated), optimizer.init(weights)
    )
    # The same shardings in each step, so that the second one compiles nothing.
    shardings = jax.tree.map(lambda x: x.sharding, (weights, state))
    ours = functools.partial(mean_loss, preset=preset, attention=sharded_attention(mesh))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*shardings, replicated))
    def step(weights, state, batch):
        loss, gradients = jax.value_and_grad(ours)(weights, batch)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses, began = [], time.perf_counter()
    for number, batch in zip(range(preset.steps), itertools.chain([first], stream), strict=False):
        weights, state, loss = step(weights, state, on_mesh(batch))
        losses.append(float(loss))
        if number == 0:  # the first step compiles
            print(f"loss of the first batch: {losses[0]:.6f}, with jax.nn {expected:.6f}")
            began = time.perf_counter()
        elif number % 10 == 0:
            rate = number * preset.batch * preset.context / (time.perf_counter() - began)
            print(f"step {number}: loss {losses[-1]:.3f}, {rate:,.0f} tokens/s", flush=True)
    tokens = (preset.steps - 1) * preset.batch * preset.context
    rate = tokens / (time.perf_counter() - began)
    return {"jax_nn_loss": expected, "losses": losses, "tokens_per_second": rate}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: by platform")
    parser.add_argument("--tensor", type=int, default=1, help="devices that divide the heads")
    parser.add_argument("--sequence", type=int, default=1, help="devices that divide the sequence")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    if options.steps is not None:
        preset = dataclasses.replace(preset, steps=options.steps)
    if min(options.tensor, options.sequence, preset.steps) < 1:
        parser.error("expected --tensor, --sequence and --steps of at least 1")
    data, left = divmod(jax.device_count(), options.tensor * options.sequence)
    if left or not data or preset.batch % data or preset.key_heads % options.tensor:
        parser.error(
            f"expected --tensor x --sequence to divide {jax.device_count()} devices, the others to "
            f"divide a batch of {preset.batch}, and --tensor to divide {preset.key_heads} key "
            f"heads, got {options.tensor} x {options.sequence}"
        )
    sizes, names = (data, options.sequence, options.tensor), ("data", "sequence", "tensor")
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)
    print(f"{dict(mesh.shape)}, {preset}", flush=True)
    result = train(preset, mesh, options.seed)
    print(json.dumps(result))
    error = abs(result["losses"][0] / result["jax_nn_loss"] - 1)
    if not error <= (tolerance := TOLERANCES[preset.dtype]):
        print(f"expected a first loss within {tolerance} of that of jax.nn, got {error:.1e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
