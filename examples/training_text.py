"""The text that train_gpt.py learns: the source of the Python standard library that runs it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256


def standard_library_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules, as (training, validation) uint8 arrays.

    Files are taken in the order of their relative paths, without tests and installed packages;
    every tenth file is for validation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = sorted(path.as_posix() for path in files if not skipped & set(path.parts))
    if len(files) < 10:
        raise SystemExit(
            f"expected the source of the standard library under {root}, got {len(files)} .py files:"
            " run this example with a Python that ships its library as source files"
        )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, name in enumerate(files):
        parts[index % 10 == 9].append((root / name).read_bytes())
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
