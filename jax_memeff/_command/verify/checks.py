"""One case on the GPU: its programs are launched twice, compared with the oracle and with the
blockwise path, and timed beside ``jax.nn``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._command.cases import oracle, programs
from jax_memeff._command.cases.arrays import Arrays
from jax_memeff._command.cases.case import Case
from jax_memeff._command.cases.oracle import Comparison

Say = Callable[..., None]
"""Announces a phase, with its name and what it is about, before it begins."""

OURS = "memeff_cuda"
JAX_NN: Mapping[str, Literal["cudnn", "xla"]] = {"jax_cudnn": "cudnn", "jax_xla": "xla"}
"""The implementations of ``jax.nn`` by their names in benchmarks, the preferred one first."""

_TF32_TOLERANCE = 1e-3
_FLOAT32_TOLERANCE = 5e-6
_POISONED_BYTES = 64 << 20
_ROUNDS = 5


def lowered(case: Case) -> dict[Any, Any]:
    """The programs of a case: ``kernels``, ``plain``, and the timed ones by direction and peer.

    Raises:
        UnsupportedError: the GPU has no kernel for the case.
    """
    given: Any = Arrays.draw(case).given()
    # Float32 is the reference of what is too large for the oracle.
    reference = case if case.fits_oracle else dataclasses.replace(case, dtype="float32", fast=False)
    programs_by_key: dict[Any, Any] = {
        "kernels": jax.jit(programs.complete(case, "cuda")).lower(given),
        "plain": jax.jit(_in_dtype(programs.complete(reference, "xla"), reference)).lower(given),
    }
    for direction in _directions(case):
        if direction == "forward":
            programs_by_key[direction, OURS] = jax.jit(programs.forward(case, "cuda")).lower(given)
        for peer, implementation in JAX_NN.items():
            program = programs.of_jax_nn(case, implementation, direction != "forward")
            with contextlib.suppress(Exception):  # what jax.nn raises for sizes without a path
                programs_by_key[direction, peer] = jax.jit(program).lower(given)
    return programs_by_key


def compile_program(key: Any, program: Any) -> Any:
    """Compile one program of :func:`lowered`; None for a peer that does not compile."""
    if key == "plain":  # nobody times it, and trying algorithms takes most of the time
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # an XLA without this option
            return program.compile({"xla_gpu_autotune_level": 0})
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError:
        if isinstance(key, str) or key[1] == OURS:
            raise
        return None


def check(case: Case, compiled: Mapping[Any, Any], say: Say) -> dict[str, Any]:
    """The outcome of a case: its ``state`` ("passed" or "failed"), ``text`` with what is wrong, the
    ``errors`` of both paths and the ``seconds`` of the programs that were timed.

    ``compiled`` has the programs of :func:`lowered`.
    """
    say("drawing")
    drawn = Arrays.draw(case)
    given: Any = jax.device_put(drawn.given())
    say("launching", what="kernels")
    results = _launched(compiled["kernels"], given)
    say("launching", what="kernels, again")
    again = _launched(compiled["kernels"], given)
    wrong = [
        f"{name}: the bits differ between two runs"
        for name in results
        if _is_repeatable(case, name) and results[name].tobytes() != again[name].tobytes()
    ]
    if case.dropout and not case.score_function:
        say("launching", what="dropout bits")
        wrong += _wrong_bits(drawn, compiled["kernels"])
    say("launching", what="the blockwise path")
    plain = _launched(compiled["plain"], given)
    say("comparing")
    expected = _expected(drawn) if case.fits_oracle else _Expected(drawn.unpacked(plain))
    errors = {"kernels": _compared(case, drawn.unpacked(results), expected)}
    if case.fits_oracle:
        errors["blockwise"] = _compared(case, drawn.unpacked(plain), expected)
    for path, comparisons in errors.items():
        wrong += [f"{path}: {compared.text}" for compared in comparisons if compared.text]
    outcome: dict[str, Any] = {
        "state": "failed" if wrong else "passed",
        "text": wrong,
        "errors": {path: [compared[:3] for compared in each] for path, each in errors.items()},
    }
    if _directions(case) and not wrong:
        say("launching", what="timed programs")
        outcome["seconds"] = _seconds(compiled, given)
    return outcome


def _in_dtype(program: programs.Program, case: Case) -> programs.Program:
    """The program with all 16-bit arrays in the dtype of a case of float32."""
    if case.dtype != "float32":
        return program

    def widened(arrays: programs.Given) -> dict[str, jax.Array]:
        narrow = (jnp.float16, jnp.bfloat16)
        return program(
            {name: x.astype(jnp.float32) if x.dtype in narrow else x for name, x in arrays.items()}
        )

    return widened


def _directions(case: Case) -> list[str]:
    if not case.is_timed or not programs.jax_nn_can_run(case):
        return []
    return ["forward", "forward_backward"] if case.gradients else ["forward"]


def _launched(program: Any, given: Any) -> dict[str, np.ndarray]:
    """The results of a program whose memory was NaN before: its workspaces, its results, and what
    lies between and beyond the buffers of free memory.
    """
    jax.block_until_ready(jnp.full(_POISONED_BYTES, 0xFF, jnp.uint8))
    return {name: np.asarray(x) for name, x in jax.block_until_ready(program(given)).items()}


def _is_repeatable(case: Case, name: str) -> bool:
    """Whether a result must have the same bits in each run (docs/guide/determinism.md)."""
    if case.deterministic or name in ("out", "lse", "maxima"):
        return True
    return name in ("dkey", "dvalue") and case.N == case.K


def _wrong_bits(drawn: Arrays, program: Any) -> list[str]:
    """Compares the elements that the forward keeps with the definition.

    Equal scores give every valid element a probability, and values of one column of the identity
    show whether it was kept.
    """
    case = drawn.case
    columns = min(case.S, case.value_dim)
    hot = np.eye(case.S, case.value_dim)[None, :, None, :]
    changed = {"query": np.zeros_like(drawn.padded["query"])}
    changed["value"] = np.broadcast_to(hot, drawn.padded["value"].shape).astype(_dtype(case))
    if case.bias:
        changed["bias"] = np.zeros_like(drawn.padded["bias"])
    uniform = Arrays(case, {**drawn.padded, **changed})
    out = drawn.unpacked(_launched(program, jax.device_put(uniform.given())))["out"]
    expected = (drawn.kept & drawn.valid)[..., :columns]
    kept = np.asarray(out, np.float32).transpose(0, 2, 1, 3)[..., :columns] > 0
    count = int((kept != expected).sum())
    return [f"dropout: {count} of {expected.size} bits are wrong"] if count else []


def _dtype(case: Case) -> Any:
    return jnp.dtype(case.dtype)


class _Expected(NamedTuple):
    """The results that a case should have, by name.

    ``low`` are those of an oracle that rounds each operation, of 16-bit cases that the oracle
    checks; see :func:`oracle.compare` for ``scales`` and ``floors``.
    """

    results: Mapping[str, np.ndarray]
    low: Mapping[str, np.ndarray] | None = None
    scales: Mapping[str, np.ndarray] = {}
    floors: Mapping[str, float] = {}


def _expected(drawn: Arrays) -> _Expected:
    """What the oracle says."""
    case, problem = drawn.case, drawn.problem()
    dtype = _dtype(case)

    def in_dtype(x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(dtype).astype(np.float64)

    def results(rounded: oracle.Rounding) -> oracle.Answer:
        answer = oracle.answer(problem, rounded)
        if not case.tangents:
            return answer
        moving = (drawn.padded[f"{name}_tangent"] for name in ("query", "key", "value"))
        tangents = oracle.tangents(problem, [x.astype(np.float64) for x in moving], rounded)
        return answer._replace(results={**answer.results, **tangents})

    wide = results(lambda x: x)
    low = None if dtype == np.float32 else results(in_dtype).results
    out = wide.results["out"]
    floor = oracle.cancellation(problem, out, eps=_eps(case), fast=case.fast)
    floors = {
        "dquery": floor * problem.scale * np.abs(problem.key).max(),
        "dkey": floor * problem.scale * np.abs(problem.query).max(),
        **dict.fromkeys(("dbias", "dsinks", "dcaptured"), floor),
    }
    if case.tangents:  # dP V and dlse O may cancel: each is rounded by itself
        rows = problem._replace(dout=np.ones_like(out))
        tangent_floor = oracle.cancellation(rows, out, eps=_eps(case), fast=case.fast)
        floors["out_tangent"] = tangent_floor * np.abs(wide.results["lse_tangent"]).max()
    return _Expected(wide.results, low, wide.scales, floors)


def _compared(
    case: Case, results: Mapping[str, np.ndarray], expected: _Expected
) -> list[Comparison]:
    is_wide = case.dtype == "float32"
    is_rough = case.fast or (case.soft_cap is not None and not is_wide)
    of_norm = _TF32_TOLERANCE if case.fast else _FLOAT32_TOLERANCE
    if not is_wide and expected.low is None:
        of_norm = 2 * _eps(case)
    comparisons = []
    for name, got in results.items():
        tolerance = of_norm
        if name in oracle.ABSOLUTE:
            tolerance = 1e-3 if is_rough else 2e-5 if case.tangents else 1e-5
        comparisons.append(
            oracle.compare(
                name,
                got,
                expected.results[name],
                None if expected.low is None else expected.low[name],
                eps=_eps(case),
                tolerance=tolerance,
                floor=expected.floors.get(name, 0.0),
                scale=expected.scales.get(name),
            )
        )
    return comparisons


def _eps(case: Case) -> float:
    return float(jnp.finfo(_dtype(case)).eps)


def _seconds(compiled: Mapping[Any, Any], given: Any) -> dict[str, dict[str, list[float]]]:
    """Seconds of a call in each batch of launches, by direction and peer."""
    timed = {
        key: executable
        for key, executable in compiled.items()
        if isinstance(key, tuple) and executable
    }
    if any(direction == "forward_backward" for direction, _ in timed):
        timed["forward_backward", OURS] = compiled["kernels"]
    launches: dict[str, dict[str, Any]] = {}
    for (direction, peer), program in timed.items():
        peers = launches.setdefault(direction, {})
        is_second_choice = peer == "jax_xla" and "jax_cudnn" in peers
        if is_second_choice:
            continue
        try:
            jax.block_until_ready(program(given))
        except jax.errors.JaxRuntimeError:
            if peer == OURS:
                raise
            continue
        peers[peer] = functools.partial(program, given)
    return {
        direction: programs.interleaved(peers, seconds=0, least=_ROUNDS, most=_ROUNDS)
        for direction, peers in launches.items()
    }
