"""The types of the command line's arguments: each makes a value of the text, or refuses it."""

from __future__ import annotations

import argparse
import re

from jax_memeff.codegen import arch as architectures


def dtype(text: str) -> str:
    """The short name of a dtype, which may have JAX's name.

    >>> dtype("bfloat16"), dtype("f16")
    ('bf16', 'f16')
    """
    return re.sub("^(b?)float(?=(16|32|64)$)", r"\1f", text)


def architecture(text: str) -> str:
    """The name of an architecture."""
    try:
        architectures.capability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def size(text: str) -> int:
    """A dim or a length."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
