"""The attention layer of Haiku."""

from __future__ import annotations

import math
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._api import attention as api
from jax_memeff._call.mask import Mask


class MultiHeadAttention(hk.MultiHeadAttention):
    """``hk.MultiHeadAttention`` with memory linear in the sequence lengths.

    It creates the parameters of Haiku's layer under the same names, so checkpoints load.

    >>> import haiku as hk, jax, jax.numpy as jnp
    >>> from jax_memeff.clients.haiku import MultiHeadAttention
    >>> def model(x):
    ...     layer = MultiHeadAttention(4, key_size=8, w_init=hk.initializers.VarianceScaling())
    ...     return layer(x, x, x, is_causal=True)
    >>> model = hk.without_apply_rng(hk.transform(model))
    >>> x = jnp.ones((2, 10, 32))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (2, 10, 32)
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: ArrayLike | Mask | None = None,
        **options: Any,
    ) -> jax.Array:
        """Attends with any number of batch dims.

        Args:
          query: ``[..., T, D]``.
          key, value: ``[..., S, D]``; their batch dims broadcast to those of ``query``.
          mask: ``[..., 1 or heads, T, S]`` of any dtype, in which nonzero means attend, or a
            ``Mask`` whose arrays have all batch dims merged into one.
          **options: of :func:`jax_memeff.dot_product_attention`.

        Returns:
          ``[..., T, model_size]``.

        Raises:
          ValueError: the rank of ``mask`` is not that of the batch dims plus three.
        """
        *batch, length, _ = query.shape

        def heads(x: jax.Array, size: int, name: str) -> jax.Array:
            x = self._linear_projection(x, size, name)  # type: ignore[operator]
            x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
            return x.reshape(-1, *x.shape[-3:])

        q, k = heads(query, self.key_size, "query"), heads(key, self.key_size, "key")
        v = heads(value, self.value_size, "value")
        q, k, v = (x.astype(jnp.result_type(q, k, v)) for x in (q, k, v))
        if mask is not None and not isinstance(mask, Mask):
            mask = _flat_mask(mask, batch)
        out = api.dot_product_attention(q, k, v, mask=mask, **options)
        project = hk.Linear(
            self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
        )
        return project(out.reshape(*batch, length, -1))


def _flat_mask(mask: ArrayLike, batch: list[int]) -> jax.Array:
    """Haiku's mask with one batch dim."""
    array = jnp.asarray(mask, bool)  # nonzero attends, as in Haiku
    if array.ndim != len(batch) + 3:
        raise ValueError(f"mask must have rank {len(batch) + 3}, got shape {array.shape}")
    if math.prod(array.shape[:-3]) != 1:
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
