"""Attention over a sequence too long for one device: a ring over all devices.

    python examples/long_context.py    # on a CPU with eight host devices, about a minute

Forward and backward of causal attention with grouped heads run over growing sequences, in both
layouts of ``jax_memeff.ring_attention``, and the shortest sequence is checked against one device.

OUTPUT receives result.json and long_context.png: the fraction of its scores that each device
computes at each step, and the times. The exit status is 1 if the ring and one device disagree.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import jax_memeff

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")
HOST_DEVICES = 8
SHARDING = P(None, "sequence")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the attention, and how often each length is timed."""

    heads: int
    key_heads: int
    head_dim: int
    dtype: str
    lengths: tuple[int, ...]
    repeats: int
    tolerance: float
    """Limit of the relative error of every gradient, in the Frobenius norm."""


PRESETS = {
    "tiny": Preset(2, 1, 16, "float32", (256,), 1, 1e-5),
    "cpu": Preset(4, 2, 64, "float32", (1024, 2048, 4096), 2, 1e-5),
    "gpu": Preset(32, 8, 128, "bfloat16", (16384, 32768, 65536, 131072), 5, 2e-2),
}

# ------------------------------------------------------------------------------------ attention

Gradients = Callable[..., tuple[jax.Array, ...]]


def ring(mesh: Mesh, layout: Layout) -> Gradients:
    """Gradients of query, key and value, which are ``[1, T, N, H]`` in the order of the layout."""
    attention = functools.partial(
        jax_memeff.ring_attention, axis_name="sequence", layout=layout, is_causal=True
    )
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=SHARDING, out_specs=SHARDING)
    return gradients(sharded)


def gradients(attention: Callable[..., jax.Array]) -> Gradients:
    """Gradients of ``sum(attention(query, key, value) * weights)``."""

    def loss(query, key, value, weights):
        return jnp.sum(attention(query, key, value).astype(jnp.float32) * weights)

    return jax.jit(jax.grad(loss, range(3)))


def problem(preset: Preset, length: int, layout: Layout, devices: int) -> list[np.ndarray]:
    """Query, key, value and weights of one length, in the order of the layout."""
    generator = np.random.default_rng(length)
    heads = (preset.heads, preset.key_heads, preset.key_heads, preset.heads)
    arrays = []
    for count in heads:
        array = generator.standard_normal((1, length, count, preset.head_dim), np.float32)
        array = array.astype(jnp.dtype(preset.dtype))
        arrays.append(jax_memeff.zigzag(array, 1, devices) if layout == "zigzag" else array)
    return arrays


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """``|got - want| / |want|`` in the Frobenius norm.

    >>> relative_error(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == 1 / 34**0.5
    True
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check(function: Gradients, preset: Preset, devices: int, layout: Layout) -> float:
    """The largest relative error of a gradient against one device, at the shortest length."""
    length = preset.lengths[0]
    got = function(*problem(preset, length, layout, devices))
    if layout == "zigzag":
        got = tuple(jax_memeff.unzigzag(np.asarray(x), 1, devices) for x in got)
    one_device = functools.partial(jax_memeff.dot_product_attention, is_causal=True)
    want = gradients(one_device)(*problem(preset, length, "contiguous", devices))
    return max(map(relative_error, map(np.asarray, got), map(np.asarray, want)))


def seconds(function: Gradients, preset: Preset, mesh: Mesh, layout: Layout, length: int) -> float:
    """The shortest time of a forward and a backward, without compilation."""
    place = NamedSharding(mesh, SHARDING)
    arrays = [jax.device_put(x, place) for x in problem(preset, length, layout, mesh.size)]
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(preset.repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - start)
    return min(times)


def work(layout: Layout, devices: int) -> np.ndarray:
    """The work of each device at each step, ``[devices, steps]``: the fraction of its scores that
    the causal mask leaves.

    >>> work("contiguous", 2).round(1).tolist(), work("zigzag", 2).round(1).tolist()
    ([[0.5, 0.0], [0.5, 1.0]], [[0.5, 0.5], [0.5, 0.5]])
    """
    position = np.arange(64 * devices)
    if layout == "zigzag":
        position = jax_memeff.zigzag(position, 0, devices)
    of_device = position.reshape(devices, -1)
    share = np.zeros((devices, devices))
    for rank in range(devices):
        for step in range(devices):
            columns = of_device[(rank - step) % devices]
            share[rank, step] = np.mean(columns[None, :] <= of_device[rank][:, None])
    return share


# --------------------------------------------------------------------------------------- output


def plot(result: dict, path: Path) -> None:
    """Draw the work of both layouts, and the times over the length."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    *maps, times = figure.subplots(1, 3)
    devices = result["devices"]
    images = []
    for axes, layout in zip(maps, LAYOUTS, strict=True):
        share = work(layout, devices)
        images.append(axes.imshow(share, vmin=0, vmax=1, cmap="viridis"))
        # A step takes as long as its busiest device.
        duration = share.max(0).sum()
        axes.set(xlabel="step", ylabel="device")
        axes.set_title(f"{layout}: as long as {duration:.1f} full steps")
    figure.colorbar(images[0], ax=maps, label="scores computed", shrink=0.8)
    for layout in LAYOUTS:
        times.plot(result["lengths"], result["seconds"][layout], "o-", label=layout)
    times.set(xlabel="tokens", ylabel="seconds", title="forward + backward", xscale="log")
    times.set_ylim(bottom=0)
    times.set_xticks(result["lengths"], [f"{length:,}" for length in result["lengths"]])
    times.minorticks_off()
    times.legend()
    figure.suptitle(f"causal ring attention over {devices} devices ({result['platform']})")
    figure.savefig(path, dpi=120)


def measure(preset: Preset, mesh: Mesh) -> dict:
    """Check and time both layouts, with a progress bar."""
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(LAYOUTS) * (1 + len(preset.lengths)))
        for layout in LAYOUTS:
            function = ring(mesh, layout)
            progress.update(task, description=f"{layout}: against one device")
            errors[layout] = check(function, preset, mesh.size, layout)
            progress.advance(task)
            for length in preset.lengths:
                progress.update(task, description=f"{layout}: {length:,} tokens")
                times[layout].append(seconds(function, preset, mesh, layout, length))
                progress.advance(task)
    return {
        "devices": mesh.size,
        "platform": mesh.devices.flat[0].platform,
        "lengths": preset.lengths,
        "errors": errors,
        "seconds": times,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: by platform")
    parser.add_argument("--output", type=Path, default=Path("long_context_output"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, write the files; returns the exit status."""
    options = parse(arguments)
    # This has no effect if JAX has other devices than the host.
    jax.config.update("jax_num_cpu_devices", HOST_DEVICES)
    name = options.preset or ("gpu" if jax.default_backend() == "gpu" else "cpu")
    preset = PRESETS[name]
    options.output.mkdir(parents=True, exist_ok=True)
    mesh = Mesh(np.array(jax.devices()), ("sequence",))
    print(f"preset {name}, a ring of {mesh.size} devices ({jax.default_backend()})")
    result = {"preset": name, **measure(preset, mesh)}
    plot(result, options.output / "long_context.png")
    (options.output / "result.json").write_text(json.dumps(result) + "\n")
    for layout in LAYOUTS:
        slowest = result["seconds"][layout][-1]
        print(
            f"{layout:10}  error against one device {result['errors'][layout]:.1e}, "
            f"{preset.lengths[-1]:,} tokens in {slowest:.2f} s"
        )
    wrong = {layout: e for layout, e in result["errors"].items() if not e <= preset.tolerance}
    if wrong:
        print(f"expected errors of at most {preset.tolerance}, got {wrong}")
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
