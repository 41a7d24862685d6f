"""Times whole training steps through jax-memeff and jax.nn: ``python benchmarks/training.py``.

A step is the forward, the backward and an Adam update of a Llama-style language model (RMSNorm,
rotary positions, grouped heads, SwiGLU) or a DiT-style denoiser (adaptive layer norm, no mask).
Matrices are bfloat16 in products and float32 as parameters. The steps of all implementations
alternate in one process, and differ in their attention only. README.md in this folder explains the
timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from measuring import documents, measurement
from measuring.timing import Timing, first_line, measure
from programs.peers import PEERS
from rich.console import Console

import jax_memeff

CHECKED_STEPS = 3
"""Steps from the initial parameters whose losses are compared."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model and of its batch."""

    name: str
    is_causal: bool
    """A Llama-style model; else a DiT-style one."""
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    length: int
    outputs: int
    """The vocabulary of a Llama-style model; the numbers of a patch of a DiT-style one."""
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens, or patches, of a step."""
        return self.batch * self.length

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


MODELS = {
    model.name: model
    for model in (
        # Eight of the 32 layers of Llama 3 8B, and DiT-XL/2 on images of 512 x 512.
        Model("Llama-style", True, 8, 4096, 32, 8, 14336, 4, 4096, 32000),
        Model("DiT-style", False, 28, 1152, 16, 16, 4608, 16, 1024, 16),
        Model("tiny-Llama", True, 2, 32, 4, 2, 64, 2, 16, 64, "float32"),
        Model("tiny-DiT", False, 2, 32, 4, 4, 64, 2, 16, 8, "float32"),
    )
}
Attention = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
Tree = dict[str, Any]


def _memeff(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool) -> jax.Array:
    return jax_memeff.dot_product_attention(query, key, value, is_causal=is_causal)


def _jax_nn(implementation: Any) -> Attention:
    def attention(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool) -> jax.Array:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=is_causal, implementation=implementation
        )

    return attention


ATTENTIONS: dict[str, Attention] = {
    "memeff": _memeff,
    "jax_cudnn": _jax_nn("cudnn"),
    "jax_xla": _jax_nn("xla"),
}
LABELS = {name: PEERS[name].label if name in PEERS else "jax-memeff" for name in ATTENTIONS}


# -------------------------------------------------------------------------------------- models


def parameters(model: Model) -> Tree:
    """Normally distributed matrices; those of the layers are stacked."""
    key_width = model.key_heads * model.head_dim
    layer = {
        "query": (model.width, model.width),
        "key": (model.width, key_width),
        "value": (model.width, key_width),
        "out": (model.width, model.width),
        "up": (model.width, model.hidden),
        "down": (model.hidden, model.width),
    }
    if model.is_causal:
        layer["gate"] = (model.width, model.hidden)
    else:
        layer["modulation"] = (model.width, 6 * model.width)
    shapes = {name: (model.layers, *shape) for name, shape in layer.items()}
    shapes |= {"first": (model.outputs, model.width), "last": (model.width, model.outputs)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / math.sqrt(shape[-2])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch(model: Model) -> Tree:
    """Tokens and the next ones, or noisy patches, their noise and a condition for each image."""
    first, second, third = jax.random.split(jax.random.key(1), 3)
    shape = model.batch, model.length
    if model.is_causal:
        tokens = jax.random.randint(first, (model.batch, model.length + 1), 0, model.outputs)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return {
        "inputs": jax.random.normal(first, (*shape, model.outputs)),
        "targets": jax.random.normal(second, (*shape, model.outputs)),
        "condition": jax.random.normal(third, (model.batch, model.width)),
    }


def _norm(x: jax.Array, is_centered: bool) -> jax.Array:
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True) if is_centered else x
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array) -> jax.Array:
    """``x`` ``[B, T, N, H]`` with rotary positions."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, -1).astype(x.dtype)


def _attend(model: Model, weights: Tree, x: jax.Array, attention: Attention) -> jax.Array:
    heads = {"query": model.heads, "key": model.key_heads, "value": model.key_heads}
    query, key, value = (
        (x @ weights[name]).reshape(*x.shape[:2], count, model.head_dim)
        for name, count in heads.items()
    )
    if model.is_causal:
        query, key = _rotated(query), _rotated(key)
    return attention(query, key, value, model.is_causal).reshape(x.shape) @ weights["out"]


def _llama_layer(
    model: Model, attention: Attention, x: jax.Array, weights: Tree, _: Any
) -> jax.Array:
    x = x + _attend(model, weights, _norm(x, False).astype(x.dtype), attention)
    y = _norm(x, False).astype(x.dtype)
    return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]


def _dit_layer(
    model: Model, attention: Attention, x: jax.Array, weights: Tree, condition: jax.Array
) -> jax.Array:
    modulation = (jax.nn.silu(condition) @ weights["modulation"])[:, None]
    shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, -1)
    y = (_norm(x, True) * (1 + scale) + shift).astype(x.dtype)
    x = x + gate * _attend(model, weights, y, attention)
    y = (_norm(x, True) * (1 + scale_2) + shift_2).astype(x.dtype)
    return x + gate_2 * (jax.nn.gelu(y @ weights["up"]) @ weights["down"])


def loss(model: Model, attention: Attention, weights: Tree, given: Tree) -> jax.Array:
    """The mean cross-entropy of the next tokens, or the mean squared error of the noise."""
    weights = jax.tree.map(lambda leaf: leaf.astype(model.dtype), weights)
    stacked = {name: leaf for name, leaf in weights.items() if leaf.ndim == 3}
    condition: Any = None
    if model.is_causal:
        x = weights["first"][given["inputs"]]
    else:
        x = given["inputs"].astype(model.dtype) @ weights["first"]
        condition = given["condition"].astype(model.dtype)
    layer = _llama_layer if model.is_causal else _dit_layer

    def apply(x: jax.Array, own: Tree) -> tuple[jax.Array, None]:
        return layer(model, attention, x, own, condition), None

    x, _ = jax.lax.scan(apply, x, stacked)
    out = (_norm(x, False).astype(x.dtype) @ weights["last"]).astype(jnp.float32)
    if not model.is_causal:
        return jnp.square(out - given["targets"]).mean()
    right = jnp.take_along_axis(out, given["targets"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(out, -1) - right).mean()


# ---------------------------------------------------------------------------------------- steps


def initial(model: Model) -> Tree:
    """Parameters, the moments of Adam and the number of steps."""
    weights = parameters(model)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {
        "weights": weights,
        "first": zeros,
        "second": jax.tree.map(jnp.copy, zeros),
        "steps": jnp.zeros((), jnp.int32),
    }


def step(
    model: Model, attention: Attention, state: Tree, given: Tree, rate: float = 1e-3
) -> tuple[Tree, jax.Array]:
    """One update with Adam; the state and the loss."""
    value, gradients = jax.value_and_grad(functools.partial(loss, model, attention))(
        state["weights"], given
    )
    steps = state["steps"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], gradients)

    def updated(weight: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return weight - rate * (m / (1 - 0.9**steps)) / (jnp.sqrt(v / (1 - 0.95**steps)) + 1e-8)

    weights = jax.tree.map(updated, state["weights"], first, second)
    return {"weights": weights, "first": first, "second": second, "steps": steps}, value


class Trainer:
    """The state that the steps of all implementations share: it exists once, and is donated."""

    def __init__(self, model: Model):
        self.model = model
        self.given = batch(model)
        self.state: Any = initial(model)

    def restart(self) -> None:
        self.state = None  # frees it first
        self.state = initial(self.model)


class Program:
    """A step as ``measuring.timing`` runs it."""

    calls = 1

    def __init__(self, trainer: Trainer, attention: Attention):
        self.trainer = trainer
        own = functools.partial(step, trainer.model, attention)
        self.compiled = jax.jit(own, donate_argnums=0).lower(trainer.state, trainer.given).compile()

    def launch(self) -> jax.Array:
        try:
            self.trainer.state, value = self.compiled(self.trainer.state, self.trainer.given)
        except Exception:
            self.trainer.restart()  # the step may have used up the state
            raise
        return value

    def wait(self) -> None:
        jax.block_until_ready(self.trainer.state)


def measured(model: Model, names: list[str], rounds: int, batch_seconds: float) -> Tree:
    """The record of a model: times, tokens per second and first losses by implementation."""
    trainer = Trainer(model)
    programs, results = {}, {}
    for name in names:
        try:
            trainer.restart()
            program = Program(trainer, ATTENTIONS[name])
            losses = [float(program.launch()) for _ in range(CHECKED_STEPS)]
            programs[name], results[name] = program, {"losses": losses}
        except Exception as error:
            results[name] = {"error": first_line(error)}
    trainer.restart()
    outcomes = measure(programs, rounds=rounds, batch_seconds=batch_seconds, seed=model.name)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Timing):
            results[name] |= {
                "seconds": outcome.seconds,
                "spread": outcome.spread,
                "samples": outcome.samples,
                "launches_per_batch": outcome.launches,
                "tokens_per_second": model.tokens / outcome.seconds,
            }
        else:
            results[name] = {"error": outcome.reason}
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.state["weights"]))
    return {**dataclasses.asdict(model), "parameters": count, "results": results}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    is_gpu = jax.default_backend() == "gpu"
    models = "Llama-style,DiT-style" if is_gpu else "tiny-Llama,tiny-DiT"
    names = ",".join(name for name in ATTENTIONS if is_gpu or name != "jax_cudnn")
    parser.add_argument("--models", default=models, help=f"some of {','.join(MODELS)}")
    parser.add_argument("--attentions", default=names, help=f"some of {','.join(ATTENTIONS)}")
    measurement.add_options(parser, "training", "implementation")
    parser.set_defaults(batch_ms=2000.0 if is_gpu else 30.0)
    options = parser.parse_args()
    options.models, options.attentions = options.models.split(","), options.attentions.split(",")
    for flag, given, known in (
        ("--models", options.models, MODELS),
        ("--attentions", options.attentions, ATTENTIONS),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{flag}: expected some of {', '.join(known)}, got {unknown}")
    return options


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _arguments()
    document = {**measurement.head(options), "labels": LABELS, "training": []}
    path = options.output or documents.default_path(str(document["device"]["name"]), "training")
    console = Console()
    for name in options.models:
        seconds = options.batch_ms / 1e3
        record = measured(MODELS[name], options.attentions, options.rounds, seconds)
        document["training"].append(record)
        documents.write(path, document)
        for peer, result in record["results"].items():
            shown = {k: v for k, v in result.items() if k != "samples"}
            console.print(f"{name}, {LABELS[peer]}: {json.dumps(shown)}", soft_wrap=True)
    console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
