"""The nodes of a program, how often a kernel evaluates each, and which of them it keeps."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_memeff.codegen.functions.operations import CHEAP

KEPT_FROM = 4
"""From this cost upwards, a register is cheaper than another evaluation."""


class Level(enum.IntEnum):
    """How often a node is evaluated; the enum's values give the order of evaluation."""

    HEAD = 0
    ROW = 1
    COLUMN = 2
    ELEMENT = 3


class Node(NamedTuple):
    """A C++ expression over earlier nodes."""

    cpp_type: str
    form: str
    args: tuple[int, ...] = ()
    level: Level = Level.HEAD
    cost: int = CHEAP
    inline: bool = False
    """Whether the expression is a name or a number, which needs no variable."""


class Graph(NamedTuple):
    """The nodes of a program in topological order, and which of them are its results."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    offsets: tuple[int, ...]
    """For each of ``Program.float_reads``, the offset of the element in its array; -1 if none."""
    values: tuple[int, ...]
    """The node of each value of the program."""


def kept(nodes: Sequence[Node], targets: Iterable[int]) -> frozenset[int]:
    """The nodes below Level.ELEMENT whose values are kept, if ``targets`` are needed per element.

    A node is kept if a node of a higher level uses it, and if its cost, including the nodes that
    it needs and that are not kept, is worth a register.
    """
    users: dict[int, Level] = {}
    pending = [(target, Level.ELEMENT) for target in targets]
    seen: set[tuple[int, Level]] = set()
    while pending:
        if (edge := pending.pop()) in seen:
            continue
        seen.add(edge)
        index, level = edge
        users[index] = max(users.get(index, Level.HEAD), level)
        pending += [(arg, nodes[index].level) for arg in nodes[index].args]
    found: set[int] = set()
    for index in sorted(users):
        node = nodes[index]
        if node.level < users[index] and _cone_cost(nodes, index, found) >= KEPT_FROM:
            found.add(index)
    return frozenset(found)


def _cone_cost(nodes: Sequence[Node], index: int, found: set[int]) -> int:
    """The cost of a node and of the nodes of its own level that it needs."""
    cost, pending, seen = 0, [index], {index}
    while pending:
        node = nodes[pending.pop()]
        cost += node.cost
        fresh = {arg for arg in node.args if nodes[arg].level == node.level} - seen - found
        seen |= fresh
        pending += fresh
    return cost


def joined(levels: Iterable[Level]) -> Level:
    """The level of an expression whose operands have these levels."""
    found = set(levels)
    if {Level.ROW, Level.COLUMN} <= found:
        return Level.ELEMENT
    return max(found, default=Level.HEAD)
