"""Archives of compiled kernels are used without a compiler, and hostile ones are refused."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from jax_memeff._command import build, models
from jax_memeff.codegen import select
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import headers, parts, prebuilt, program_cache
from jax_memeff.codegen.toolchain.compile import Compiled, Resource
from jax_memeff.errors import CompileError

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

SPEC = select.select(Problem("forward", "bf16", 64, 64, "sm_90a", {"mask": "causal"}))
OTHER = select.select(Problem("backward", "bf16", 64, 64, "sm_90a", {"mask": "causal"}))
NAMES = tuple(entry.name for entry in SPEC.entry_points)
RESOURCES = tuple(Resource(name, 1, 2, 3, 4) for name in NAMES)
KERNEL = Compiled(b"an image of a kernel", NAMES, RESOURCES, (), "log", 1.0, False)


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path / "cache"))
    prebuilt._warn_once.cache_clear()
    yield
    prebuilt._warn_once.cache_clear()


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive with one kernel; the environment variable names it."""
    path = tmp_path / "kernels.zip"
    compiler.write_archive(path, {(SPEC, "sm_90a"): KERNEL})
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", str(path))
    return path


@pytest.fixture
def no_compiler(monkeypatch):
    """Hides NVRTC, cuda.bindings and CUDA's headers."""

    def missing(*_):
        raise parts.missing([parts.NVRTC])

    for name in ("library", "headers", "import_"):
        monkeypatch.setattr(parts, name, missing)
    headers._found.cache_clear()
    headers.versions.cache_clear()
    yield
    headers._found.cache_clear()
    headers.versions.cache_clear()


def found():
    """Whether the kernel is found. Any use of the compiler is an error."""
    return prebuilt.get(*compiler.source(SPEC, "sm_90a")) is not None


@pytest.mark.quick
def test_a_kernel_is_found_without_a_compiler(archive, no_compiler):
    compiled = compiler.compile(SPEC, "sm_90a")
    assert compiled.cached and compiled.seconds < 0.25
    assert (compiled.image, compiled.names, compiled.resources) == (
        KERNEL.image,
        NAMES,
        KERNEL.resources,
    )
    assert len(compiler.key(SPEC, "sm_90a")) == 64
    with pytest.raises(CompileError, match="NVRTC not found") as raised:
        compiler.compile(OTHER, "sm_90a")
    assert f"The archive {archive} does not have this kernel" in str(raised.value)
    with pytest.raises(CompileError, match="NVRTC not found"):
        compiler.compile(SPEC, "sm_90")


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax_memeff import dot_product_attention

def loss(query, key, value):
    out = dot_product_attention(query, key, value, is_causal=True)
    return out.astype(jnp.float32).sum()

query = jax.ShapeDtypeStruct((4, 4096, 32, 128), jnp.bfloat16)
key = jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16)
jax.devices()  # JAX looks for the libraries of its plugins itself
imported, opened = set(), []

def watch(event, arguments):
    if event == "import":
        imported.add(arguments[0].partition(".")[0])
    elif event == "open" and isinstance(arguments[0], str):
        opened.append(arguments[0])

sys.addaudithook(watch)
traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, key)
lowered = traced.lower(lowering_platforms=("cuda",))
result = sorted(imported), [name for name in opened if not name.endswith((".py", ".pyc", ".so"))]
assert lowered.as_text().count("custom_call @jax_memeff_") == 2
print(json.dumps(result))
"""


def test_a_training_step_of_a_model_is_lowered_without_a_compiler(tmp_path):
    """``build --models`` compiles exactly the kernels of the model's calls.

    The process opens the archive for each kernel, and reads its own headers once. It imports
    nothing of the compiler, and looks for no headers or wheels of other packages.
    """
    path = tmp_path / "kernels.zip"
    kernels = {}
    for spec, arch in models.kernels(["llama"], ["sm_90a"]):
        names = tuple(entry.name for entry in spec.entry_points)
        kernels[spec, arch] = dataclasses.replace(KERNEL, names=names, resources=())
    compiler.write_archive(path, kernels)
    environment = {"JAX_MEMEFF_KERNELS": str(path), "JAX_MEMEFF_ARCHS": "sm_90a"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    imported, opened = json.loads(done.stdout)
    assert imported and {"cuda", "nvidia", "rich"}.isdisjoint(imported)
    own = [
        str(file)
        for folder in headers.own_include_dirs()
        for file in folder.rglob("*")
        if file.suffix in (".cuh", ".h")
    ]
    assert sorted(opened) == sorted([*own, str(path), str(path)])


def test_an_archive_comes_before_the_cache(archive, monkeypatch):
    other = dataclasses.replace(KERNEL, image=b"of the cache")
    compiler.store(*compiler.source(SPEC, "sm_90a"), other)
    assert compiler.compile(SPEC, "sm_90a").image == KERNEL.image
    key = compiler.key(SPEC, "sm_90a")
    monkeypatch.delenv("JAX_MEMEFF_KERNELS")
    assert compiler.compile(SPEC, "sm_90a").image == b"of the cache"
    assert compiler.key(SPEC, "sm_90a") != key


def test_the_same_kernels_give_the_same_bytes(archive, tmp_path):
    again = tmp_path / "again.zip"
    compiler.write_archive(again, {(SPEC, "sm_90a"): KERNEL})
    assert again.read_bytes() == archive.read_bytes()
    assert sorted(tmp_path.glob("*zip*")) == [again, archive]  # no temporary file is left


@pytest.mark.quick
def test_what_an_archive_says_of_itself(archive, monkeypatch):
    contents = prebuilt.contents()
    assert contents is not None and contents.fits
    assert (contents.kernels, contents.archs) == (1, ("sm_90a",))
    assert contents.compiler["cutlass"].startswith("4.")
    monkeypatch.delenv("JAX_MEMEFF_KERNELS")
    assert prebuilt.contents() is None


def test_other_headers_are_named_once(archive, monkeypatch):
    monkeypatch.setattr(headers, "own_digest", lambda: b"other")
    with pytest.warns(
        RuntimeWarning, match="compiled from the headers of jax_memeff .* build --output"
    ):
        assert not found()
    assert not found()


def test_a_kernel_that_is_absent_is_no_warning(archive):
    assert prebuilt.get(*compiler.source(OTHER, "sm_90a")) is None


def test_a_home_directory(archive, monkeypatch):
    monkeypatch.setenv("HOME", str(archive.parent))
    monkeypatch.setenv("JAX_MEMEFF_KERNELS", "~/kernels.zip")
    assert found()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.chmod(0o622), r"can be written to by other users \(its mode is 622\)"),
        (lambda path: os.truncate(path, 100), "is damaged, or is no archive"),
        (lambda path: path.write_bytes(b""), "is damaged, or is no archive"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file"),
        (lambda path: os.truncate(path, prebuilt.MAX_BYTES + 1), "is not a file of at most"),
    ],
    ids=["absent", "writable", "truncated", "empty", "directory", "fifo", "large"],
)
def test_an_archive_that_cannot_be_used_is_named_once(archive, damage, said):
    damage(archive)
    with pytest.warns(RuntimeWarning, match=said) as caught:
        assert not found()
    assert len(caught) == 1 and str(archive) in str(caught[0].message)
    assert not found()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give files away")
def test_an_archive_of_another_user_is_refused(archive):
    os.chown(archive, 12345, -1)
    with pytest.warns(RuntimeWarning, match="is owned by the user with the id 12345"):
        assert not found()


def rewritten(path, entry=lambda name, data: [(name, data)], method=zipfile.ZIP_STORED):
    """Replaces entries of an archive and keeps the manifest."""
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in old.items():
            if name == "manifest.json":
                archive.writestr(name, data, zipfile.ZIP_STORED)
                continue
            for info, new in entry(name, data):
                archive.writestr(info, new)
    path.chmod(0o644)


HOSTILE = {
    "of another kernel": {"entry": lambda name, data: [("0" * 64 + ".kernel", data)]},
    "changed": {"entry": lambda name, data: [(name, data[:-1] + b"!")]},
    "not sealed": {"entry": lambda name, data: [(name, data[-20:])]},
    "compressed": {"method": zipfile.ZIP_DEFLATED},
    "a bomb": {
        "entry": lambda name, data: [(name, bytes(2**24))],
        "method": zipfile.ZIP_DEFLATED,
    },
    "outside": {"entry": lambda name, data: [(f"../../{name}", data), (f"/{name}", data)]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_entry_that_does_not_verify_is_not_used(archive, kind, tmp_path):
    rewritten(archive, **HOSTILE[kind])
    before = sorted(tmp_path.rglob("*"))
    assert not found()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_that_is_wrong_does_not_matter_to_kernels(archive):
    with zipfile.ZipFile(archive) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    for manifest in (
        b"",
        b"[]",
        b'{"kernels": 1}',
        b"\xff",
        b"[" * 100_000,
        json.dumps({"kernels": {"a": 1}}).encode(),
    ):
        with zipfile.ZipFile(archive, "w") as new:
            for name, data in entries.items():
                new.writestr(name, manifest if name == "manifest.json" else data)
        assert found()
        with pytest.raises(prebuilt.UnusableArchiveError, match="is damaged, or is no archive"):
            prebuilt.contents()


def described(**changes):
    fields = {"image_bytes": 5, "resources": RESOURCES, "warnings": [], "log": ""} | changes
    return json.dumps(fields).encode() + b"\nimage"


MISDESCRIBED = {
    "nested": b"[" * 100_000 + b"\nimage",
    "a list as a name": described(resources=[[[NAMES[0]], 1, 2, 3, 4]]),
    "words as numbers": described(resources=[[NAMES[0], "1", None, 3, 4]]),
    "numbers as warnings": described(warnings=[1]),
    "no log": described(log=None),
}


@pytest.mark.parametrize("kind", MISDESCRIBED)
def test_a_kernel_with_another_description_is_a_miss(archive, kind):
    """Whoever writes an archive also writes its digests, so a sealed entry may hold anything."""
    key = prebuilt.key(*compiler.source(SPEC, "sm_90a"))

    def look_up(payload):
        sealed = program_cache.sealed(key, payload)
        rewritten(archive, entry=lambda name, data: [(name, sealed)])
        return compiler.lookup(SPEC, "sm_90a")

    assert look_up(described()) is not None
    assert look_up(MISDESCRIBED[kind]) is None


def test_text_of_an_archive_cannot_control_the_terminal(archive):
    escape = "\x1b]0;title\x07"
    manifest = {"jax_memeff": escape, "headers": "", "compiler": {escape: escape}}
    with zipfile.ZipFile(archive, "w") as new:
        new.writestr("manifest.json", json.dumps(manifest | {"kernels": {"a": [escape]}}))
    with pytest.warns(RuntimeWarning, match=r"of jax_memeff \\x1b]0;title\\x07, and not") as warned:
        assert not found()
    contents = prebuilt.contents()
    assert contents is not None
    for text in (str(warned[0].message), *contents.archs, *contents.compiler.popitem()):
        assert text.isprintable()


def test_random_damage_is_never_used(archive):
    """Changes bytes of the archive's structure: the kernel is found intact or not at all."""
    good = archive.read_bytes()
    expected = prebuilt.get(*compiler.source(SPEC, "sm_90a"))
    draw = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            bad = bytearray(good)
            for place in draw.integers(len(bad), size=3):
                bad[place] = draw.integers(256)
            if draw.random() < 0.5:  # the directory at the end, which zipfile reads first
                place = len(bad) - 1 - int(draw.integers(120))
                struct.pack_into("<B", bad, place, draw.integers(256))
            archive.write_bytes(bad)
            assert prebuilt.get(*compiler.source(SPEC, "sm_90a")) in (None, expected)


def test_a_declared_size_takes_no_memory(archive):
    """The directory states 1 GiB for every entry; the archive has a few KB."""
    declared = bytearray(archive.read_bytes())
    place = declared.find(b"PK\1\2")
    while place >= 0:
        struct.pack_into("<LL", declared, place + 20, prebuilt.MAX_BYTES, prebuilt.MAX_BYTES)
        place = declared.find(b"PK\1\2", place + 1)
    archive.write_bytes(declared)
    tracemalloc.start()
    try:
        with pytest.warns(RuntimeWarning, match="is damaged, or is no archive"):
            assert not found()
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_stays_a_link(tmp_path, is_dangling):
    """Run by root, an archive written to ``/dev/stdout`` would replace the link of the system."""
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "kernels.zip", tmp_path / "latest.zip"
    link.symlink_to(target)
    if not is_dangling:
        target.write_bytes(b"the old one")
    build.require_writable(link)
    compiler.write_archive(link, {(SPEC, "sm_90a"): KERNEL})
    assert link.is_symlink() and zipfile.is_zipfile(target)
    assert sorted(tmp_path.rglob("*zip*")) == sorted([link, target])
