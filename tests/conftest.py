"""Shared set-up: eight CPU devices, the ``gpu`` marker, and fixtures for numbers and kernels."""

import concurrent.futures
import gc
import importlib.metadata
import logging
import multiprocessing
import os
import shutil

import daily
import jax
import numpy as np
import one_context
import pytest

try:
    import jax_memeff  # noqa: F401
except ImportError as error:
    raise pytest.UsageError(str(error)) from None

# The tests spend most of their time compiling for the CPU: half of it in XLA's newer emitters, a
# tenth in splitting each module for 32 threads, and a tenth in setting up XNNPACK and YNNPACK for
# each product. XLA aborts on an unknown flag, and jaxlib 0.11 does not know the first one.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    given = os.environ.get("XLA_FLAGS", "")
    quicker = {
        "xla_cpu_use_fusion_emitters": "false",
        "xla_cpu_parallel_codegen_split_count": "1",
        "xla_cpu_use_xnnpack": "false",
        "xla_cpu_experimental_ynn_fusion_type": "",  # no operation gets a program of YNNPACK
    }
    flags = [f"--{name}={value}" for name, value in quicker.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *flags])

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)


LARGEST_CACHE = 1 << 30
"""Bytes of compiled programs that are kept between runs; a run of all tests makes 0.2 GB."""


# Python's garbage collector took a fifth of the time of collecting tests, and a tenth of the time
# of running them, scanning modules and tests again and again.
gc.disable()


def pytest_report_header():
    return f"samples of today: {daily.MESSAGE}"


def pytest_sessionstart(session):
    # Programs need no line numbers of Python: nobody reads them here.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    one_context.share()
    # Without these optimizations compiling takes half as long, also in the processes that tests
    # start.
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        keep_programs(session.config)


def keep_programs(config):
    """Keeps compiled programs in pytest's cache: the next run takes two thirds of the time.

    JAX names a program by a digest of everything that it depends on. ``pytest --cache-clear``
    empties the cache, and ``-p no:cacheprovider`` keeps nothing.
    """
    if not (cache := getattr(config, "cache", None)):
        return
    directory = cache.mkdir("xla_programs")
    files = [file for file in directory.iterdir() if file.is_file()]
    if not hasattr(config, "workerinput") and total_size(files) > LARGEST_CACHE:
        for file in files:
            file.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def total_size(files):
    return sum(file.stat().st_size for file in files)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each process neighbouring tests; at the end it steals from others.

    Neighbours share fixtures, compiled programs and answers of the oracle. The default would
    scatter them over the processes.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling  # the hook exists, so xdist is installed

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
def pytest_collection_modifyitems(config, items):
    names_tests = any("::" in word for word in config.args)
    choose_quick_cases(items, complete=not names_tests)
    if not names_tests:
        choose_cases_of_today(config, items)
    # The longest tests are those of the toolchain. If they ran last, one process would wait for the
    # other.
    items.sort(key=lambda item: "toolchain" not in item.path.parts)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        reason = f"needs a CUDA device, and jax says: {str(error).splitlines()[0]}"
        # One case of each test says so: there are more of these cases than of all other tests.
        first = {(item.path, item.name.partition("[")[0]): item for item in reversed(on_gpu)}
        for item in first.values():
            item.add_marker(pytest.mark.skip(reason=reason))
        others = set(on_gpu) - set(first.values())
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def choose_cases_of_today(config, items) -> None:
    """Keeps today's part of the cases of each test with ``@pytest.mark.rotating(parts)``, and the
    cases of the inner loop. Tests on a GPU keep all. A test without cases is one.
    """
    cases: dict[tuple, list] = {}
    for item in items:
        if "gpu" not in item.keywords and item.get_closest_marker("rotating"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    waiting = set()
    for (_, name), same in cases.items():
        (parts,) = same[0].get_closest_marker("rotating").args
        day = daily.day_of(name)
        for index, item in enumerate(same):
            due = daily.is_due(index, len(same), parts, day)
            if not due and not item.get_closest_marker("quick"):
                waiting.add(item)
    config.hook.pytest_deselected(items=list(waiting))
    items[:] = [item for item in items if item not in waiting]


def choose_quick_cases(items, complete: bool) -> None:
    """``@pytest.mark.quick("id", ...)`` marks only the cases of a test with these ids.

    Args:
        complete: whether all cases of a test are among the items; then an unknown id is an error.
    """
    unknown: dict[tuple, set[str]] = {}
    for item in items:
        if not (mark := item.get_closest_marker("quick")) or not mark.args:
            continue
        names = unknown.setdefault((item.path, item.originalname), set(mark.args))
        names.discard(item.callspec.id)
        if item.callspec.id not in mark.args:
            item.own_markers = [own for own in item.own_markers if own.name != "quick"]
    if complete and (wrong := {name: ids for (_, name), ids in unknown.items() if ids}):
        raise pytest.UsageError(f"quick names cases that there are not: {wrong}")


@pytest.fixture(autouse=True)
def _device(request):
    """Tests without the marker run on the CPU, even on a machine with a GPU."""
    if "gpu" in request.keywords or jax.default_backend() == "cpu":
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def devices(request):
    """The devices of one platform that ``at()`` of several_devices.py asks for.

    Problems on GPUs use the kernels of longer problems, which do not split their keys.
    """
    platform, count = request.param
    found = jax.devices(platform)
    if len(found) < count:
        pytest.skip(f"needs {count} devices of the platform {platform}, and jax has {len(found)}")
    from jax_memeff.codegen import strategy  # after the check that it is installed

    with strategy.using(**({"forward": strategy.PLAIN} if platform == "cuda" else {})):
        yield tuple(found[:count])


@pytest.fixture(scope="module")
def selected(request):
    """The parameters of each selected test of the module, for a fixture that prepares all of them.

    The session may have tests of other modules, in which a parameter of the same name has another
    type.
    """
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    return [item.callspec.params for item in items if item.module is request.module]


@pytest.fixture(scope="session")
def share_of_worker(request):
    """A function that selects the part of a list that this xdist worker has to prepare."""

    def share(jobs):
        if worker := getattr(request.config, "workerinput", None):
            index = int(worker["workerid"].removeprefix("gw"))
            return jobs[index :: worker["workercount"]]
        return jobs

    return share


@pytest.fixture(scope="session")
def compile_kernels(share_of_worker):
    """A function that compiles pairs of a spec and an architecture in parallel.

    Each of several xdist workers compiles a share, in one process.
    """
    from jax_memeff.codegen.toolchain import parallel

    def compile_all(jobs):
        ordered = sorted(jobs, key=lambda job: (job[0].sort_key, job[0].name, job[1]))
        own = share_of_worker(ordered)
        parallel.compile_many(own, processes=1 if len(own) < len(ordered) else None)

    return compile_all


@pytest.fixture(scope="session")
def machine(request):
    """A process with an emulated GPU. ``submit`` runs a function in it."""
    if shutil.which("g++") is None:
        pytest.skip("kernels run on the CPU where there is g++")
    import emulator

    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, emulator.install) as process:
        calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
        runs = [call.params["run"] for call in calls if "run" in call.params]
        runs = [run for run in runs if hasattr(run, "kernels")]
        process.submit(emulator.announce, runs).result()
        yield process


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def assert_close():
    """``assert_close(got, want)``: relative Frobenius error of each leaf, where want is finite."""

    def compare(got, want, tolerance=5e-6):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert ours.shape == theirs.shape
            ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
            finite = np.isfinite(theirs)
            np.testing.assert_array_equal(ours[~finite], theirs[~finite])
            error = np.linalg.norm(ours[finite] - theirs[finite])
            assert error <= tolerance * max(np.linalg.norm(theirs[finite]), 1e-30), error

    return compare


@pytest.fixture
def messages(caplog, monkeypatch):
    """A function that returns what ``jax_memeff`` logged about shardings, with call sites."""
    from jax_memeff._sharding import automatic

    monkeypatch.setattr(automatic, "_logged", set())
    # XLA asks for the program of a device only if no cache has the whole program.
    monkeypatch.setattr(automatic, "_python_digest", lambda: os.urandom(16))
    limit = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, limit)  # 0 in tests: no frames at all
    jax.config.update(limit, 10)
    caplog.set_level(logging.WARNING, "jax_memeff")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "jax_memeff"]
    jax.config.update(limit, before)


@pytest.fixture
def fake_compiler(monkeypatch):
    """Counts kernels instead of compiling them."""
    from jax_memeff.codegen.toolchain import (
        compile as compiler,  # after the check that it is installed
    )

    compiled = {}

    def compile(spec, arch):
        return compiled.setdefault((spec, arch), compiler.Compiled(b"", (), (), (), "", 0.0, True))

    monkeypatch.setattr(compiler, "compile", compile)
    return compiled
