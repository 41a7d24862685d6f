"""The requests of serve.py: sizes, and random prompts with common prefixes."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Load:
    """The sizes of a server and of its requests."""

    requests: int
    slots: int
    """The largest number of sequences that run at a time."""
    step_tokens: int
    """The size of a step with prompts; a step without prompts has one token per slot."""
    pages: int
    prefixes: tuple[int, ...]
    """The lengths of the prefixes that requests share."""
    prompt: tuple[int, int]
    """The smallest and the largest number of prompt tokens after the prefix."""
    completion: tuple[int, int]
    arrivals: float
    """The average number of requests that arrive in a step."""
    training_steps: int
    page_size: int = 16

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence."""
        return max(self.prefixes) + self.prompt[1] + self.completion[1]

    @property
    def max_pages(self) -> int:
        return -(-self.longest // self.page_size)


LOADS = {
    "tiny": Load(8, 3, 16, 14, (20,), (1, 20), (4, 16), 0.5, 4),
    "cpu": Load(96, 12, 96, 64, (90, 40), (8, 100), (8, 64), 0.7, 120),
    "gpu": Load(512, 64, 1024, 1024, (600, 130), (16, 800), (32, 256), 2.0, 1000),
}


@dataclasses.dataclass
class Request:
    """A prompt to complete, and its progress."""

    tokens: list[int]
    """The prompt, followed by the completion so far."""
    prompt: int
    completion: int
    """The number of tokens to generate; 0 for a prefix, whose pages are kept."""
    prefix: Request | None = None
    arrival: int = 0
    """The step in which it arrives."""
    sequence: int | None = None
    """Its name in the pool while it runs."""
    cached: int = 0
    """The number of its tokens whose keys and values are in the pool."""

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.prompt + self.completion

    @property
    def is_prompt(self) -> bool:
        """Whether tokens before its newest one are missing from the pool."""
        return self.cached < len(self.tokens) - 1


def random_requests(load: Load, text: np.ndarray, seed: int) -> tuple[list[Request], list[Request]]:
    """Prefixes, and requests in order of arrival; about two thirds of them have a prefix."""
    rng = np.random.default_rng(seed)

    def excerpt(length: int) -> list[int]:
        start = rng.integers(text.size - length)
        return text[start : start + length].tolist()

    prefixes = [Request(excerpt(length), length, 0) for length in load.prefixes]
    arrivals = np.cumsum(rng.exponential(1 / load.arrivals, load.requests)).astype(int)
    requests = []
    for arrival in arrivals:
        prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 2 / 3 else None
        own = excerpt(int(rng.integers(load.prompt[0], load.prompt[1] + 1)))
        tokens = [*(prefix.tokens if prefix else []), *own]
        length = int(rng.integers(load.completion[0], load.completion[1] + 1))
        requests.append(Request(tokens, len(tokens), length, prefix, int(arrival)))
    return prefixes, requests
