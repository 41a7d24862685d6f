"""``python -m jax_memeff doctor | info | kernels | explain | build | verify | bench``. Only verify
needs a GPU.

Exit codes: 0 done, 1 no kernel fits, a case of verify does not pass, a kernel does not compile,
output cannot be written or something is broken, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jax_memeff import config
from jax_memeff._command import build, command_line, explain, tables
from jax_memeff._command.cases import options as call_options
from jax_memeff._command.tables import new_table
from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import emit, gpu, select
from jax_memeff.codegen.features import (
    BIAS,
    BOOLEAN,
    BY_NAME,
    DROPOUT,
    FEATURES,
    FUNCTIONS,
    MASK,
    SEGMENTS,
    SOFT_CAP,
)
from jax_memeff.codegen.problem import DIRECTIONS, DTYPES, Direction, Problem
from jax_memeff.codegen.spec import SPEC_DTYPES, KernelSpec
from jax_memeff.codegen.strategy import QUERY_ROWS, Strategy
from jax_memeff.codegen.toolchain import descriptors, nvrtc, program_cache
from jax_memeff.codegen.toolchain.compile import Compiled
from jax_memeff.codegen.toolchain.parallel import Job, compile_many
from jax_memeff.errors import CompileError, UnsupportedError

_FILE_WIDTH = 200
_TIMED_ARCH = "sm_80"
"""For the times of a machine without a GPU; they hardly depend on it."""
_INTERRUPTED = 130  # 128 plus the number of SIGINT, as in shells

_NO_ARCH = (
    "no architecture is known: pass --arch sm_90a, or set JAX_MEMEFF_ARCHS "
    "(no CUDA device was found on this machine)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    out = Console(file=cast("TextIO", command_line.Output(sys.stdout)), highlight=False)
    if not out.is_terminal:  # a file gets whole lines, which a terminal's width would cut
        out.width = _FILE_WIDTH
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        options = parser.parse_args(arguments)
        return options.command(options, out)
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # of --help; rich treats those of commands alike
        command_line.discard()
        return 1
    except command_line.OutputError as error:
        command_line.discard()
        errors.print(str(error), style="red", markup=False)
        return 1
    except (CompileError, UnsupportedError) as error:
        errors.print(str(error), style="red", markup=False)
        return 1
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        errors.print(f"{error}. {descriptors.advice()}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted")
        return _INTERRUPTED


def _info(options: argparse.Namespace, out: Console) -> int:
    table = new_table("part", "value")
    table.add_row("jax_memeff", _package_version())
    for part, part_version in nvrtc.versions().items():
        table.add_row(part, escape(part_version))
    table.add_row("devices", ", ".join(_device_archs()) or "none found")
    table.add_row("JAX_MEMEFF_ARCHS", ", ".join(config.archs()) or "not set")
    cache = program_cache.current()
    where = f"{cache.directory}" if cache.is_writable() else f"{cache.directory}, read-only"
    if cache.directory is None:
        where = "in memory: no home directory, and JAX_MEMEFF_CACHE_DIR is not set"
    refusal = cache.refusal()
    table.add_row("kernel cache", escape(refusal or where))
    sizes = [] if refusal else [entry.size for entry in cache.entries()]
    table.add_row("cached kernels", f"{len(sizes)}, {sum(sizes) / 2**20:.1f} MB")
    table.add_row("prebuilt kernels", escape(tables.prebuilt_kernels()))
    out.print(table)
    out.print(tables.toolchain())
    if options.timings:
        arch, *_ = (*_known_archs(options), _TIMED_ARCH)
        tables.print_whole(out, tables.timings(arch))
    return 0


def _doctor(options: argparse.Namespace, out: Console) -> int:
    # It imports JAX, which the other commands do not need.
    return importlib.import_module("jax_memeff._command.doctor").run(out)


def _verify(options: argparse.Namespace, out: Console) -> int:
    from jax_memeff._command.verify import chosen, parent

    if options.like and options.all:
        raise ValueError("expected --like for one call, or --all for the library's, not both")
    if not options.like and (given := call_options.given(options)):
        raise ValueError(f"{', '.join(given)} describe your own call: pass --like, too, to run it")
    cases = [call_options.case("verify --like", options)] if options.like else []
    cases = cases or chosen.chosen(every=options.all)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    if not options.even_if_busy:
        try:
            if warning := parent.require_idle():
                errors.print(warning, style="yellow", markup=False)
        except parent.BusyError as error:
            errors.print(str(error), style="red", markup=False)
            return 1
    start = time.monotonic()
    errors.print(f"{len(cases)} cases; each phase is written to {options.log}", markup=False)
    record = parent.run(
        cases, options.log, options.limit, lambda line: errors.print(line, markup=False)
    )
    driver = parent.driver()
    if options.json is not None:
        options.json.write_text(json.dumps(parent.document(record, driver), indent=1) + "\n")
    text = parent.markdown(record, driver, time.monotonic() - start)
    out.print(text, markup=False, soft_wrap=True)
    if record.is_interrupted:
        return _INTERRUPTED
    return 0 if record.has_passed else 1


def _bench(options: argparse.Namespace, out: Console) -> int:
    case = call_options.case("bench", options)
    # It imports JAX, which the other commands do not need.
    bench = importlib.import_module("jax_memeff._command.bench")
    figures = bench.measure(case, backward=not options.forward_only)
    if options.json is not None:
        options.json.write_text(json.dumps(bench.document(case, figures), indent=1) + "\n")
    out.print(bench.title(case), markup=False, soft_wrap=True)
    tables.print_whole(out, bench.table(figures))
    for line in bench.advice(figures):
        out.print(line, markup=False, soft_wrap=True)
    return 0 if all(figure.samples for figure in figures if figure.path == bench.OURS) else 1


def _kernels(options: argparse.Namespace, out: Console) -> int:
    for arch in _archs(options):
        out.print(select.table(arch), end="", markup=False, soft_wrap=True)
    return 0


def _explain(options: argparse.Namespace, out: Console) -> int:
    code = 0
    is_backward = options.direction == "backward"
    if options.split_q and not is_backward:
        raise ValueError(f"--split-q needs --direction backward, got {options.direction}")
    if options.query_rows and options.direction != "forward":
        raise ValueError(f"--query-rows needs --direction forward, got {options.direction}")
    for arch in _archs(options):
        problem = _problem(options, arch, options.direction, sums_gradients=is_backward)
        strategy = Strategy(options.query_rows, options.split_q)
        out.print(f"[bold]{', '.join(filter(None, map(str, (problem, strategy))))}[/bold]")
        selected = explain.choice(out, problem, strategy, every=options.all)
        if selected is None:
            code = 1
            continue
        if problem.sequence is not None:
            out.print(explain.grid(selected, problem.sequence))
            out.print(explain.drawing(options, selected), markup=False, soft_wrap=True)
        out.print(emit.source(selected), markup=False, soft_wrap=True)
    return code


def _build(options: argparse.Namespace, out: Console) -> int:
    jobs = _jobs(options)
    if options.output is not None:
        build.require_writable(options.output)
    table = new_table(
        "kernel", "arch", "registers", "spilled bytes", "shared bytes", "seconds", "cached"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results: dict[Job, Compiled | CompileError] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(set(jobs)))

        def on_done(spec: KernelSpec, arch: str, result) -> None:
            progress.update(task, advance=1, description=spec.name)
            results[spec, arch] = result
            if options.output is None:
                build.require((spec, arch), result)

        try:
            compile_many(jobs, on_done)
        except CompileError:
            if len(results) < len(set(jobs)):  # not a kernel, but the toolchain failed
                raise
        except KeyboardInterrupt:
            progress.console.print(
                f"interrupted: {len(results)} of {len(set(jobs))} kernels are done; the same "
                "command takes these from the cache and continues"
            )
            return _INTERRUPTED
    failed: list[CompileError] = []
    for spec, arch in dict.fromkeys(jobs):  # kernels finish in an order that varies
        result = results[spec, arch]
        if isinstance(result, CompileError):
            failed.append(result)
            table.add_row(spec.name, arch, "[red]did not compile[/red]")
        else:
            _add_rows(table, spec, arch, result)
    tables.print_whole(out, table)
    for (spec, arch), result in results.items():
        for warning in result.warnings if isinstance(result, Compiled) else ():
            text = f"{spec.name}, {arch}: {warning}"
            out.print(text, style="yellow", markup=False, soft_wrap=True)
    if failed:
        out.print(f"{len(failed)} kernels did not compile; the first error:", style="red")
        out.print(str(failed[0]), markup=False, soft_wrap=True)
    elif options.output is not None:
        done = {job: result for job, result in results.items() if isinstance(result, Compiled)}
        out.print(build.write(options.output, done), markup=False, soft_wrap=True)
    elif note := build.elsewhere():
        out.print(note, soft_wrap=True)
    return 1 if failed else 0


def _jobs(options: argparse.Namespace) -> list[Job]:
    if options.models is None:
        if not options.all and (options.dtype is None or options.head_dim is None):
            raise ValueError("expected --dtype and --head-dim, --all for every kernel, or --models")
        if options.value_dim and options.head_dim is None:
            raise ValueError("--value-dim needs --head-dim, got only --value-dim")
        return [(spec, arch) for arch in _archs(options) for spec in _specs(options, arch)]
    of_problem = any(
        value != BY_NAME[name].off for name, value in _features(options, False).items()
    )
    dims = options.head_dim or options.value_dim
    if of_problem or options.all or options.dtype or dims:
        raise ValueError("expected --models or a problem, not both")
    # Tracing imports JAX.
    models = importlib.import_module("jax_memeff._command.models")
    return models.kernels([name.strip() for name in options.models.split(",")], _archs(options))


def _specs(options: argparse.Namespace, arch: str) -> Iterable[KernelSpec]:
    """The kernels to build: those of one problem if it has features, else the closure.

    The problem is built with and without gradients of the arrays that a score function reads.
    """
    if all(value == BY_NAME[name].off for name, value in _features(options, False).items()):
        chosen = {} if options.dtype is None else {"dtypes": [options.dtype]}
        if options.head_dim is not None:
            chosen["dims"] = [(options.head_dim, options.value_dim or options.head_dim)]
        closure = list(select.closure(arch, **chosen))
        if not closure:
            dtypes = ", ".join(gpu.of(arch).dtypes)
            raise UnsupportedError([f"{arch} multiplies {dtypes}, not {options.dtype}"])
        return closure
    if options.all:
        raise ValueError("expected features of one problem, or --all for every kernel, not both")
    problems = dict.fromkeys((_problem(options, arch, "forward", sums_gradients=False),))
    if options.keys and not (options.latent or options.page_size):
        # The sizes of a call decide whether its kernel gathers keys or reads bits.
        in_bits = argparse.Namespace(**{**vars(options), "keys": False, "boolean": True})
        problems[_problem(in_bits, arch, "forward", sums_gradients=False)] = None
    if not options.page_size:  # paged calls have no gradient
        for sums in (False, True):
            problems[_problem(options, arch, "backward", sums_gradients=sums)] = None
    specs = dict.fromkeys(spec for problem in problems for spec in select.select_all(problem))
    with contextlib.suppress(UnsupportedError):  # then tangents are computed in plain JAX
        tangents = _problem(options, arch, "tangent", sums_gradients=False)
        specs |= dict.fromkeys(select.select_all(tangents))
    return specs


def _add_rows(table: Table, spec: KernelSpec, arch: str, compiled: Compiled) -> None:
    dynamic = {entry.name: entry.shared_bytes for entry in spec.entry_points}
    for resource in compiled.resources:
        main = resource.name == spec.name
        spilled = resource.spill_store + resource.spill_load
        table.add_row(
            resource.name,
            arch,
            str(resource.registers),
            f"[yellow]{spilled}[/yellow]" if spilled else "0",
            str(resource.shared_bytes + dynamic[resource.name]),
            f"{compiled.seconds:.2f}" if main else "",
            ("yes" if compiled.cached else "no") if main else "",
        )


def _problem(
    options: argparse.Namespace, arch: str, direction: Direction, *, sums_gradients: bool
) -> Problem:
    return Problem(
        direction=direction,
        dtype=options.dtype,
        head_dim=options.head_dim,
        value_dim=options.value_dim or options.head_dim,
        arch=arch,
        features=_features(options, sums_gradients),
        sequence=getattr(options, "seq", None),
    )


def _features(options: argparse.Namespace, sums_gradients: bool) -> dict[str, Any]:
    """The features that the flags request, by name.

    ``sums_gradients``: whether kernels sum the gradients of arrays that a score function reads.
    """
    features = {feature.name: feature.from_flags(options) for feature in FEATURES}
    function_names = options.score_function, options.mask_function
    if function_names == (None, None):
        return features
    # Tracing imports JAX, which the other commands do not need.
    named_functions = importlib.import_module("jax_memeff._cuda.named_functions")
    return named_functions.added(
        features, *function_names, dtype=options.dtype, gradients=sums_gradients
    )


def _archs(options: argparse.Namespace) -> tuple[str, ...]:
    """The architectures of ``_known_archs``; there must be one."""
    if not (known := _known_archs(options)):
        raise ValueError(_NO_ARCH)
    return known


def _known_archs(options: argparse.Namespace) -> tuple[str, ...]:
    """The architectures asked for: the option, then the environment, then the devices."""
    return tuple(dict.fromkeys(options.arch or ())) or config.archs() or _device_archs()


def _device_archs() -> tuple[str, ...]:
    try:
        devices = importlib.import_module("cuda.core").Device.get_all_devices()
        capabilities = sorted({device.compute_capability for device in devices})
    except (ImportError, RuntimeError):  # no cuda-core, or no driver
        return ()
    return tuple(archs.of_capability(major, minor) for major, minor in capabilities)


def _package_version() -> str:
    try:
        return version("jax-memeff")
    except PackageNotFoundError:
        return "not installed"


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m jax_memeff",
        description="The kernels of jax_memeff: list them, explain a choice, compile them.",
    )
    commands = parser.add_subparsers(required=True)

    def add(name: str, command, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        if command not in (_bench, _doctor, _verify):
            added.add_argument(
                "--arch",
                action="append",
                metavar="sm_NN",
                type=command_line.architecture,
                help="an architecture, repeatable; default: JAX_MEMEFF_ARCHS, else local devices",
            )
        return added

    add("doctor", _doctor, "report what works here, what is missing, and what to do next")

    _add_verify(add)
    _add_bench(add)

    info = add("info", _info, "show versions of the toolchain, devices, and the kernel cache")
    info.add_argument("--timings", action="store_true", help="also time a compile and a cache hit")

    add("kernels", _kernels, "list every kernel that build --all compiles, one per line")

    explained = add(
        "explain", _explain, "show which kernel serves a problem, and why others do not"
    )
    explained.add_argument(
        "--direction", choices=DIRECTIONS, default="forward", help="tangent: forward mode (jvp)"
    )
    explained.add_argument("--dtype", type=command_line.dtype, choices=DTYPES, required=True)
    command_line.add_dims(explained, required=True)
    explained.add_argument(
        "--all", action="store_true", help="every kernel that was not chosen; default: the nearest"
    )
    explained.add_argument(
        "--seq", type=command_line.size, help="query and key length: draws the tiles"
    )
    explained.add_argument(
        "--query-rows",
        choices=QUERY_ROWS,
        help="few queries: split keys over CTAs, in tiles of up to 64 rows, or over consumer "
        "groups; 128 and 256 split nothing, but choose tiles of this many rows",
    )
    explained.add_argument(
        "--split-q", action="store_true", help="few KV blocks: CTAs of a backward share each one"
    )
    for feature in FEATURES:
        feature.add_flags(explained)

    build = add(
        "build",
        _build,
        "compile kernels into the cache: those of one problem if features are given, else the "
        "usual ones of a head dim (plain, each feature alone, all features)",
    )
    build.add_argument("--dtype", type=command_line.dtype, choices=SPEC_DTYPES)
    command_line.add_dims(build, required=False)
    build.add_argument("--all", action="store_true", help="all dtypes and dims, unless named")
    build.add_argument(
        "--models",
        metavar="NAMES",
        help="the kernels for training, prompts and decoding of models such as llama,gemma,gpt-oss",
    )
    build.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the kernels to this archive, for JAX_MEMEFF_KERNELS",
    )
    for feature in FEATURES:
        feature.add_flags(build)
    return parser


def _add_verify(add: Any) -> None:
    verify = add(
        "verify",
        _verify,
        "run the library's own cases on the GPU, in a process that may be killed, and print a "
        "report for an issue",
    )
    verify.epilog = (
        "example: python -m jax_memeff verify --like --dtype bf16 --head-dim 128 --causal "
        "--seq 4096 --heads 32 --key-heads 8"
    )
    verify.add_argument("--all", action="store_true", help="more cases, which take longer")
    verify.add_argument(
        "--like", action="store_true", help="one case: the call that the flags below describe"
    )
    verify.add_argument(
        "--limit",
        type=command_line.seconds,
        default=60.0,
        metavar="SECONDS",
        help="kill a process whose launch takes longer; compiling does not count; default: 60",
    )
    verify.add_argument(
        "--even-if-busy",
        action="store_true",
        help="run under MPS, or although other processes compute on the GPU, which may end them",
    )
    _add_json(verify)
    verify.add_argument(
        "--log",
        type=command_line.file_to_write,
        default="jax_memeff_verify.jsonl",
        metavar="FILE",
        help="each phase is on the disk before it begins; default: %(default)s",
    )
    call_options.add_to(verify)


def _add_bench(add: Any) -> None:
    bench = add("bench", _bench, "time one call on this machine, CPU or GPU, compared with jax.nn")
    bench.epilog = (
        "example: python -m jax_memeff bench --batch 8 --seq 4096 --heads 32 --key-heads 8 "
        "--head-dim 128 --causal"
    )
    bench.add_argument("--forward-only", action="store_true", help="no gradients")
    _add_json(bench)
    of_jax_nn = (MASK, SEGMENTS, BOOLEAN, BIAS, FUNCTIONS, SOFT_CAP, DROPOUT)
    call_options.add_to(bench, of_jax_nn)
    bench.set_defaults(dtype="bf16")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=command_line.file_to_write,
        metavar="FILE",
        help="also write the results here",
    )
