"""A picture of the scores of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff._api import attention as api
from jax_memeff._blockwise.functions import is_masked
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.pictures import Picture, elements, picture_of_canonical
from jax_memeff._call.offsets import Offsets
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.values import static_integer, takes_objects
from jax_memeff._cuda import selection
from jax_memeff._cuda.problem import KernelCall
from jax_memeff._functions.evaluate import evaluate

_TILE = 128, 128


@takes_objects
def picture(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    arch: str | None = None,
    **arguments: Any,
) -> Picture:
    """Return a picture of the scores of a call: which are valid, how a bias or function changes
    them, and which tiles the kernels skip.

    Takes the arguments of :func:`jax_memeff.dot_product_attention` and computes no attention.
    :meth:`Mask.show` and :meth:`Mask.plot` draw a mask alone.

    Args:
        batch, head: the (batch, head) slice to draw.
        arch: an architecture such as ``"sm_90a"``: the picture then shows the tiles of the forward
            kernel that this call gets there. None means tiles of 128 x 128.

    Returns:
        The picture; call its ``show()`` or ``plot()``.

    Raises:
        TypeError: an argument is traced, or wrong as ``dot_product_attention`` says.
        ValueError: ``batch`` or ``head`` is out of range, there are no scores, or an argument is
            wrong.
        jax_memeff.UnsupportedError: there is no kernel for the call on ``arch``.

    >>> import jax.numpy as jnp, jax_memeff
    >>> x = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    >>> def alibi(score, b, h, q, k):
    ...     return score + 0.5 * (k - q)
    >>> jax_memeff.picture(x, x, x, score_mod=alibi, is_causal=True).show()
    T 8, S 8, tiles of 128 x 128: 0 skipped, 1 partial, 0 full; 100% computed
    a score of 0 becomes -3.5 (▁) to 0 (█), · masked
    ██· · · · · · ·
    ▇▇██· · · · · ·
    ▆▆▇▇██· · · · ·
    ▅▅▆▆▇▇██· · · ·
    ▄▄▅▅▆▆▇▇██· · ·
    ▃▃▄▄▅▅▆▆▇▇██· ·
    ▂▂▃▃▄▄▅▅▆▆▇▇██·
    ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **arguments}
    for name, argument in given.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(argument)):
            raise TypeError(
                f"{name} must hold concrete values, got a traced array; call jax_memeff.picture "
                "outside jax.jit, jax.grad and jax.vmap"
            )
    operands, options, _ = api.prepare(query, key, value, bias, mask, **arguments)
    if 0 in operands.scores_shape:
        raise ValueError(
            "a picture needs at least one batch index, head, row and column, got scores "
            f"[B, N, T, S] = {list(operands.scores_shape)}"
        )
    for name, index, size in zip(
        ("batch", "head"), (batch, head), operands.scores_shape, strict=False
    ):
        static_integer(name, index, "a Python integer", "draw it outside of jax.jit")
        if not 0 <= index < size:
            raise ValueError(f"{name} must be in [0, {size}), got {index}")
    tile, title = _TILE, ""
    if not isinstance(arch, str | None):
        raise TypeError(f"arch must be a name such as 'sm_90a', or None, got {arch!r:.80}")
    if arch is not None and operands.mask.key_lists:
        raise ValueError(
            f"arch must be None for a mask with Mask.keys, got {arch!r}: kernels have tiles of the "
            "entries of lists, which are no tiles of the scores"
        )
    if arch is not None:
        spec = selection.on_architecture(KernelCall(operands, options, None), arch)
        tile, title = (spec.tile.query, spec.tile.key), spec.name
    offsets = arguments.get("offsets")
    offsets = Offsets() if offsets is None else offsets
    drawn = picture_of_canonical(
        dataclasses.replace(
            operands.mask, captured=tuple(x[0] for x in operands.mask.captured)
        ).without_block_masks(),
        operands.scores_shape,
        tile,
        batch=batch,
        head=head,
        offsets=offsets,
    )
    return dataclasses.replace(
        _with_values(drawn, operands, options, batch, head, offsets), title=title
    )


def _with_values(
    drawn: Picture,
    operands: Operands,
    options: Options,
    batch: int,
    head: int,
    offsets: Offsets,
) -> Picture:
    """The picture with what a score of 0 becomes after the score function and the bias, if there
    are any. Elements that these mask are not valid.
    """
    if options.score_function is None and operands.bias is None:
        return drawn
    values = jnp.zeros(drawn.valid.shape, jnp.float32)
    valid = jnp.asarray(drawn.valid)
    if options.score_function is not None:
        place = elements(drawn.rows, drawn.columns, batch, head, offsets)
        arrays = [x[0] for x in operands.captured]
        values = evaluate(options.score_function, values, *place, arrays)
        valid &= ~is_masked(values)
    if operands.bias is not None:
        index = (batch, head, drawn.rows[:, None], drawn.columns[None])
        sizes = operands.bias.shape
        own = tuple(0 if size == 1 else x for size, x in zip(sizes, index, strict=True))
        bias = operands.bias[own].astype(jnp.float32)
        values = values + bias
        valid &= ~is_masked(bias)
    return dataclasses.replace(drawn, values=np.asarray(values), valid=np.asarray(valid))
