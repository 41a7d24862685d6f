"""The model of serve.py: a step over keys and values in pages, and the same without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from serve_requests import Request
from train_gpt import GPT, Preset, Trainer, train
from training_text import VOCABULARY

import jax_memeff
from jax_memeff.flax import rotary_embedding

Pools = list[tuple[jax.Array, jax.Array]]
"""Keys and values of each layer, [pages, page_size, heads, head_dim]."""


def next_tokens(
    parameters: Any,
    pools: Pools,
    tokens: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    *,
    graph: Any,
    implementation: Any,
) -> tuple[jax.Array, Pools]:
    """The most likely next token of each sequence, int32[slots], and the pools with the new tokens.

    Args:
        parameters: the parameters of the model.
        pools: donated.
        tokens: int32[tokens], the new tokens of all sequences, one sequence after the other.
        table, lengths, starts: as in ``paged_attention``; a slot without tokens has length 0.
        graph: the graph of the model.
        implementation: as in ``paged_attention``.
    """
    model: GPT = nnx.merge(graph, parameters)
    count = tokens.shape[0]
    token = jnp.arange(count)
    slot = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, len(lengths) - 1)
    position = lengths[slot] - (starts[slot + 1] - token)
    x = jax.nn.one_hot(tokens, VOCABULARY) @ model.embed.embedding[...]
    written = []
    for block, (key_pages, value_pages) in zip(model.blocks, pools, strict=True):
        qkv = block.qkv(block.norm_attention(x)).reshape(count, 3, block.heads, -1)
        query, key = (rotary_embedding(qkv[:, i], position) for i in (0, 1))
        key_pages, value_pages = jax_memeff.append_to_pages(
            key_pages, value_pages, key, qkv[:, 2], table, lengths, starts
        )
        out = jax_memeff.paged_attention(
            query,
            key_pages,
            value_pages,
            table,
            lengths,
            query_starts=starts,
            implementation=implementation,
        )
        x = x + block.out(out.reshape(count, -1))
        x = x + block.down(jax.nn.gelu(block.up(block.norm_feed_forward(x))))
        written.append((key_pages, value_pages))
    last = x[jnp.maximum(starts[1:] - 1, 0)]
    return jnp.argmax(model.embed.attend(model.norm(last)), -1), written


def copied_page(pools: Pools, source: jax.Array, target: jax.Array) -> Pools:
    """Copy a page in each of the pools, which are donated."""
    return jax.tree.map(lambda pool: pool.at[target].set(pool[source]), pools)


def without_cache(graph: Any, parameters: Any, requests: list[Request], longest: int) -> list[bool]:
    """Whether each completion equals that of the model without a cache.

    If every token is the most likely one given the tokens before it, the model would generate the
    same completion token by token.
    """

    @jax.jit
    def most_likely(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, parameters)(tokens, 0.0, jax.random.key(0))
        return jnp.argmax(logits, -1)

    same = []
    for first in range(0, len(requests), 8):
        batch = requests[first : first + 8]
        tokens = np.zeros((8, longest), np.int32)
        for row, request in zip(tokens, batch, strict=False):
            row[: len(request.tokens)] = request.tokens
        expected = np.asarray(most_likely(parameters, tokens))
        for row, found, request in zip(expected, tokens, batch, strict=False):
            part = slice(request.prompt - 1, len(request.tokens) - 1)
            same.append(bool((row[part] == found[1:][part]).all()))
    return same


def trained(preset: Preset, steps: int, seed: int, path: Path) -> tuple[Any, Any]:
    """The model's graph and parameters, from a file or from a training run that writes it."""
    trainer = Trainer(preset, "memeff", seed, steps, 0.0)
    leaves, structure = jax.tree.flatten(trainer.parameters)
    if path.exists():
        with np.load(path) as file:
            leaves = [jnp.asarray(file[str(index)]) for index in range(len(leaves))]
        return trainer.graph, jax.tree.unflatten(structure, leaves)
    print(f"no weights in {path}: training for {steps} steps", flush=True)
    train(trainer, preset, steps, seed)
    arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(trainer.parameters))}
    # A type checker takes the arrays for values of `allow_pickle`.
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return trainer.graph, trainer.parameters
