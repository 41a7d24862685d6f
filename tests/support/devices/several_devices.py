"""Devices for tests of several devices: those of the host, and GPUs if there are any.

``at("devices", cpu=4, cuda=[2, 4])`` parametrizes a test with the fixture ``devices`` of
conftest.py. On GPUs problems are larger, in bfloat16, and have a head dim with the fastest kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Devices = Sequence[jax.Device]


class Sizes(NamedTuple):
    """The sizes of problems for several devices."""

    dtype: Any
    head_dim: int
    scale: int
    """The factor of the lengths of sequences."""
    tolerance: float
    """The tolerance of relative Frobenius errors: a few roundings of results."""


ON_HOST = Sizes(np.float32, 8, 1, 5e-6)
ON_GPUS = Sizes(jnp.bfloat16, 64, 8, 2**-7)


def sizes(devices: Devices) -> Sizes:
    return ON_HOST if devices[0].platform == "cpu" else ON_GPUS


def at(names: str, cpu: Iterable[Any] | int, cuda: Iterable[Any] = ()):
    """``parametrize`` with devices as the last name.

    Args:
        names: the parameters; "devices" is the last one. cpu: the number of devices, or the values
        of all parameters if there are several. cuda: the same for GPUs, each of them.
    """

    def parameters(platform: str, given: Any, marks: tuple[Any, ...]):
        *others, count = given if isinstance(given, tuple) else (given,)
        texts = [*map(str, others), f"{platform}{count}"]
        return pytest.param(*others, (platform, count), marks=marks, id="-".join(texts))

    on_host = [cpu] if isinstance(cpu, int) else cpu
    return pytest.mark.parametrize(
        names,
        [
            *(parameters("cpu", given, ()) for given in on_host),
            *(parameters("cuda", given, (pytest.mark.gpu,)) for given in cuda),
        ],
        indirect=["devices"],
    )


def transfers(text: str, *kinds: str) -> list[str]:
    """The result types of transfers of these kinds in a compiled program.

    An asynchronous transfer has its results at its done operation.

    >>> transfers('''
    ...   %a = bf16[8]{0} all-gather(%x), dimensions={0}
    ...   %s = (bf16[4]{0}, f32[8]{0}) collective-permute-start(%y)
    ...   %d = (bf16[4]{0}, f32[8]{0}) collective-permute-done(%s)''', "collective-permute")
    ['bf16[4]', 'f32[8]']
    """
    found = re.findall(rf"= (.+?) (?:{'|'.join(kinds)})(?:-done)?\(", text)
    return [array for result in found for array in re.findall(r"\w+\[[\d,]*\]", result)]


def shape_of(array: str) -> tuple[int, ...]:
    """The shape of an array in the notation of ``transfers``.

    >>> shape_of("bf16[2,128,4,64]")
    (2, 128, 4, 64)
    """
    return tuple(map(int, re.findall(r"\d+", array.split("[")[1])))
