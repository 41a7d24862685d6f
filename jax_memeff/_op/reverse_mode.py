"""Operands of calls that have derivatives in reverse mode only.

JAX also refuses forward mode through a ``jax.custom_vjp``, but without the remedy, and often long
after the call: ``jax.jvp`` of a jitted function raises when the program is lowered, and
``jax.linearize`` when its linear function runs. So the tangents of the operands pass through a
primitive that can only be transposed. Reverse mode does nothing else with it, and every way to
forward mode meets it before it meets the ``jax.custom_vjp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import jax
from jax.interpreters import ad, batching, mlir

from jax_memeff import _compat as compat
from jax_memeff._compat import Primitive
from jax_memeff.errors import UnsupportedError

Pytree = TypeVar("Pytree")


def reverse_mode_only(operands: Pytree) -> Pytree:
    """The same operands, for a call without forward mode.

    Programs that use their tangents for anything but reverse mode raise ``TypeError``.
    """
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _operands_p.bind(*leaves))


def refuse_taylor_mode(primitive: Primitive) -> None:
    """Let ``jax.experimental.jet`` raise an error with the remedy for a primitive."""
    compat.set_taylor_rule(primitive, _no_taylor_mode)


def _no_taylor_mode(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        [
            "expected jax.jvp, nested once for each order, inside `with "
            "jax_memeff.forward_mode():`, got jax.experimental.jet"
        ],
        summary="attention has no Taylor mode",
    )


def _no_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "attention: expected reverse mode (jax.grad, jax.vjp, jax.jacrev), got forward mode "
        "(jax.jvp, jax.jacfwd, jax.linearize, or a solver that uses them); trace the call inside "
        "`with jax_memeff.forward_mode():`"
    )


def _identity(name: str) -> Primitive:
    """A primitive whose results have the types of its operands."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals: avals)
    return primitive


_operands_p = _identity("reverse_mode_operands")
_operands_p.def_impl(lambda *operands: operands)
mlir.register_lowering(_operands_p, lambda ctx, *operands: operands)
batching.primitive_batchers[_operands_p] = lambda operands, dims: (
    _operands_p.bind(*operands),
    dims,
)
refuse_taylor_mode(_operands_p)

_tangents_p = _identity("reverse_mode_tangents")
_tangents_p.def_impl(_no_forward_mode)
mlir.register_lowering(_tangents_p, _no_forward_mode)
batching.primitive_batchers[_tangents_p] = _no_forward_mode
ad.primitive_jvps[_tangents_p] = _no_forward_mode
ad.primitive_transposes[_tangents_p] = lambda cotangents, *_: cotangents


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    passed = iter(_tangents_p.bind(*(x for x in tangents if type(x) is not ad.Zero)))
    # The primals are not bound again, so that residuals are the arrays of the user.
    return list(primals), [x if type(x) is ad.Zero else next(passed) for x in tangents]


ad.primitive_jvps[_operands_p] = _jvp
