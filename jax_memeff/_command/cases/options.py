"""A call as options of the command line describe it, for ``verify --like`` and ``bench``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping

from jax_memeff._command import command_line
from jax_memeff._command.cases.case import Case, Kind
from jax_memeff.codegen.features import BIAS, FEATURES
from jax_memeff.codegen.features.feature import Feature
from jax_memeff.codegen.features.mask import NO_BOUND
from jax_memeff.codegen.problem import DTYPES, Problem

_BIAS_DIMS = {"full": "BNTS", "common": "1NTS", "columns": "BN1S", "rows": "BNT1"}
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "tf32": "float32"}

_TITLES: Mapping[Kind, str] = {
    "padded": "a call of padded sequences",
    "packed": "a call of packed sequences (--varlen)",
    "paged": "paged attention (--page-size)",
}

_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "causal": ("padded", "packed", "paged"),
    "window": ("padded", "packed", "paged"),
    "soft_cap": ("padded", "packed", "paged"),
    "score_function": ("padded", "packed", "paged"),
    "mask_function": ("padded", "packed", "paged"),
    "sinks": ("padded", "packed", "paged"),
    "boolean": ("padded", "packed", "paged"),
    "segments": ("padded", "packed"),
    "bias_layout": ("padded", "packed"),
    "bias": ("padded", "packed"),
    "dropout": ("padded", "packed"),
    "row_maxima": ("padded", "packed"),
    "deterministic": ("padded", "packed"),
    "varlen": ("packed",),
    "page_size": ("paged",),
    "latent": ("padded", "packed", "paged"),
    "batch_invariant": ("paged",),
    "float8": (),
    "key_scale": (),
    "value_scale": (),
    "positions": (),
    "broadcast_batch": (),
    "keys": ("padded", "packed", "paged"),
}
"""The calls that take an option, for each one of a feature."""


def add_to(parser: argparse.ArgumentParser, features: Iterable[Feature] = FEATURES) -> None:
    """Adds the options of a call: dtype, sizes, and those of ``features``."""
    parser.add_argument("--dtype", type=command_line.dtype, choices=DTYPES)
    command_line.add_dims(parser, required=False)
    for name, default, text in (
        ("batch", 2, "batch size; default: %(default)s"),
        ("seq", 512, "key length, and query length without --queries; default: %(default)s"),
        ("queries", None, "query length"),
        ("heads", 4, "query heads; default: %(default)s"),
        ("key-heads", None, "key heads; default: --heads, and 1 with --latent"),
    ):
        parser.add_argument(f"--{name}", type=command_line.size, default=default, help=text)
    for feature in features:
        feature.add_flags(parser)


def given(options: argparse.Namespace) -> list[str]:
    """The options of a call that differ from their defaults, as the user writes them."""
    defaults = vars(_defaults())
    return [_flag(name) for name, value in defaults.items() if vars(options)[name] != value]


def case(command: str, options: argparse.Namespace) -> Case:
    """The call that the options describe. Those that ``command`` does not have count as left out.

    Raises:
        ValueError: an option is missing, contradicts another one, or means nothing for such a call.
    """
    options = argparse.Namespace(**{**vars(_defaults()), **vars(options)})
    if missing := [x for x in ("dtype", "head_dim") if getattr(options, x) is None]:
        raise ValueError(f"{command} needs {' and '.join(map(_flag, missing))}")
    if options.dtype not in _DTYPES:
        raise ValueError(f"expected one of {', '.join(_DTYPES)}, got --dtype {options.dtype}")
    kind: Kind = "paged" if options.page_size else "packed" if options.varlen else "padded"
    _require_taken(command, kind, options)
    _require_possible(options)
    key_heads = options.key_heads or (1 if options.latent else options.heads)
    if options.latent and key_heads != 1:
        raise ValueError(f"--latent has one key head: expected --key-heads 1, got {key_heads}")
    if options.heads % key_heads:
        raise ValueError(
            f"--heads must be a multiple of --key-heads, got {options.heads} and {key_heads}"
        )
    window = 64 if options.window == NO_BOUND else options.window
    call = Case(
        kind=kind,
        B=options.batch,
        T=options.queries or options.seq,
        S=options.seq,
        N=options.heads,
        K=key_heads,
        H=options.head_dim,
        Hv=options.value_dim,
        dtype=_DTYPES[options.dtype],
        fast=options.dtype == "tf32",
        causal="top_left" if options.causal else None,
        window=None if window is None else (window, 0),
        segments=options.segments,
        boolean="B1TS" if options.boolean else "",
        keys=options.keys,
        soft_cap=3.0 if options.soft_cap else None,
        score_function=options.score_function or "",
        mask_function=options.mask_function or "",
        dropout=0.1 if options.dropout else 0.0,
        bias=_BIAS_DIMS[options.bias_layout or "full"] if options.bias else "",
        bias_dtype="float32" if options.bias == "32" else "",
        sinks=options.sinks,
        max_logits=options.row_maxima,
        deterministic=options.deterministic,
        page_size=options.page_size,
        latent=options.latent,
        batch_invariant=options.batch_invariant,
        gradients=kind != "paged",
    )
    lengths = tuple((call.T - 7 * b % call.T, call.S - 5 * b % call.S) for b in range(call.B))
    if kind == "packed":
        return dataclasses.replace(call, lengths=lengths)
    if kind == "paged":
        return dataclasses.replace(
            call,
            S=-(-call.S // call.page_size) * call.page_size,
            lengths=tuple((call.T, key) for _, key in lengths),
            causal="bottom_right" if options.causal else None,
        )
    return call


def _defaults() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_to(parser)
    return parser.parse_args([])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_taken(command: str, kind: Kind, options: argparse.Namespace) -> None:
    """Raise if an option means nothing for a call of this kind."""
    defaults = _defaults()
    for name, kinds in _KINDS.items():
        if kind in kinds or getattr(options, name) == getattr(defaults, name):
            continue
        if not kinds:
            raise ValueError(f"{command} has no call with {_flag(name)}: leave it out")
        taken = ", ".join(_flag(other) for other, kinds in _KINDS.items() if kind in kinds)
        elsewhere = " or ".join(_TITLES[other] for other in kinds)
        raise ValueError(
            f"{_TITLES[kind]} does not take {_flag(name)}: expected options among {taken}; leave "
            f"{_flag(name)} out, or ask for {elsewhere}"
        )


def _require_possible(options: argparse.Namespace) -> None:
    """Raise if no call has these values of features together."""
    if options.latent and not (options.page_size or options.keys):
        raise ValueError(
            "--latent needs --page-size or --keys, because other calls copy the values: add one, "
            "or leave --latent out"
        )
    features = {feature.name: feature.from_flags(options) for feature in FEATURES}
    dims = options.head_dim, options.value_dim or options.head_dim
    problem = Problem("forward", options.dtype, *dims, "sm_80", features)
    if reasons := BIAS.family_reasons(problem):
        raise ValueError(f"--bias {options.bias}: {'; '.join(reasons)}")
