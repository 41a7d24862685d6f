"""Serve a byte-level GPT: continuous batching over keys and values in pages.

    python examples/serve.py               # about a minute on two CPU cores
    python examples/serve.py --pages 32    # a smaller pool: requests wait, or lose their pages

The model is that of train_gpt.py, trained briefly if OUTPUT has no weights yet. Requests arrive at
random. Each step of the server computes one token of every running completion and fills the rest
of its token budget with chunks of prompts, all in one call. Requests with a common prefix share its
pages. If the pool is full, requests wait. If a running completion needs a page and none is free,
the youngest sequence is preempted: its pages are freed, and it is computed again later.

Every completion is then compared, token for token, with the output of the same model without a
cache.
OUTPUT receives weights, served.json, pool.png (the pool over time) and completions.txt. The exit
status is 1 if a completion differs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn
from serve_model import Pools, copied_page, next_tokens, trained, without_cache
from serve_requests import LOADS, Load, Request, random_requests
from train_gpt import PRESETS, Preset
from training_text import standard_library_text

from jax_memeff import OutOfPagesError, PagePool


class Server:
    """The running sequences, the waiting requests, and the pool."""

    def __init__(
        self, graph: Any, parameters: Any, preset: Preset, load: Load, implementation: Any
    ):
        self.load, self.parameters = load, parameters
        self.pool = PagePool(load.pages, load.page_size)
        shape = (load.pages, load.page_size, preset.heads, preset.width // preset.heads)
        self.pools: Pools = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(preset.layers)]
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        """In the order in which they started."""
        self.preempted = 0
        function = functools.partial(next_tokens, graph=graph, implementation=implementation)
        self._next = jax.jit(function, donate_argnums=1)
        self._copy = jax.jit(copied_page, donate_argnums=0)
        # Compile the programs for steps with and without prompts before time is measured.
        self._compute([], load.step_tokens)
        self._compute([], load.slots)

    def step(self) -> tuple[list[Request], int]:
        """Compute some tokens of the running sequences.

        Returns:
            The finished requests, and the number of computed tokens.
        """
        self._begin()
        work = self._work()
        is_decoding = all(count == 1 for _, count in work)
        found = self._compute(work, self.load.slots if is_decoding else self.load.step_tokens)
        done = []
        for (request, count), token in zip(work, found, strict=False):
            request.cached += count
            if request.cached == len(request.tokens) and not request.is_done:
                request.tokens.append(int(token))
            if request.is_done and (request.completion or request.cached == request.prompt):
                self.running.remove(request)
                done.append(request)
                if request.completion:  # the pages of a prefix are kept
                    self._end(request)
        return done, sum(count for _, count in work)

    def _begin(self) -> None:
        """Start waiting requests while there are free slots, and pages for their prompts."""
        while self.waiting and len(self.running) < self.load.slots:
            request, prefix = self.waiting[0], self.waiting[0].prefix
            common = 0
            if prefix is not None:
                if prefix.cached < prefix.prompt:
                    return
                common = prefix.prompt // self.load.page_size
            needed = len(request.tokens) // self.load.page_size + 1 - common
            # Leave one page for each running sequence, so that none is preempted at once.
            if self.running and self.pool.free_pages < needed + len(self.running):
                return
            if prefix is None:
                request.sequence = self.pool.allocate()
            else:
                assert prefix.sequence is not None
                request.sequence, copy = self.pool.fork(prefix.sequence)
                request.cached = prefix.prompt
                if copy is not None:
                    self.pools = self._copy(self.pools, copy.source, copy.target)
            self.running.append(self.waiting.popleft())

    def _work(self) -> list[tuple[Request, int]]:
        """The sequences of a step and their numbers of tokens: completions first, then prompts."""
        work: list[tuple[Request, int]] = []
        left = self.load.step_tokens
        for request in sorted(self.running, key=lambda request: request.is_prompt):
            # An earlier iteration may have preempted this sequence.
            count = min(len(request.tokens) - request.cached, left)
            if request in self.running and count and self._grow(request, count):
                work.append((request, count))
                left -= count
        return [(request, count) for request, count in work if request in self.running]

    def _grow(self, request: Request, count: int) -> bool:
        """Get pages for more tokens, if necessary by preempting the youngest sequence."""
        while request in self.running:
            try:
                assert request.sequence is not None
                self.pool.grow(request.sequence, count)
                return True
            except OutOfPagesError:
                youngest = self.running.pop()
                self._end(youngest)
                self.waiting.appendleft(youngest)
                self.preempted += 1
        return False

    def _end(self, request: Request) -> None:
        assert request.sequence is not None
        self.pool.free(request.sequence)
        request.sequence, request.cached = None, 0

    def _compute(self, work: list[tuple[Request, int]], size: int) -> np.ndarray:
        tokens = np.zeros(size, np.int32)
        counts = np.zeros(self.load.slots, np.int32)
        names: list[int] = []
        for slot, (request, count) in enumerate(work):
            first = counts.sum()
            tokens[first : first + count] = request.tokens[request.cached :][:count]
            counts[slot] = count
            assert request.sequence is not None
            names.append(request.sequence)
        table = np.full((self.load.slots, self.load.max_pages), -1, np.int32)
        lengths = np.zeros(self.load.slots, np.int32)
        table[: len(names)] = self.pool.table(names, self.load.max_pages)
        lengths[: len(names)] = self.pool.lengths(names)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        found, self.pools = self._next(self.parameters, self.pools, tokens, table, lengths, starts)
        return np.asarray(found)


def serve(server: Server, prefixes: list[Request], requests: list[Request]) -> dict[str, Any]:
    """Run until every request is done; returns the state of the pool per step, and the timing."""
    arriving = collections.deque(requests)
    server.waiting.extend(prefixes)
    done, history, computed = 0, [], 0
    columns = (
        TextColumn("{task.completed}/{task.total} requests"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
    )
    began = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(requests), state="")
        while done < len(requests):
            while arriving and arriving[0].arrival <= len(history):
                server.waiting.append(arriving.popleft())
            finished, tokens = server.step()
            done += sum(request.completion > 0 for request in finished)
            computed += tokens
            pool = server.pool
            named = sum(len(pool.pages_of(name)) for name in pool.sequences)
            used = pool.pages - pool.free_pages
            state = {"used": used, "shared": named - used, "tokens": tokens}
            history.append(state | {"running": len(server.running), "waiting": len(server.waiting)})
            rate = computed / (time.perf_counter() - began)
            text = f"{rate:,.0f} tokens/s, {used}/{pool.pages} pages, {len(server.waiting)} waiting"
            progress.update(task, completed=done, state=text)
    seconds = time.perf_counter() - began
    generated = sum(request.completion for request in requests)
    return {
        "seconds": seconds,
        "steps": len(history),
        "preempted": server.preempted,
        "tokens_per_second": computed / seconds,
        "generated_per_second": generated / seconds,
        "history": history,
    }


def plot(history: list[dict[str, int]], pages: int, path: Path) -> None:
    """Draw the pages of the pool and the sequences over time."""
    columns = {name: [state[name] for state in history] for name in history[0]}
    steps = np.arange(len(history))
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.fill_between(steps, columns["used"], step="post", alpha=0.6, label="pages in use")
    without = np.add(columns["used"], columns["shared"])
    upper.step(steps, without, "tab:red", where="post", label="without common prefixes")
    upper.axhline(pages, color="gray", linestyle="--", label="pages of the pool")
    upper.set(ylabel="pages", ylim=(0, None))
    for name in ("running", "waiting"):
        lower.step(steps, columns[name], where="post", label=f"{name} sequences")
    lower.step(steps, columns["tokens"], where="post", alpha=0.5, label="tokens of the step")
    lower.set(xlabel="step", ylim=(0, None))
    for axes in (upper, lower):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and fill in the name of the preset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(LOADS), help="default: by platform")
    parser.add_argument("--pages", type=int, help="pages of the pool; default: the preset's tokens")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=("cuda", "xla"), help="as in paged_attention")
    parser.add_argument("--output", type=Path, default=Path("serve_output"))
    options = parser.parse_args(arguments)
    options.preset = options.preset or ("gpu" if jax.default_backend() == "gpu" else "cpu")
    load = LOADS[options.preset]
    try:
        PagePool(1, options.page_size)
    except ValueError as error:
        parser.error(f"--page-size: {error}")
    tokens = load.pages * load.page_size
    load = dataclasses.replace(load, page_size=options.page_size)
    # The longest sequence must fit beside the prefixes, otherwise it would wait forever.
    least = load.max_pages + sum(-(-length // load.page_size) for length in load.prefixes)
    options.pages = tokens // load.page_size if options.pages is None else options.pages
    if options.pages < least:
        parser.error(f"--pages: expected at least {least}, got {options.pages}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, serve, compare, report; returns the exit status."""
    options = parse(arguments)
    load = dataclasses.replace(
        LOADS[options.preset], pages=options.pages, page_size=options.page_size
    )
    # In float32 rounding is small enough that both computations agree in the most likely token.
    preset = dataclasses.replace(PRESETS[options.preset], dtype="float32")
    options.output.mkdir(parents=True, exist_ok=True)
    weights = options.output / f"weights_{options.preset}_{options.seed}.npz"
    graph, parameters = trained(preset, load.training_steps, options.seed, weights)

    prefixes, requests = random_requests(load, standard_library_text()[1], options.seed)
    # TF32 products, the default on GPUs, depend on the shapes, and so would the most likely token.
    with jax.default_matmul_precision("highest"):
        server = Server(graph, parameters, preset, load, options.implementation)
        result = serve(server, prefixes, requests)
        same = without_cache(graph, parameters, requests, load.longest)
    plot(result["history"], load.pages, options.output / "pool.png")

    def text(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="backslashreplace")

    parts = [(x.tokens[: x.prompt], x.tokens[x.prompt :]) for x in requests]
    lines = (f"--- {text(prompt)!r}\n{text(found)}\n" for prompt, found in parts)
    (options.output / "completions.txt").write_text("".join(lines), encoding="utf-8")
    used = max(state["used"] for state in result["history"])
    summary = {name: value for name, value in result.items() if name != "history"}
    summary |= {"requests": len(requests), "equal": sum(same), "most_pages": used}
    (options.output / "served.json").write_text(json.dumps(summary | result) + "\n")
    print(f"{sum(same)} of {len(requests)} completions equal those without a cache")
    print(f"{result['tokens_per_second']:,.0f} tokens per second, "
          f"{result['generated_per_second']:,.0f} of them generated")  # fmt: skip
    print(f"at most {used} of {load.pages} pages in use; {server.preempted} times a completion "
          "gave its pages back")  # fmt: skip
    print(json.dumps(summary))
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
