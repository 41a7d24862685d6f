"""Gradients of the arrays of a call, by name: which may exist, and which are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jax_memeff._call.operands import OperandRow, QkvPackedOperands, row_of


class NeedsGrad(NamedTuple):
    """The gradients that the backward computes; others are not allocated.

    If query, key and value are one array, it has one gradient, and the first three are equal.
    """

    query: bool
    key: bool
    value: bool
    bias: bool
    sinks: bool = False
    captured: tuple[bool, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The gradients that are needed; those of captured arrays are ``captured.0`` and so on."""
        *fields, captured = self._asdict().items()
        own = dict(fields)
        own |= {captured_name(index): needed for index, needed in enumerate(captured[1])}
        return tuple(name for name, needed in own.items() if needed)


class Gradients(NamedTuple):
    """Gradients in the operands' own shapes and dtypes; None if not needed."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    bias: jax.Array | None
    sinks: jax.Array | None = None
    captured: tuple[jax.Array | None, ...] = ()


class QkvPackedGradients(NamedTuple):
    """Gradients of ``QkvPackedOperands``; None if not needed."""

    query_key_value: jax.Array | None
    bias: jax.Array | None
    sinks: jax.Array | None = None
    captured: tuple[jax.Array | None, ...] = ()


AnyGradients = Gradients | QkvPackedGradients


def captured_name(index: int) -> str:
    """The name of a captured array: its path in the operands."""
    return f"captured.{index}"


def array_of(tree: Any, name: str) -> Any:
    """The array with this name in operands, gradients or ``NeedsGrad``.

    >>> array_of(NeedsGrad(True, True, True, False, captured=(False, True)), "captured.1")
    True
    """
    field, *index = name.split(".")
    value = getattr(tree, field)
    return value[int(index[0])] if index else value


def named_arrays(tree: Any) -> dict[str, Any]:
    """The arrays of gradients by name, without those that are None."""
    arrays = {name: x for name, x in tree._asdict().items() if name != "captured"}
    arrays |= {captured_name(index): x for index, x in enumerate(tree.captured)}
    return {name: x for name, x in arrays.items() if x is not None}


def replaced(tree: Any, arrays: dict[str, Any]) -> Any:
    """Operands or gradients with other arrays, given by name."""
    captured = list(tree.captured)
    fields = {}
    for name, x in arrays.items():
        field, *index = name.split(".")
        if index:
            captured[int(index[0])] = x
        else:
            fields[field] = x
    return tree._replace(captured=tuple(captured), **fields)


def differentiable(operands: Any) -> dict[str, OperandRow]:
    """The operands that can have a gradient, present or not, in the order of the gradients.

    Captured arrays of integers are among them; their gradients are never needed.
    """
    found = {}
    for field in type(operands)._fields:
        if field == "captured":
            names = map(captured_name, range(len(operands.captured)))
            found |= dict.fromkeys(names, row_of("captured.*"))
        elif (row := row_of(field)) and row.has_gradient:
            found[field] = row
    return found


def gradients_needed(operands: Any, needs_grad: NeedsGrad) -> list[str]:
    """The names of ``attention_bwd``'s results, in their order."""
    needed = set(needs_grad.names)
    return [
        name
        for name in differentiable(operands)
        if ("query" if name == "query_key_value" else name) in needed
        and array_of(operands, name) is not None
    ]


def needs_grad_of(operands: Any, needed: Iterable[str]) -> NeedsGrad:
    """The inverse of :func:`gradients_needed`."""
    names = set(needed)
    if isinstance(operands, QkvPackedOperands) and "query_key_value" in names:
        names |= {"query", "key", "value"}
    *fields, _ = NeedsGrad._fields
    captured = (captured_name(index) in names for index in range(len(operands.captured)))
    return NeedsGrad(*(name in names for name in fields), captured=tuple(captured))


def gradients_of(operands: Any, given: dict[str, Any] | None = None) -> Any:
    """Named gradients of the operands, ``AnyGradients``; the others are None."""
    kind: Any = QkvPackedGradients if isinstance(operands, QkvPackedOperands) else Gradients
    none = dict.fromkeys(kind._fields) | {"captured": (None,) * len(operands.captured)}
    return replaced(kind(**none), given or {})


def gradients_from(results: Iterable[Any], operands: Any, needs_grad: NeedsGrad) -> AnyGradients:
    """The results of ``attention_bwd``, by name."""
    names = gradients_needed(operands, needs_grad)
    return gradients_of(operands, dict(zip(names, results, strict=True)))
