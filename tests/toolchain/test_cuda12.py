"""A process uses the wheels of CUDA 12 or those of CUDA 13, and never mixes them.

Tests that need NVRTC 12.9 are skipped without the extra nvrtc-cu12. ``.ci/run`` installs it and
runs this file and the sample of Hopper's kernels; .github/workflows/nightly.yml compiles all
kernels.
"""

import importlib.metadata
import json

import found_parts
import pytest

from jax_memeff.codegen.toolchain import headers, nvrtc, parts
from jax_memeff.errors import CompileError

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

PARTS = (*parts.HEADERS, *parts.LIBRARIES)
TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= 2.f; }'

with_cuda12 = pytest.mark.skipif(parts.cuda_major() != 12, reason="needs the extra nvrtc-cu12")


@pytest.fixture
def installed(monkeypatch):
    """Sets the installed distributions and clears what was found before."""

    def install(**versions):
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(parts, "_installed", found.get)
        found_parts.forget()

    yield install
    monkeypatch.undo()
    found_parts.forget()


@pytest.mark.parametrize(
    ("distributions", "major"),
    [
        ({"cuda_bindings": "12.9.10"}, 12),
        ({"cuda_bindings": "13.0.1"}, 13),
        # cuda.bindings calls the libraries, so it decides, whatever plugin runs the programs.
        ({"cuda_bindings": "13.5.0", "jax_cuda12_plugin": "0.10.2"}, 13),
        ({"jax_cuda12_plugin": "0.10.2"}, 12),
        ({"jax_cuda12_plugin": "0.10.2", "jax_cuda13_plugin": "0.10.2"}, 13),
        ({}, 13),
    ],
)
@pytest.mark.quick
def test_the_bindings_or_the_plugin_choose_the_wheels(installed, distributions, major):
    installed(**distributions)
    assert parts.cuda_major() == major
    extra = {12: "nvrtc-cu12", 13: "nvrtc"}[major]
    assert parts.install().startswith("pip install ") and f'[{extra}]"' in parts.install()
    for part in PARTS:
        if part is not parts.CUTLASS:  # which has no CUDA version
            assert part.wheel.name.endswith("-cu12") == (major == 12)
    assert parts.NVRTC.wheel.file == f"libnvrtc.so.{major}"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, 'pip install "jax-memeff[nvrtc]"'),
        (
            {"url": "file:///w/jax_memeff-0.1.0-cp311-linux.whl", "archive_info": {}},
            'pip install "jax-memeff[nvrtc]"',
        ),
        (
            {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}},
            'pip install -e "/home/me/my clone[nvrtc]"',
        ),
        ({"url": "file:///home/me/clone", "dir_info": {}}, 'pip install "/home/me/clone[nvrtc]"'),
    ],
)
def test_extras_are_installed_from_the_clone_if_the_package_is(monkeypatch, noted, command):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return None if noted is None else json.dumps(noted)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert parts.install_extra("nvrtc") == command


@pytest.mark.quick
def test_missing_parts_name_the_wheels_of_their_cuda_version(installed):
    installed(cuda_bindings="12.9.10")
    message = str(parts.missing([parts.NVRTC, parts.CCCL]))
    assert "wheels: nvidia-cuda-nvrtc-cu12, nvidia-cuda-cccl-cu12" in message
    assert '[nvrtc-cu12]"' in message


@pytest.mark.parametrize(
    ("title", "nvrtc_version", "headers_version"),
    [("NVRTC", "13.0.88", "12.9"), ("CUDA headers", "12.9.86", "13.5")],
)
@pytest.mark.quick
def test_parts_of_two_cuda_versions_do_not_compile(
    installed, monkeypatch, title, nvrtc_version, headers_version
):
    """The other version may be an NVRTC that the process has loaded, or a toolkit of CUDA_PATH."""
    installed(cuda_bindings="12.9.10")
    of_headers = {**headers.versions(), "cudart": headers_version}
    monkeypatch.setattr(nvrtc, "version", lambda: nvrtc_version)
    monkeypatch.setattr(headers, "versions", lambda: of_headers)
    monkeypatch.setattr(parts, "library", lambda part: None)
    monkeypatch.setattr(nvrtc, "versions", dict)
    with pytest.raises(CompileError) as raised:
        nvrtc.compile(TINY, "sm_80", "tiny")
    wrong = nvrtc_version if title == "NVRTC" else headers_version
    assert f"cuda.bindings is for CUDA 12, and {title} is of version {wrong}" in str(raised.value)
    assert '[nvrtc-cu12]"' in str(raised.value)


@with_cuda12
def test_every_part_is_a_wheel_of_cuda_12():
    """Wheels of CUDA 13 may be installed, too, but their files are not used."""
    for part, place in parts.all_found().items():
        assert place is not None and place.via == parts.WHEEL, part
        assert "cu13" not in str(place.path)
    found = nvrtc.versions()
    assert found["NVRTC"].startswith("12.9.") and found["CUDA headers"] == "12.9"
    assert headers.versions()["cccl"].startswith("2.8")


@with_cuda12
@pytest.mark.parametrize("arch", ["sm_110", "sm_88"])
def test_an_architecture_of_cuda_13_says_so(arch):
    """Other architectures compile: .ci/run compiles the sample of test_closure.py with this
    NVRTC.
    """
    with pytest.raises(
        CompileError, match=r"NVRTC 12\.9, the last of CUDA 12, does not know"
    ) as raised:
        nvrtc.compile(TINY, arch, "tiny")
    assert '[cuda13]"' in str(raised.value)
