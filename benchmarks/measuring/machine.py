"""The device and the versions of a measurement."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

_DISTRIBUTIONS = (
    "jax-memeff",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "torch",
    "flash-attn-4",
    "sgl-flash-mla",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvrtc",
    "nvidia-cutlass",
    "cuda-core",
)


_CPU_INFO = Path("/proc/cpuinfo")


def _output(*command: str) -> str | None:
    """The output of a command; None if it is not installed or fails."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def facts(commit: str | None) -> dict[str, Any]:
    """The date, the device and the versions, with which each document begins."""
    return {"date": today(), "device": device(), "versions": versions(commit)}


def device() -> dict[str, str | None]:
    """The device's name, and its driver if there is one."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    first = jax.devices()[0]
    name = _processor() if first.platform == "cpu" else first.device_kind
    return {"name": name, "platform": first.platform, "driver": driver}


def _processor() -> str:
    """The model of the CPU, and how many threads of it this process may use."""
    models = re.findall(r"^model name\s*: (.*)$", _CPU_INFO.read_text(), re.MULTILINE)
    return f"{models[0] if models else 'CPU'} on {len(os.sched_getaffinity(0))} threads"


def versions(commit: str | None) -> dict[str, str]:
    """Installed versions, cuDNN as loaded by torch, and our commit (``+`` for local changes)."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        torch = importlib.import_module("torch")
        found["CUDA (torch)"] = str(torch.version.cuda)
        if torch.backends.cudnn.is_available():
            try:
                found["cuDNN (loaded)"] = str(torch.backends.cudnn.version())
            except RuntimeError as error:
                # JAX loaded its own cuDNN first, and torch was built for another one.
                found["cuDNN (loaded)"] = str(error).splitlines()[0]
    if commit is None and (commit := _output("git", "rev-parse", "--short=12", "HEAD")):
        commit += "+" if _output("git", "status", "--porcelain", "--", "..") else ""
    found["commit"] = commit or "unknown"
    return found


def today() -> str:
    """The date, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
