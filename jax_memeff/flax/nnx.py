"""The attention module for ``flax.nnx``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff.flax import attention
from jax_memeff.flax.heads import Cache, SegmentIds, attend_heads, heads_of_keys
from jax_memeff.flax.pages import Pages, Pools, attend_pages, require_readable


class MultiHeadAttention(nnx.MultiHeadAttention):
    """``flax.nnx.MultiHeadAttention`` with linear memory and more arguments.

    Parameters and cache have the names and shapes of Flax's module, so checkpoints of either load
    into the other. Outputs and gradients agree too, except for fully masked rows (0 here) and for
    the dropout bits.

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, jax_memeff.flax.nnx
    >>> layer = jax_memeff.flax.nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, num_kv_heads=2, rotary_base=10_000.0, rngs=nnx.Rngs(0)
    ... )
    >>> x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    >>> whole = layer(x, is_causal=True)

    The same result through a cache, three tokens first and then one token at a time:

    >>> layer.init_cache(x.shape)
    >>> step = nnx.jit(lambda layer, x: layer(x, decode=True))
    >>> parts = [step(layer, x[:, :3])] + [step(layer, x[:, i : i + 1]) for i in range(3, 10)]
    >>> bool(jnp.allclose(jnp.concatenate(parts, 1), whole, atol=1e-5))
    True

    Args:
      num_heads: N, the number of query heads.
      in_features: number of features of the inputs.
      qkv_features: N times the head dim; ``in_features`` by default.
      out_features: number of features of the result; ``in_features`` by default.
      num_kv_heads: K, which divides N; N by default. Query head ``n`` reads key head
        ``n // (N // K)``.
      in_kv_features: number of features of ``inputs_k`` and ``inputs_v``; ``in_features`` by
        default.
      rotary_base: rotates queries and keys by their position
        (:func:`jax_memeff.flax.rotary_embedding`); None means no rotary embedding.
      sinks_init: the initializer of the parameter ``sinks``, ``[num_heads]``: a learned logit per
        head that takes part in the softmax and has no value. None means no sinks, and no parameter.
      rngs: the streams for the initial parameters and for dropout.
      settings: every other keyword of Flax's module except ``attention_fn``.

    Raises:
      TypeError: ``attention_fn`` is given, or ``dropout_rate`` is not a number.
      ValueError: head counts do not divide.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rotary_base: float | None = None,
        sinks_init: Callable[..., jax.Array] | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        if "attention_fn" in settings:
            raise TypeError(
                "attention_fn cannot be replaced in this module: use flax.nnx.MultiHeadAttention"
            )
        heads_of_keys(num_heads, num_kv_heads)
        rate = settings.get("dropout_rate", 0.0)
        values.static_number("dropout_rate", rate, "pass a Python number")
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=attention.attention_fn,
            rngs=rngs,
            **settings,
        )
        self.rotary_base = rotary_base
        self.sinks = (
            None
            if sinks_init is None
            else nnx.Param(sinks_init(rngs.params(), (num_heads,), jnp.float32))
        )
        self.key_pages: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.value_pages: nnx.Cache[jax.Array] | None = nnx.data(None)

    def init_pages(self, pages: int, page_size: int, dtype: Any = jnp.float32) -> None:
        """Create an empty paged cache, which calls with ``pages`` read and write.

        Args:
          pages: the number of pages.
          page_size: the number of tokens per page: 1, 2, 4, 8 or a multiple of 16.
          dtype: the dtype of keys and values, which may be float8_e4m3fn.

        Raises:
          ValueError: a number is negative, or no page has this size.
          TypeError: a number is not a Python integer, or pools cannot have this dtype.
        """
        require_readable(pages, page_size, dtype)
        shape = (pages, page_size, self.num_kv_heads, self.head_dim)
        self.key_pages = nnx.Cache(jnp.zeros(shape, dtype))
        self.value_pages = nnx.Cache(jnp.zeros(shape, dtype))

    @values.takes_objects
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        bias: ArrayLike | None = None,
        mask: ArrayLike | Mask | None = None,
        segment_ids: SegmentIds | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: ArrayLike | None = None,
        score_mod: ScoreFunction | None = None,
        pages: Pages | None = None,
    ) -> jax.Array:
        """Project the inputs, attend, and project the result.

        Args:
          inputs_q: ``[batch..., T, in_features]``.
          inputs_k: ``[batch..., S, in_kv_features]``; ``inputs_q`` by default.
          inputs_v: ``[batch..., S, in_kv_features]``; ``inputs_k`` by default.
          bias: added to the scores; broadcasts to ``[batch..., N, T, S]``. It has a gradient.
          mask: an array that broadcasts to ``[batch..., N, T, S]``, in which nonzero means attend;
            or a :class:`jax_memeff.Mask`, whose arrays have all batch dimensions merged into one.
          segment_ids: integers ``[batch..., T]`` of sequences packed into one row, or the pair (of
            queries, of keys). Tokens with equal ids attend to each other; tokens with negative ids
            attend to nothing. Rotary positions need not restart, because only their differences
            matter.
          deterministic: True turns dropout off. Required here or in the constructor if the rate is
            not 0.
          rngs: the streams for dropout; they take precedence over those of the constructor.
          sow_weights: must be False, because attention weights are never formed.
          decode: append the T new tokens, one or several, to the cache that ``init_cache`` created,
            and attend causally to all tokens in it. T may differ from step to step (each T compiles
            once). S is the length of the cache, and windows of ``mask`` count from the positions of
            the tokens in it. New tokens of a full cache replace its last ones. ``inputs_q`` may
            have only the last tokens of ``inputs_k``.
          is_causal: row ``t`` attends to columns ``s <= t``; decoding is always causal.
          out_sharding: the sharding of the result.
          qkv_sharding: the sharding of the projections.
          input_positions: numbers that broadcast to ``[batch..., T]``: the positions of queries and
            keys for the rotary embedding, such as those of left-padded prompts. By default they
            count from 0, and during decoding from the number of tokens in the cache. Masks and
            windows do not depend on them.
          score_mod: a function of the score, batch index, head, row and column to the new score, as
            in :func:`jax_memeff.dot_product_attention`. During decoding the row is the position of
            the token in the cache.
          pages: append the new tokens to the pages that ``init_pages`` created, and attend causally
            to all tokens of their sequences. Inputs are ``[B, T, in_features]``, or
            ``[tokens, in_features]`` with ``query_starts``. Windows and functions in ``mask``, and
            ``score_mod``, use positions in the sequence. ``is_causal`` changes nothing, and the
            layer's ``precision`` affects the projections only.

        Returns:
          ``[batch..., T, out_features]``.

        Raises:
          ValueError: shapes do not fit, the cache is missing, ``segment_ids`` are given while
            decoding, an argument is given that paged caches do not support, ``input_positions`` are
            given without ``rotary_base``, or dropout lacks ``deterministic`` or ``rngs``.
          jax_memeff.UnsupportedError: ``sow_weights`` is set, or no kernel supports the call.
        """
        attention.refuse(self if sow_weights else None, [])
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_k must be given if inputs_v is, got None")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        self._require_features(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        dropout_rng = self._dropout_rng(deterministic, rngs)
        if pages is not None:
            out, pools = attend_pages(
                query,
                key,
                value,
                self._pools(),
                pages,
                rotary_base=self.rotary_base,
                positions=input_positions,
                mask=mask,
                dtype=self.dtype,
                sinks=None if self.sinks is None else self.sinks[...],
                score_mod=score_mod,
                bias=bias,
                segment_ids=segment_ids,
                deterministic=dropout_rng is None,
                decode=decode or None,
            )
            for name, array in pools._asdict().items():
                getattr(self, name)[...] = array
            return self.out(out, out_sharding=out_sharding)
        decode = self.decode if decode is None else decode
        out, cache = attend_heads(
            query,
            key,
            value,
            self._cache() if decode else None,
            rotary_base=self.rotary_base,
            positions=input_positions,
            bias=bias,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=is_causal,
            dropout_rate=0.0 if dropout_rng is None else self.dropout_rate,
            dropout_rng=dropout_rng,
            broadcast_dropout=self.broadcast_dropout,
            dtype=self.dtype,
            precision=self.precision,
            sinks=None if self.sinks is None else self.sinks[...],
            score_mod=score_mod,
        )
        if cache is not None:
            for name, array in cache._asdict().items():
                getattr(self, name)[...] = array
        return self.out(out, out_sharding=out_sharding)

    def _require_features(self, *inputs: jax.Array) -> None:
        features = {
            "inputs_q": ("in_features", self.in_features),
            "inputs_k": ("in_kv_features", self.in_kv_features),
            "inputs_v": ("in_kv_features", self.in_kv_features),
        }
        for (name, (field, expected)), array in zip(features.items(), inputs, strict=True):
            if jnp.shape(array)[-1:] != (expected,):
                raise ValueError(
                    f"{name} must have the {field} of the layer, {expected}, as last dim, got"
                    f" shape {jnp.shape(array)}"
                )

    def _cache(self) -> Cache:
        variables = [getattr(self, name) for name in Cache._fields]
        if any(variable is None for variable in variables):
            raise ValueError(
                "decode=True needs a cache, got none: call init_cache([batch..., longest,"
                " features]) first"
            )
        return Cache(*(variable[...] for variable in variables))

    def _pools(self) -> Pools:
        if self.key_pages is None or self.value_pages is None:
            raise ValueError(
                "pages need a paged cache, got none: call init_pages(pages, page_size) first"
            )
        return Pools(self.key_pages[...], self.value_pages[...])

    def _dropout_rng(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> jax.Array | None:
        """The dropout key of this call; None means no dropout."""
        if self.dropout_rate == 0:
            return None
        quiet = first_from(
            deterministic,
            self.deterministic,
            error_msg="deterministic must be True or False if dropout_rate is not 0, got None;"
            " pass it to the call or to the constructor",
        )
        if quiet:
            return None
        stream = self.rngs if rngs is None else rngs
        if stream is None:
            raise ValueError(
                "rngs must be given for dropout in a module made with keep_rngs=False, got None"
            )
        if not isinstance(stream, (nnx.Rngs, nnx.RngStream)):
            raise TypeError(
                f"rngs must be flax.nnx.Rngs or a stream of them, got {type(stream).__name__}; "
                "pass flax.nnx.Rngs(dropout=key)"
            )
        return stream.dropout() if isinstance(stream, nnx.Rngs) else stream()
