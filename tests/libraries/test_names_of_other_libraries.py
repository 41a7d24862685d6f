"""Argument names of PyTorch's attention functions raise errors that name our arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_memeff import Mask, dot_product_attention, varlen_attention
from jax_memeff._api import arguments

pytestmark = pytest.mark.quick

X = np.ones((1, 4, 2, 8), np.float32)
STARTS = np.array([0, 4])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("softmax_scale", "pass scale"),
        ("return_attn_probs", "pass return_residual"),
        ("dropout_p", "pass dropout_rate and dropout_key"),
        ("attn_mask", "pass mask if it is boolean, else bias"),
        ("mask_mod", r"pass mask=jax_memeff.Mask.function\(mask_mod\)"),
        ("window_size", r"pass mask=jax_memeff.Mask.window\(.*, None for no bound"),
        ("segment_ids", r"pass mask=jax_memeff.Mask.segments\("),
        ("causal", 'pass is_causal, or mask=jax_memeff.Mask.causal\\("bottom_right"\\)'),
    ],
)
def test_an_argument_of_another_library(name, advice):
    message = f"got an unexpected keyword argument '{name}'; {advice}"
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=message):
        dot_product_attention(X, X, X, **given)
    with pytest.raises(TypeError, match=message):
        varlen_attention(X[0], X[0], X[0], STARTS, STARTS, 4, 4, **given)


def test_the_advice_names_what_exists():
    ours = {*arguments.PaddedArguments.__annotations__, "mask", "bias", "return_residual"}
    for name, advice in arguments._OF_OTHER_LIBRARIES.items():
        assert name not in ours
        first = advice.split("=")[0].split(",")[0].split(" ")[0].rstrip(":")
        assert first in ours | {"nothing"}, advice
    windows = eval(
        arguments._WINDOW.removeprefix("mask=jax_memeff."), {"Mask": Mask, "left": 2, "right": 0}
    )
    assert windows == Mask.window(2, 0, "bottom_right")
