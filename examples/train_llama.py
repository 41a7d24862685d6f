"""Train a Llama on packed documents, over all devices: by data, by heads and by the sequence.

    python examples/train_llama.py                          # under a minute on two CPU cores
    python examples/train_llama.py --tensor 2 --sequence 2  # the other devices divide the batch

Heads are grouped, every second layer has a sliding window, and segment ids keep the documents of a
row apart: functions and classes of Python's standard library. Devices that share a sequence form a
ring. ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` makes eight devices of a CPU.

The first loss is compared with that through ``jax.nn.dot_product_attention`` and a boolean mask, on
one device. The exit status is 1 if they differ.
"""

import argparse
import collections
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax import NamedSharding, P
from training_text import VOCABULARY, packed_documents

from jax_memeff import Mask, dot_product_attention, ring_attention, zigzag
from jax_memeff.flax import rotary_embedding

SIZES = "layers width hidden heads key_heads context window batch dtype tolerance"
Config = collections.namedtuple("Config", SIZES)
CPU = Config(4, 128, 320, 8, 2, 512, 128, 8, "float32", 1e-5)
GPU = Config(12, 1024, 2688, 16, 4, 4096, 1024, 8, "bfloat16", 2e-3)
norm = functools.partial(linen.RMSNorm(use_scale=False).apply, {})


def sharded_attention(query, key, value, documents, window, mesh):
    """Attention of ``[B, T, N, H]`` over the mesh, within ``documents`` ``[B, T]``."""
    ring = functools.partial(ring_attention, axis_name="sequence", layout="zigzag")
    attention = dot_product_attention if mesh.shape["sequence"] == 1 else ring
    heads, tokens = P("data", "sequence", "tensor"), P("data", "sequence")

    @jax.shard_map(mesh=mesh, in_specs=(heads, heads, heads, tokens), out_specs=heads)
    def local(query, key, value, documents):
        mask = Mask.segments(documents, documents) & Mask.window(window, 0)
        return attention(query, key, value, mask=mask)

    return local(query, key, value, documents)


def dense_attention(query, key, value, documents, window):
    """The same through ``jax.nn``, with a boolean mask ``[B, 1, T, T]``."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
    seen = (distance >= 0) & (distance <= (window or jnp.inf))
    mask = seen & (documents[:, :, None] == documents[:, None])
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])


def initial_weights(config, mesh):
    """In float32. Tensor parallelism divides the heads and the hidden features of each layer."""
    width, hidden, depth = config.width, config.hidden, config.width // config.heads
    normal = np.random.default_rng(0).standard_normal

    def draw(shape, *axes):
        x = width**-0.5 * normal(shape, np.float32)
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    def layer():
        return {
            "query": draw((width, config.heads, depth), None, "tensor"),
            "key_value": draw((2, width, config.key_heads, depth), None, None, "tensor"),
            "out": draw((config.heads, depth, width), "tensor"),
            "gate_up": draw((2, width, hidden), None, None, "tensor"),
            "down": draw((hidden, width), "tensor"),
        }

    embedding = draw((VOCABULARY, width))
    return {"embedding": embedding, "layers": [layer() for _ in range(config.layers)]}


def block(weights, x, batch, window, attention):
    """One layer: attention and a SwiGLU, each behind a norm and added to its input."""
    y = norm(x)
    query = jnp.einsum("btd,dnh->btnh", y, weights["query"])
    key, value = jnp.einsum("btd,pdnh->pbtnh", y, weights["key_value"])
    query, key = (rotary_embedding(z, batch["positions"]) for z in (query, key))
    out = attention(query, key, value, batch["documents"], window)
    x = x + jnp.einsum("btnh,nhd->btd", out, weights["out"])
    gate, up = jnp.einsum("btd,pdh->pbth", norm(x), weights["gate_up"])
    return x + (jax.nn.silu(gate) * up) @ weights["down"]


def mean_loss(weights, batch, config, attention):
    """Over the tokens whose next token is in the same document."""
    weights = jax.tree.map(lambda w: w.astype(config.dtype), weights)
    x = weights["embedding"][batch["tokens"]]
    # A backward computes each layer again, except for its attention, whose results are saved.
    policy = jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse")
    layer_of = jax.checkpoint(block, policy=policy, static_argnums=(3, 4))
    for number, layer in enumerate(weights["layers"]):
        x = layer_of(layer, x, batch, None if number % 2 else config.window, attention)
    logits = (norm(x) @ weights["embedding"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses, where=batch["has_target"])


def train(config, mesh, steps):
    """The first loss through ``jax.nn``, and every loss over the mesh."""
    weights = initial_weights(config, mesh)
    stream = packed_documents(config.batch, config.context, seed=0)
    batches = [next(stream) for _ in range(steps)]
    dense = jax.jit(functools.partial(mean_loss, config=config, attention=dense_attention))
    expected = float(dense(jax.device_get(weights), batches[0]))
    print(f"first loss with jax.nn: {expected:.6f}", flush=True)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95))
    with jax.set_mesh(mesh):  # places the step counter, too, so that step compiles only once
        state = optimizer.init(weights)
    attention = functools.partial(sharded_attention, mesh=mesh)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, batch):
        loss, gradients = jax.value_and_grad(mean_loss)(weights, batch, config, attention)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses, sharding, began = [], NamedSharding(mesh, P("data", "sequence")), time.perf_counter()
    for number, batch in enumerate(batches):
        batch = {name: zigzag(x, 1, mesh.shape["sequence"]) for name, x in batch.items()}
        weights, state, loss = step(weights, state, jax.device_put(batch, sharding))
        losses.append(float(loss))
        print(f"step {number}: loss {loss:.6f}, {time.perf_counter() - began:.0f} s", flush=True)
    return expected, losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tensor", type=int, default=1, help="devices that divide the heads")
    parser.add_argument("--sequence", type=int, default=1, help="devices that divide the sequence")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    config = GPU if jax.default_backend() == "gpu" else CPU
    data, left = divmod(jax.device_count(), options.sequence * options.tensor)
    if left or config.batch % data or config.key_heads % options.tensor:
        parser.error(f"must divide {jax.device_count()} devices, batch and key_heads of {config}")
    shape, names = (data, options.sequence, options.tensor), ("data", "sequence", "tensor")
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    print(f"{dict(mesh.shape)}, {config}", flush=True)
    expected, losses = train(config, mesh, options.steps)
    np.testing.assert_allclose(losses[0], expected, config.tolerance, err_msg="first loss, jax.nn")


if __name__ == "__main__":
    main()
