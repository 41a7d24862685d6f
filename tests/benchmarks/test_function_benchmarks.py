"""Benchmarks of functions of scores and masks: cells, peers, tables, and compiled kernels."""

import concurrent.futures.process
import dataclasses
import json
import sys
import types

import numpy as np
import pytest
from harness import modules

import jax_memeff
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import parallel

__all__ = ["modules"]


def test_every_figure_of_functions_has_its_cells(modules):
    cells = modules("programs.cells").functions()
    assert {cell.head_dim for cell in cells} == {64, 128}
    rows = {(cell.function, cell.causal, cell.query_length) for cell in cells}
    assert rows == {
        ("identity", False, 4096),
        ("alibi", False, 4096),
        ("alibi", True, 4096),
        ("soft cap", False, 4096),
        ("table", False, 4096),
        *(("documents", False, length) for length in (4096, 16384)),
        *(("window", True, length) for length in (4096, 16384)),
    }


@pytest.mark.rotating(3)
def test_the_gallery_is_measured(modules):
    """Its cells have arguments, and their float arrays are inputs."""
    found = modules("programs.cells").gallery()
    gallery = modules("user_functions.in_jax")
    names = {f"gallery {name}" for name, entry in gallery.ENTRIES.items() if entry.has_kernels}
    assert {cell.function for cell in found} == names
    learned = set()
    for cell in found:
        sizes = {"batch": 2, "heads": 2, "key_heads": 2, "key_length": 64, "head_dim": 8}
        sizes |= {"query_length": min(64, cell.query_length), "value_dim": 8}
        cell = dataclasses.replace(cell, **sizes, dtype="float32")
        inputs = modules("programs.inputs").make(cell)
        if inputs.table is not None:
            learned.add(cell.function.split()[1])
        plain, ours = (
            modules("programs.peers")._memeff(cell, implementation="xla", with_function=own)(inputs)
            for own in (False, True)
        )
        assert float(modules("programs.jax_programs").distance(ours, plain)) > 1e-3, cell.name
    assert learned == {"alibi", "relative_table", "t5_bias", "swin_bias"}


def tiny_functions():
    """The names of small functions, without importing the harness at collection."""
    return ["identity", "alibi", "causal alibi", "soft cap", "table", "documents", "window"]


@pytest.fixture(params=tiny_functions())
def function_cell(request, modules):
    for cell in modules("programs.cells").tiny_functions():
        causal = "causal " if (cell.function, cell.causal) == ("alibi", True) else ""
        if f"{causal}{cell.function}" == request.param:
            return cell
    raise AssertionError(request.param)


def test_the_plain_call_beside_a_function_computes_the_same(modules, function_cell):
    """This holds if an argument of the call can replace the function."""
    cell = function_cell
    inputs = modules("programs.inputs").make(cell)
    attention = modules("programs.peers")._memeff
    ours = attention(cell, implementation="xla")(inputs)
    plain = attention(cell, implementation="xla", with_function=False)(inputs)
    distance = float(modules("programs.jax_programs").distance(ours, plain))
    if cell.function in modules("programs.cells").WITH_ARGUMENT:
        assert distance < 1e-6
    else:
        assert distance > 0.01


def test_flex_attention_has_the_same_functions(modules, function_cell):
    """NumPy has the operations that they use, so evaluating them does not need PyTorch."""
    cell = function_cell
    inputs = modules("programs.inputs").make(cell)
    torch = types.SimpleNamespace(
        arange=lambda size, device, dtype: np.arange(size, dtype=dtype),
        tensor=lambda values, device: np.array(values, np.float32),
        int32=np.int32,
        stack=np.stack,
        tanh=np.tanh,
    )
    flex = modules("user_functions.flex_attention")
    sizes = (cell.batch, cell.heads, cell.query_length, cell.key_length)
    indices = np.ix_(*map(np.arange, sizes))
    arguments = modules("user_functions.in_jax").arguments(cell, inputs)

    mask = arguments.get("mask", jax_memeff.Mask())
    if arguments.get("is_causal", cell.causal):
        mask &= jax_memeff.Mask.causal()
    theirs = flex._mask_function(torch, cell)
    valid = True if theirs is None else theirs(*indices)
    np.testing.assert_array_equal(mask.as_array(*sizes), np.broadcast_to(valid, sizes))

    score_mod = arguments.get("score_mod")
    theirs = flex._score_function(torch, cell, inputs.table)
    assert (score_mod is None) == (theirs is None)
    if score_mod is not None:
        scores = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
        np.testing.assert_allclose(theirs(scores, *indices), score_mod(scores, *indices), 1e-6)


def test_what_pytorch_cannot_compile_is_tried_once(modules):
    """A compiler takes up to a minute to fail, so the measurement reuses the reason."""
    peers, precompile = modules("programs.peers").PEERS, modules("programs.precompile")
    cell = modules("programs.cells").tiny_functions()[0]
    precompilation = precompile.Precompilation([cell], [])
    reason = modules("measuring.timing").Failure("InductorError: no kernel")
    for name in ("flex", "memeff_cuda"):
        precompilation._futures[peers[name], cell, True] = done = concurrent.futures.Future()
        done.set_result(reason)
    measured = modules("attention").measure_direction(
        cell, True, [peers["flex"]], precompilation, None, None, 1, 1e-3
    )
    assert measured["flex"] == {"error": "InductorError: no kernel"}
    assert precompilation.failure(peers["flex"], cell, False) is None
    assert precompilation.failure(peers["memeff_cuda"], cell, True) is None
    broken = precompilation._futures[peers["flex"], cell, True] = concurrent.futures.Future()
    broken.set_exception(concurrent.futures.process.BrokenProcessPool())
    assert precompilation.failure(peers["flex"], cell, True) is None


def test_functions_have_a_table_of_their_own(modules):
    def timed(seconds):
        return {"seconds": seconds, "tflops": 1e3 / seconds}

    cell = {"name": "hd64 function alibi", "group": "functions", "results": {}}
    for direction, factor in (("forward", 1.0), ("forward_backward", 3.0)):
        cell["results"][direction] = {
            "memeff_cuda": timed(2 * factor),
            "memeff_plain": timed(factor),
            "memeff_deterministic": timed(4 * factor),
            "flex": timed(3 * factor),
        }
    cell["results"]["forward"]["flex"] = {"error": "InductorError: out of shared memory"}
    document = {
        "date": "today",
        "device": {"name": "GPU", "driver": None},
        "versions": {},
        "peers": {"memeff_cuda": "ours", "flex": "FlexAttention"},
        "cells": [cell],
        "host": {"block_mask": {"hd64 function alibi": {"seconds": 0.03}}},
    }
    text = modules("report").tables(document)
    assert "|hd64 function alibi|0.50|0.50|0.25|" in text
    assert "|hd64 function alibi|2000000|none||6000000|9000000|1.50|" in text
    assert "- hd64 function alibi: 30.00 ms, 0.5% of forward + backward" in text
    assert "500" in modules("user_functions.table").text(document)


def test_functions_are_lowered_at_two_lengths(modules, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "store", compiler.store)  # restored after the test
    benchmark = modules("function_compile")
    every = list(benchmark.functions())
    assert len(every) == 20
    monkeypatch.setattr(benchmark, "functions", lambda: every[::9])
    monkeypatch.setattr(sys, "argv", ["function_compile.py", "xla"])
    benchmark.main()
    row = json.loads(capsys.readouterr().out)
    assert row["functions"] == len(row["sources"]) == 3
    assert row["seconds_of_slowest"] > 0 and row["sources_of_new_lengths"] == 0


def test_sources_of_other_processes_are_counted(modules, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "store", compiler.store)  # restored after the test
    image = compiler.Compiled(b"", (), (), (), "", 0.0, False)
    monkeypatch.setattr(parallel._Worker, "run", lambda worker, job: image)
    counted = modules("programs.compiled_kernels").record()
    specs = [select(Problem("forward", "bf16", dim, dim, "sm_80")) for dim in (32, 64)]
    parallel.compile_many([(spec, "sm_80") for spec in specs], processes=2)
    assert sorted(counted) == [[f"{spec.name} sm_80"] for spec in specs]


def test_block_masks_of_functions_are_timed(modules, monkeypatch):
    cells, host_cost = modules("programs.cells"), modules("measuring.host_cost")
    monkeypatch.setattr(host_cost, "functions", cells.tiny_functions)
    monkeypatch.setattr(host_cost, "_BLOCK_MASK_LENGTH", 96)
    monkeypatch.setattr(host_cost, "_BATCH_SECONDS", 1e-3)
    rows = host_cost.block_mask(())
    # A program holds the block mask of a window as a constant.
    (name,) = rows
    assert "documents" in name and rows[name]["seconds"] > 0
