"""The attention modules for ``flax.linen``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike, DTypeLike

from jax_memeff._call.functions import ScoreFunction
from jax_memeff._call.mask import Mask
from jax_memeff._call.values import takes_objects
from jax_memeff.flax import attention
from jax_memeff.flax.heads import Cache, SegmentIds, attend_heads, heads_of_keys
from jax_memeff.flax.pages import Pages, Pools, attend_pages, require_readable


class MultiHeadAttention(linen.MultiHeadDotProductAttention):
    """``flax.linen.MultiHeadAttention`` with linear memory and more arguments.

    Parameters and cache have the names and shapes of Flax's module, so checkpoints of either load
    into the other. Outputs and gradients agree too, except for fully masked rows (0 here) and for
    the dropout bits.

    >>> import jax, jax.numpy as jnp, jax_memeff.flax.linen
    >>> layer = jax_memeff.flax.linen.MultiHeadAttention(num_heads=4, num_kv_heads=2)
    >>> x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    >>> variables = layer.init(jax.random.key(1), x)
    >>> jax.tree.map(jnp.shape, variables["params"]["key"])
    {'bias': (2, 8), 'kernel': (32, 2, 8)}
    >>> layer.apply(variables, x, is_causal=True).shape
    (2, 10, 32)

    It adds these fields to those of Flax's module:

    Attributes:
      num_kv_heads: K, which divides ``num_heads``; None means ``num_heads``. Query head ``n`` reads
        key head ``n // (N // K)``.
      rotary_base: rotates queries and keys by their position
        (:func:`jax_memeff.flax.rotary_embedding`); None means no rotary embedding.
      sinks_init: the initializer of the parameter ``sinks``, ``[num_heads]``: a learned logit per
        head that takes part in the softmax and has no value. None means no sinks, and no parameter.
      pool_shape: ``(pages, page_size)`` of the paged cache, which calls with ``pages`` read and
        write.
      pool_dtype: the dtype of this cache, which may be float8_e4m3fn; None means that of the keys.

    ``decode=True`` keeps Flax's cache. ``init`` with inputs of the full length creates it. A call
    with the collection ``cache`` mutable appends its T new tokens, one or several, and attends
    causally to all tokens in the cache. ``inputs_q`` may have only the last tokens of ``inputs_k``.
    """

    attention_fn: Callable[..., jax.Array] = attention.attention_fn
    num_kv_heads: int | None = None
    rotary_base: float | None = None
    sinks_init: Callable[..., jax.Array] | None = None
    pool_shape: tuple[int, int] | None = None
    pool_dtype: DTypeLike | None = None

    @linen.compact
    @takes_objects
    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        bias: ArrayLike | None = None,
        mask: ArrayLike | Mask | None = None,
        segment_ids: SegmentIds | None = None,
        is_causal: bool = False,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        score_mod: ScoreFunction | None = None,
        pages: Pages | None = None,
    ) -> jax.Array:
        """Project the inputs, attend, and project the result.

        Args:
          inputs_q: ``[batch..., T, features]``.
          inputs_k: ``[batch..., S, features]``; ``inputs_q`` by default.
          inputs_v: ``[batch..., S, features]``; ``inputs_k`` by default.
          inputs_kv: ``inputs_k`` and ``inputs_v`` in one argument, which Flax deprecates.
          bias: added to the scores; broadcasts to ``[batch..., N, T, S]``. It has a gradient.
          mask: an array that broadcasts to ``[batch..., N, T, S]``, in which nonzero means attend;
            or a :class:`jax_memeff.Mask`, whose arrays have all batch dimensions merged into one.
            During decoding S is the length of the cache, and a window counts from the positions of
            the tokens in it.
          segment_ids: integers ``[batch..., T]`` of sequences packed into one row, or the pair (of
            queries, of keys). Tokens with equal ids attend to each other; tokens with negative ids
            attend to nothing. Rotary positions need not restart, because only their differences
            matter.
          is_causal: row ``t`` attends to columns ``s <= t``; decoding is always causal.
          deterministic: True turns dropout off. Required here or as a field if the rate is not 0.
          dropout_rng: the dropout key; it takes precedence over the stream ``dropout``.
          sow_weights: must be False, because attention weights are never formed.
          score_mod: a function of the score, batch index, head, row and column to the new score, as
            in :func:`jax_memeff.dot_product_attention`. During decoding the row is the position of
            the token in the cache.
          pages: append the new tokens to the paged cache, in the collection ``cache``, and attend
            causally to all tokens of their sequences. Inputs are ``[B, T, features]``, or
            ``[tokens, features]`` with ``query_starts``. Windows and functions in ``mask``, and
            ``score_mod``, use positions in the sequence. ``is_causal`` changes nothing, and the
            field ``precision`` affects the projections only. ``init`` with ``pages`` creates an
            empty cache; so does a call whose ``cache`` is mutable and has none, before it appends.

        Returns:
          ``[batch..., T, out_features]``.

        Raises:
          ValueError: shapes do not fit, head counts do not divide, ``inputs_kv`` is given with
            ``inputs_k`` or ``inputs_v``, ``segment_ids`` are given while decoding, or an argument
            is given that paged caches do not support.
          TypeError: ``attention_fn`` was replaced.
          jax_memeff.UnsupportedError: ``sow_weights`` or a matrix product is set, or no kernel
            supports the call.
        """
        self._refuse(sow_weights)
        if inputs_kv is not None:
            inputs_k = _deprecated(inputs_kv, inputs_k, inputs_v)
        elif inputs_v is not None:
            if inputs_k is None:
                raise ValueError("inputs_k must be given if inputs_v is, got None")
            _warn_if_a_mask(inputs_v)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        quiet = self.dropout_rate == 0 or linen.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if not quiet and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        if pages is not None:
            pools = self._pools(key, value)
            out, cache = attend_pages(
                query,
                key,
                value,
                Pools(*(variable.value for variable in pools)),
                pages,
                rotary_base=self.rotary_base,
                positions=None,
                mask=mask,
                dtype=self.dtype,
                sinks=self._sinks(),
                score_mod=score_mod,
                bias=bias,
                segment_ids=segment_ids,
                deterministic=quiet,
            )
            # The inputs of `init` are tokens of no sequence: it creates an empty cache.
            variables = None if self.is_initializing() else pools
        else:
            variables = self._cache(key, value) if self.decode else None
            out, cache = attend_heads(
                query,
                key,
                value,
                None if variables is None else Cache(*(variable.value for variable in variables)),
                rotary_base=self.rotary_base,
                bias=bias,
                mask=mask,
                segment_ids=segment_ids,
                is_causal=is_causal,
                dropout_rate=0.0 if quiet else self.dropout_rate,
                dropout_rng=dropout_rng,
                broadcast_dropout=self.broadcast_dropout,
                dtype=self.dtype,
                precision=self.precision,
                sinks=self._sinks(),
                score_mod=score_mod,
            )
        if variables is not None and cache is not None:
            for variable, array in zip(variables, cache, strict=True):
                variable.value = array
        return self._project_out(out, inputs_q.shape[-1])

    def _refuse(self, sow_weights: bool) -> None:
        if self.attention_fn is not attention.attention_fn:
            raise TypeError(
                "attention_fn cannot be replaced in this module: use flax.linen.MultiHeadAttention"
            )
        replaced = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
        attention.refuse(
            self if sow_weights else None,
            [name for name in replaced if getattr(self, name) is not None],
        )

    def _sinks(self) -> jax.Array | None:
        if self.sinks_init is None:
            return None
        return self.param("sinks", self.sinks_init, (self.num_heads,), jnp.float32)

    def _project(self, *inputs: jax.Array) -> list[jax.Array]:
        """Query ``[batch..., T, N, H]``, key and value ``[batch..., S, K, H]``."""
        key_heads = heads_of_keys(self.num_heads, self.num_kv_heads)
        qkv_features = self.qkv_features or inputs[0].shape[-1]
        if qkv_features % self.num_heads:
            raise ValueError(
                f"qkv_features must be a multiple of num_heads, {self.num_heads}, got"
                f" {qkv_features}"
            )
        dense = functools.partial(
            linen.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        head_dim = qkv_features // self.num_heads
        heads = {"query": self.num_heads, "key": key_heads, "value": key_heads}
        projected = [
            dense(features=(count, head_dim), name=name)(array)
            for (name, count), array in zip(heads.items(), inputs, strict=True)
        ]
        if self.normalize_qk:
            norm = functools.partial(
                linen.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            projected[:2] = norm(name="query_ln")(projected[0]), norm(name="key_ln")(projected[1])
        return projected

    def _project_out(self, out: jax.Array, features: int) -> jax.Array:
        """``[batch..., T, N, H]`` to ``[batch..., T, out_features]``, ``features`` by default."""
        return linen.DenseGeneral(
            features=self.out_features or features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(out)

    def _cache(self, key: jax.Array, value: jax.Array) -> tuple[linen.Variable, ...] | None:
        """The cache's variables in the order of ``Cache``; None in the call that creates them."""
        exists = self.has_variable("cache", "cached_key")
        variables = (
            self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        return variables if exists else None

    def _pools(self, key: jax.Array, value: jax.Array) -> tuple[linen.Variable, ...]:
        """The variables in the order of ``Pools``, created if there are none."""
        if self.pool_shape is None:
            raise ValueError(
                "pages need a paged cache, got none: give the module pool_shape=(pages, page_size)"
            )
        if not isinstance(self.pool_shape, (tuple, list)) or len(self.pool_shape) != 2:
            raise ValueError(f"pool_shape must be (pages, page_size), got {self.pool_shape!r:.80}")
        require_readable(*self.pool_shape, self.pool_dtype)
        return tuple(
            self.variable(
                "cache",
                name,
                jnp.zeros,
                (*self.pool_shape, *x.shape[-2:]),
                x.dtype if self.pool_dtype is None else self.pool_dtype,
            )
            for name, x in (("key_pages", key), ("value_pages", value))
        )


def _deprecated(
    inputs_kv: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> jax.Array:
    """``inputs_k`` of a call that passes ``inputs_kv``."""
    if inputs_k is not None or inputs_v is not None:
        raise ValueError(
            "inputs_kv must be None if inputs_k or inputs_v is given, got an array of shape"
            f" {inputs_kv.shape}; pass inputs_k and inputs_v only"
        )
    warnings.warn(
        "flax deprecates inputs_kv: pass inputs_k, which is the default of inputs_v",
        DeprecationWarning,
        stacklevel=4,
    )
    return inputs_kv


def _warn_if_a_mask(inputs_v: jax.Array) -> None:
    """Programs for Flax before 0.7.4 pass the mask as the third positional argument."""
    shape = jnp.shape(inputs_v)
    if len(shape) >= 2 and shape[-1] == shape[-2]:
        warnings.warn(
            f"inputs_v has the shape of a mask, {shape}: if it is one, pass it as mask=. Since Flax"
            " 0.7.4 the function signature of MultiHeadDotProductAttention's `__call__` method has"
            " changed: its third positional argument is inputs_v",
            DeprecationWarning,
            stacklevel=3,
        )


class MultiHeadDotProductAttention(MultiHeadAttention):
    """:class:`MultiHeadAttention` under Flax's other name, from which Flax names submodules."""
