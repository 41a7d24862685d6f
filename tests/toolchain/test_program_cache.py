"""The cache of compiled kernels: the files that it may touch, its trust, and damaged entries."""

import errno
import hashlib
import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import time
import warnings

import pytest

from jax_memeff import config
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import nvrtc, program_cache
from jax_memeff.codegen.toolchain.program_cache import ProgramCache

KEY = hashlib.sha256(b"a kernel").hexdigest()
OTHER = hashlib.sha256(b"another kernel").hexdigest()


@pytest.fixture(autouse=True)
def fresh_warnings():
    program_cache._warn_once.cache_clear()
    yield
    program_cache._warn_once.cache_clear()


def entry(directory, key=KEY):
    return directory / program_cache.SUBDIRECTORY / f"{key}.kernel"


def stored(directory, payload=b"payload", key=KEY):
    """Makes a directory with one entry and returns the entry's file."""
    ProgramCache(directory).put(key, payload)
    assert ProgramCache(directory).get(key) == payload
    return entry(directory, key)


def set_age(file, seconds):
    then = time.time() - seconds
    os.utime(file, (then, then))


# --------------------------------------------------------------------------- files of the user


def test_eviction_leaves_files_of_the_user_alone(tmp_path, monkeypatch):
    """The user's files are older than the kernels and larger than the limit of the cache."""
    monkeypatch.setattr(program_cache, "MAX_BYTES", 1000)
    own = tmp_path / program_cache.SUBDIRECTORY
    own.mkdir()
    files = [tmp_path / "weights.safetensors", tmp_path / KEY, own / "thesis.tex", own / KEY]
    files += [own / f"{KEY}.kernel.bak", own / f"{KEY[:-1]}.kernel", tmp_path / f"{OTHER}.kernel"]
    for file in files:
        file.write_bytes(bytes(2000))
        os.utime(file, (0, 0))
    cache = ProgramCache(tmp_path)
    for number in range(20):
        cache.put(hashlib.sha256(bytes([number])).hexdigest(), bytes(300))
    assert all(file.read_bytes() == bytes(2000) for file in files)
    assert 1 <= len(cache.entries()) <= 3
    assert sum(entry.size for entry in cache.entries()) <= 1000


def test_the_least_recently_used_kernels_are_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 1000)
    for age, key in ((300, KEY), (200, OTHER)):
        file = stored(tmp_path, bytes(300), key)
        set_age(file, age)
    assert ProgramCache(tmp_path).get(KEY) is not None  # which makes it the newer one
    ProgramCache(tmp_path).put("0" * 64, bytes(300))
    assert entry(tmp_path).exists() and not entry(tmp_path, OTHER).exists()


@pytest.mark.parametrize("ahead", [60, 7200, 10**9])
def test_a_new_kernel_outlasts_those_from_the_future(tmp_path, monkeypatch, ahead):
    """A clock that was wrong, or a copy, has set their times."""
    monkeypatch.setattr(program_cache, "MAX_BYTES", 1000)
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(6)]
    for key in keys[:3]:
        set_age(stored(tmp_path, bytes(200), key), -ahead)
    for key in keys[3:]:
        stored(tmp_path, bytes(200), key)
    left = [entry(tmp_path, key).exists() for key in keys]
    assert left[-1] and sum(left) == 3
    if ahead > program_cache._HOUR:
        assert left == [False] * 3 + [True] * 3


def test_a_kernel_larger_than_the_cache_replaces_all_others(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 1000)
    stored(tmp_path, bytes(300))
    ProgramCache(tmp_path).put(OTHER, bytes(2000))
    assert not entry(tmp_path).exists() and entry(tmp_path, OTHER).exists()


def test_files_of_killed_writers_are_removed_after_an_hour(tmp_path):
    own = stored(tmp_path).parent
    old, future, new = (own / f"{OTHER}.{digit * 16}.tmp" for digit in "012")
    for file in (old, future, new):
        file.write_bytes(b"half")
    set_age(old, 7200)
    set_age(future, -7200)
    ProgramCache(tmp_path).put(OTHER, b"whole")
    assert not old.exists() and not future.exists() and new.exists()
    assert len(ProgramCache(tmp_path).entries()) == 2


def test_files_of_killed_writers_go_although_nothing_can_be_written(tmp_path, monkeypatch):
    """They may be what has filled the disk."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    old = stored(tmp_path).parent / f"{OTHER}.{'0' * 16}.tmp"
    old.write_bytes(b"half")
    set_age(old, 7200)
    monkeypatch.setattr(program_cache, "_write", full)
    ProgramCache(tmp_path).put(OTHER, b"whole")
    assert not old.exists()


@pytest.mark.parametrize("name", [f"{OTHER}.kernel", f"{OTHER}.{'0' * 16}.tmp"])
def test_directories_with_the_names_of_files_are_left_alone(tmp_path, monkeypatch, name):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 100)
    directory = stored(tmp_path).parent / name
    directory.mkdir()
    (directory / "thesis.tex").write_text("mine")
    os.utime(directory, (0, 0))
    cache = ProgramCache(tmp_path)
    cache.put(KEY, bytes(300))
    assert (directory / "thesis.tex").read_text() == "mine"
    cache.put(OTHER, b"payload")
    if name.endswith(".kernel"):
        assert f"{directory} cannot be used (Is a directory)" in str(cache.loss(OTHER))
    else:
        assert cache.loss(OTHER) is None


def test_loss_repairs_what_it_can(tmp_path):
    cache = ProgramCache(tmp_path)
    cache.put(KEY, b"payload")
    assert cache.loss(KEY) is None
    entry(tmp_path).unlink()
    assert cache.loss(KEY) is None
    assert ProgramCache(tmp_path).get(KEY) == b"payload"


# ------------------------------------------------------------------------------ damaged entries


DAMAGES = {
    "empty": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "truncated": lambda data: data[:-1],
    "header only": lambda data: data[:40],
    "longer": lambda data: data + b"\0",
    "flipped payload": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "flipped digest": lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
    "flipped magic": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("unlinkable", [True, False])
def test_a_damaged_entry_is_a_miss_whatever_the_directory_allows(
    tmp_path, monkeypatch, damage, unlinkable
):
    file = stored(tmp_path)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    if not unlinkable:  # root may write to a read-only directory, so make the calls themselves fail

        def refuse(*args, **kwargs):
            raise PermissionError("read-only")

        for name in ("unlink", "utime", "replace"):
            monkeypatch.setattr(os, name, refuse)
    assert ProgramCache(tmp_path).get(KEY) is None
    ProgramCache(tmp_path).put(KEY, b"payload")
    assert ProgramCache(tmp_path).get(KEY) == (b"payload" if unlinkable else None)


@pytest.mark.quick
def test_an_entry_under_the_name_of_another_is_a_miss(tmp_path):
    stored(tmp_path).rename(entry(tmp_path, OTHER))
    assert ProgramCache(tmp_path).get(OTHER) is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"\n", b"{}\nimage", b"[]\nimage", b"image", b"\xff\n", b'{"resources": [[1]]}\nx'],
)
def test_a_payload_without_the_structure_of_a_kernel_is_a_miss(tmp_path, monkeypatch, payload):
    """Its digest is right, and only the structure is wrong."""
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_key", lambda *args: KEY)
    stored(tmp_path, payload)
    assert compiler.lookup_source("source", "sm_80", ["name"]) is None


def test_an_image_of_another_size_is_a_miss():
    compiled = compiler.Compiled(b"image", ("name",), (), (), "", 0.0, False)
    payload = compiler._pack(compiled)
    found = compiler._unpack(payload, ("name",), 0.0)
    assert found is not None and found.image == b"image" and found.cached
    assert compiler._unpack(payload[:-1], ("name",), 0.0) is None
    assert compiler._unpack(payload + b"s", ("name",), 0.0) is None


@pytest.mark.quick
def test_the_key_covers_all_that_a_kernel_depends_on(monkeypatch):
    arguments = ("source", "sm_80", ["name"])
    keys = [compiler._key(*arguments)]
    assert compiler._key(*arguments) == keys[0]
    keys += [compiler._key("other", "sm_80", ["name"]), compiler._key("source", "sm_86", ["name"])]
    keys += [compiler._key("source", "sm_80", ["name", "more"])]
    changes = [
        (nvrtc, "version", lambda: "13.0.1"),
        (nvrtc, "OPTIONS", {**nvrtc.OPTIONS, "std": "c++20"}),
        (nvrtc, "FATBIN_OPTIONS", ("-64",)),
        (compiler.headers, "digest", lambda: b"other headers"),
    ]
    for module, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            keys.append(compiler._key(*arguments))
    assert len(set(keys)) == len(keys)


def _race(directory, start, seconds, rounds):
    """Reads, writes and damages one entry; returns everything served that is not the payload."""
    start.wait()
    end = time.monotonic() + seconds
    for number in range(rounds):
        if time.monotonic() > end:
            break
        cache = ProgramCache(directory)
        found = cache.get(KEY)
        if found not in (None, b"payload" * 100):
            return found
        cache.put(KEY, b"payload" * 100)
        if number % 3 == 0:
            entry(directory).write_bytes(b"damaged")
    return None


def test_processes_that_race_on_a_damaged_entry_are_never_served_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(4) as pool:
        start = manager.Event()
        results = [pool.apply_async(_race, (tmp_path, start, 5, 300)) for _ in range(4)]
        start.set()
        assert [result.get(60) for result in results] == [None] * 4


# ------------------------------------------------------------------------------- whom it trusts


@pytest.mark.parametrize("which", ["directory", "subdirectory"])
@pytest.mark.parametrize("danger", ["group", "others", "owner"])
def test_a_directory_of_others_is_refused_with_one_warning(tmp_path, monkeypatch, which, danger):
    directory = tmp_path / "cache"
    file = stored(directory)
    before = file.read_bytes()
    refused = directory if which == "directory" else file.parent
    if danger == "owner":
        real = os.fstat

        def fstat(descriptor):
            status = real(descriptor)
            if not os.path.samestat(status, os.stat(refused)):
                return status
            return os.stat_result([*status[:4], os.geteuid() + 1, *status[5:]])

        monkeypatch.setattr(os, "fstat", fstat)
    else:
        bits = {"group": stat.S_IWGRP, "others": stat.S_IWOTH}[danger]
        refused.chmod(refused.stat().st_mode | bits)
    cache = ProgramCache(directory)
    said = "is owned by the user" if danger == "owner" else "can be written to by other users"
    with pytest.warns(RuntimeWarning, match=f"{refused} {said}") as caught:
        assert cache.get(KEY) is None
        cache.put(KEY, b"new")
        assert cache.get(KEY) == b"new"
        assert cache.get(OTHER) is None
        assert cache.entries() == []
    assert len(caught) == 1 and "JAX_MEMEFF_CACHE_DIR" in str(caught[0].message)
    assert cache.refusal() == str(caught[0].message)
    assert (f"chmod go-w '{refused}'" in str(caught[0].message)) == (danger != "owner")
    assert file.read_bytes() == before


def test_a_file_that_others_can_write_to_is_a_miss(tmp_path):
    file = stored(tmp_path)
    file.chmod(0o666)
    assert ProgramCache(tmp_path).get(KEY) is None
    file.chmod(0o644)
    assert ProgramCache(tmp_path).get(KEY) == b"payload"


def test_what_it_creates_is_private_to_write_and_readable(tmp_path):
    """A permissive umask changes nothing, and root can fill the cache of a container image for
    others.
    """
    old = os.umask(0)
    try:
        file = stored(tmp_path / "new" / "cache")
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parents[1])]
    assert modes == [0o644, 0o755, 0o755]


@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "dangling link", "directory", "device"])
def test_what_is_not_a_file_is_neither_followed_nor_waited_for(tmp_path, monkeypatch, kind):
    """Runs in a process with a time limit, because the defect would be a read that never ends."""
    file = stored(tmp_path / "cache")
    target = tmp_path / "target"
    file.rename(target)  # a verified entry, which a link must not bring back
    before = target.read_bytes()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(file.parent)  # the name of a socket is at most 108 bytes long
            listener.bind(file.name)
    elif kind == "directory":
        file.mkdir()
    elif kind == "device":
        try:
            os.mknod(file, 0o644 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        file.symlink_to(target if kind == "link" else tmp_path / "missing")
    program = f"""
from pathlib import Path
from jax_memeff.codegen.toolchain.program_cache import ProgramCache
cache = ProgramCache(Path({str(tmp_path / "cache")!r}))
assert cache.get({KEY!r}) is None and cache.entries() == []
cache.put({KEY!r}, b"new")
print(ProgramCache(cache.directory).get({KEY!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert done.stderr == ""
    assert done.stdout == ("None\n" if kind == "directory" else "b'new'\n")
    assert target.read_bytes() == before and not (tmp_path / "missing").exists()


@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_a_subdirectory_that_is_none_keeps_kernels_in_memory(tmp_path, kind):
    directory = tmp_path / "cache"
    (tmp_path / "target").mkdir()
    directory.mkdir()
    inner = directory / program_cache.SUBDIRECTORY
    if kind == "link":
        inner.symlink_to(tmp_path / "target")
    elif kind == "fifo":
        os.mkfifo(inner)
    else:
        inner.write_text("mine")
    cache = ProgramCache(directory)
    cache.put(KEY, b"payload")
    assert cache.get(KEY) == b"payload" and ProgramCache(directory).get(KEY) is None
    assert list((tmp_path / "target").iterdir()) == []


# ---------------------------------------------------------------------------- which directory


@pytest.fixture
def environment(monkeypatch, tmp_path):
    for name in ("JAX_MEMEFF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config.pwd, "getpwuid", no_user)
    return monkeypatch


def no_user(number):
    raise KeyError(number)


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_directory_nothing_is_created(environment, tmp_path, home):
    if home is None:
        environment.delenv("HOME")
    else:
        environment.setenv("HOME", home)
    assert config.cache_dir() is None
    cache = program_cache.current()
    cache.put(KEY, b"payload")
    assert cache.get(KEY) == b"payload" and cache.entries() == [] and cache.refusal() is None
    assert list(tmp_path.iterdir()) == []
    cache.memory.clear()

    class User:
        pw_dir = "/"  # of accounts that have none

    environment.setattr(config.pwd, "getpwuid", lambda number: User)
    assert config.cache_dir() is None
    User.pw_dir = "/home/someone"
    assert str(config.cache_dir()) == "/home/someone/.cache/jax_memeff"


@pytest.mark.parametrize("variable", ["JAX_MEMEFF_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("path", ["~no_such_user_of_this_machine/kernels", "~/kernels", "~"])
def test_a_home_directory_that_is_not_there_names_the_variable(environment, variable, path):
    environment.setenv("HOME", "")
    environment.setenv(variable, path)
    with pytest.raises(ValueError, match=f"expected {variable} to be a path, got '{path}'"):
        config.cache_dir()


def test_relative_paths_and_home_directories(environment, tmp_path):
    environment.setenv("HOME", str(tmp_path / "home"))
    environment.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert config.cache_dir() == tmp_path / "home" / ".cache" / "jax_memeff"
    environment.setenv("XDG_CACHE_HOME", "~/xdg")
    assert config.cache_dir() == tmp_path / "home" / "xdg" / "jax_memeff"
    environment.setenv("JAX_MEMEFF_CACHE_DIR", "kernels")
    assert config.cache_dir() == tmp_path / "kernels"
    environment.setenv("JAX_MEMEFF_CACHE_DIR", "~")
    assert config.cache_dir() == tmp_path / "home"


def test_no_warning_for_a_directory_that_is_merely_absent(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ProgramCache(tmp_path / "absent").get(KEY) is None
        (tmp_path / "file").write_text("")
        cache = ProgramCache(tmp_path / "file" / "cache")
        cache.put(KEY, b"payload")
        assert cache.get(KEY) == b"payload"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("variable", "read"),
    [("JAX_MEMEFF_CACHE_DIR", config.cache_dir), ("JAX_MEMEFF_KERNELS", config.kernel_archive)],
)
def test_a_relative_path_without_a_working_directory_names_the_variable(
    environment, tmp_path, variable, read
):
    environment.setenv(variable, "relative")
    removed = tmp_path / "removed"
    removed.mkdir()
    environment.chdir(removed)
    removed.rmdir()
    with pytest.raises(ValueError, match=f"expected {variable} to be an absolute path"):
        read()
    environment.setenv(variable, str(tmp_path / "absolute"))
    assert read() == tmp_path / "absolute"
