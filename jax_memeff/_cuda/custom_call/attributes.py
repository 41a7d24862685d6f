"""The attributes of a custom call that describe its scores (ffi/src/launch/call.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_memeff._call import divisors
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.operands.gradients import captured_name
from jax_memeff._call.operands.table import items
from jax_memeff._call.options import Options
from jax_memeff._cuda import traced_windows
from jax_memeff._cuda.custom_call import buffers
from jax_memeff._cuda.problem import Call, bias_alignment
from jax_memeff.codegen.features import FEATURES

# ``kUnbounded`` of ffi/include/memeff/params.h: windows are computed in 32 bits.
UNBOUNDED = 1 << 30


def of_scores(avals: Operands, options: Options) -> dict[str, Any]:
    """The attributes for ``ScoreScale``, the windows of ``MaskParams``, and so on."""

    def bound(limit: int | None) -> int:
        # A bound beyond the largest length still counts: offsets move the diagonal by up to 2**29.
        return UNBOUNDED if limit is None else max(min(limit, UNBOUNDED), -UNBOUNDED)

    windows = [
        bound(limit)
        for window in (avals.mask.top_left, avals.mask.bottom_right)
        for limit in ((None, None) if window is None else (window.left, window.right))
    ]
    call = Call(avals, options, None)
    scale = options.scaling.of_kernels(has_function=options.score_function is not None)
    return {
        "scale": np.array(scale, np.float32),
        "windows": np.array(windows, np.int32),
        "numbers": np.array(
            [word for own in FEATURES for word in own.number_values(call)], np.int32
        ),
        "longest": np.array(_longest(avals), np.int32),
        "divisors": _divisors(avals, options),
        "bias_alignment": np.int32(bias_alignment(avals)),
    }


def _divisors(avals: Operands, options: Options) -> dict[str, int]:
    """The divisors of the buffers, by name; a buffer without an entry has 1."""
    own = options.divisors
    _, boolean = divisors.combined(avals.mask, own, avals.scores[0])
    bounds = traced_windows.buffer_names(avals.mask)
    found = {buffers.buffer_name(item, bounds): own[item.name] for item in items(avals)}
    found |= {"boolean": boolean, "bias_gradient": own.of_gradient("bias") or 1}
    gradients = {
        f"captured{index}_gradient": own.of_gradient(captured_name(index)) or 1
        for index in range(len(avals.captured))
    }
    return found | gradients


def _longest(avals: Operands) -> tuple[int, int]:
    """The longest packed sequences, for which the grid is sized: at least 1, to fill the gaps."""
    if avals.sequences is None:
        return 0, 0
    return max(avals.sequences.longest_query, 1), max(avals.sequences.longest_key, 1)
