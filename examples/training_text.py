"""The text that the examples learn: the source of the Python standard library that runs them."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256
_DEFINITION = re.compile(rb"\n(?=(?:    )?(?:def|class) )")


def standard_library_files() -> list[bytes]:
    """The standard library's modules by relative path, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = sorted(path.as_posix() for path in files if not skipped & set(path.parts))
    if len(files) < 10:
        raise SystemExit(
            f"expected the source of the standard library under {root}, got {len(files)} .py files:"
            " run this example with a Python that ships its library as source files"
        )
    return [(root / name).read_bytes() for name in files]


def standard_library_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules, as (training, validation) uint8 arrays.

    Every tenth file is for validation.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, source in enumerate(standard_library_files()):
        parts[index % 10 == 9].append(source)
    train, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, validation


def unigram_entropy(text: np.ndarray) -> float:
    """Entropy of the byte frequencies of ``text`` (uint8), in nats per byte.

    No model that ignores context reaches a lower loss on this text.

    >>> round(unigram_entropy(np.array([0, 1, 1, 0], np.uint8)), 4)  # ln 2
    0.6931
    """
    counts = np.bincount(text, minlength=VOCABULARY)
    frequencies = counts[counts > 0] / text.size
    return float(-np.sum(frequencies * np.log(frequencies)))


def batches(text: np.ndarray, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Endless int32 batches ``[batch, context + 1]`` of windows at random places of ``text``."""
    generator = np.random.default_rng(seed)
    window = np.arange(context + 1)
    while True:
        starts = generator.integers(0, text.size - context, batch)
        yield text[starts[:, None] + window].astype(np.int32)


def validation_batches(
    text: np.ndarray, batch: int, context: int, windows: int
) -> Iterator[np.ndarray]:
    """The fixed windows that validation reads: evenly spaced over ``text``."""
    window = np.arange(context + 1)
    starts = np.linspace(0, text.size - window.size, windows).astype(np.int64)
    for index in range(0, starts.size, batch):
        yield text[starts[index : index + batch, None] + window].astype(np.int32)


def packed_documents(batch: int, context: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless arrays ``[batch, context]`` of documents in random order, one after another.

    A document is a function or class of at most ``context`` bytes; the end of a row may cut it.
    ``documents`` has its number, ``positions`` counts within it, and ``has_target`` is whether the
    next token belongs to it. All others are int32.
    """
    parts = (part for file in standard_library_files() for part in _DEFINITION.split(file))
    documents = [part for part in parts if 0 < len(part) <= context]
    generator, size = np.random.default_rng(seed), batch * context
    while True:
        shuffled = [documents[i] for i in generator.permutation(len(documents))]
        lengths = np.array([len(part) for part in shuffled], np.int32)
        text = np.frombuffer(b"".join(shuffled), np.uint8).astype(np.int32)
        number = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)
        first = np.repeat(np.cumsum(lengths, dtype=np.int32) - lengths, lengths)
        positions = np.arange(text.size, dtype=np.int32) - first
        for start in range(0, text.size - size, size):
            at, following = slice(start, start + size), slice(start + 1, start + size + 1)
            arrays = {"tokens": text[at], "targets": text[following], "positions": positions[at]}
            arrays |= {"documents": number[at], "has_target": number[at] == number[following]}
            yield {name: x.reshape(batch, context) for name, x in arrays.items()}
