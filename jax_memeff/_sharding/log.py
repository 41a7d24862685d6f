"""What the log says about shardings under automatic axes, once for each call.

It is a log and no warning, because XLA asks for the program of a device in a callback, and an
exception there would be an error of the compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jax_memeff._sharding.layout import Move
from jax_memeff._sharding.mesh_axes import Axes, text

_LOGGER = logging.getLogger("jax_memeff")

_logged: set[str] = set()


def of_moves(site: str, moves: Sequence[Move]) -> None:
    """The transfers that a call at this place makes because of its operands' shardings."""
    size = sum(move.bytes for move in moves)
    reasons = ". ".join(reason for move in moves for reason in move.reasons)
    if moves:
        _once(f"{site}: each device gathers {size:,} bytes. {reasons}")


def of_axes_left_over(site: str, axes: Axes) -> None:
    """A call inside a ``jax.shard_map`` that is not manual over these axes."""
    _once(
        f"{site}: inside jax.shard_map it is left to the compiler over {text(axes)}, which gathers "
        "the operands of kernels; name these axes in shard_map's axis_names as well, or enter a "
        "second jax.shard_map over them around the call"
    )


def _once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _LOGGER.warning(message)
