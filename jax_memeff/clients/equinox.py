"""The attention layer of Equinox."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._api import attention as api
from jax_memeff._call.mask import Mask


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """``eqx.nn.MultiheadAttention`` with memory linear in the sequence lengths.

    Constructor and parameters are those of Equinox, so the leaves of existing models load.

    >>> import jax, jax.numpy as jnp
    >>> from jax_memeff.clients.equinox import MultiheadAttention
    >>> layer = MultiheadAttention(num_heads=4, query_size=32, key=jax.random.key(0))
    >>> x = jnp.ones((2, 10, 32))
    >>> jax.vmap(lambda x: layer(x, x, x, is_causal=True))(x).shape
    (2, 10, 32)
    """

    def __call__(  # type: ignore[override]
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: ArrayLike | Mask | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
        **options: Any,
    ) -> jax.Array:
        """Attends without a batch: ``jax.vmap`` becomes the batch of one call.

        Args:
          query: ``[T, query_size]``.
          key_: ``[S, key_size]``.
          value: ``[S, value_size]``.
          mask: ``[T, S]`` or ``[num_heads, T, S]`` of any dtype, in which nonzero means attend, or
            a ``Mask``.
          key: the key of the dropout.
          inference: whether nothing is dropped; None means what the layer says.
          deterministic: Equinox's deprecated name of ``inference``.
          process_heads: as in Equinox.
          **options: of :func:`jax_memeff.dot_product_attention`.

        Returns:
          ``[T, output_size]``.

        Raises:
          RuntimeError: dropout is on, and ``key`` is None.
        """
        if deterministic is not None:
            warnings.warn("Equinox deprecates deterministic: pass inference", stacklevel=2)
            inference = deterministic
        inference = self.dropout.inference if inference is None else inference
        rate = 0.0 if inference else float(self.dropout.p)
        if rate and key is None:
            raise RuntimeError("dropout needs key, got None; pass key, or inference=True")

        def heads(projection: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
            return jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)

        q = heads(self.query_proj, query)
        k, v = heads(self.key_proj, key_), heads(self.value_proj, value)
        if process_heads is not None:
            q, k, v = process_heads(q, k, v)
        q, k, v = (x.astype(jnp.result_type(q, k, v)) for x in (q, k, v))
        if mask is not None and not isinstance(mask, Mask):
            mask = jnp.asarray(mask, bool)  # nonzero attends, as in Equinox
        out = api.dot_product_attention(
            q, k, v, mask=mask, dropout_rate=rate, dropout_key=key, **options
        )
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))
