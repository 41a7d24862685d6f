"""The line on a terminal while a kernel is compiled."""

from __future__ import annotations

import io
import sys

import pytest

from jax_memeff import config
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import progress
from jax_memeff.errors import CompileError

pytestmark = pytest.mark.quick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    """Called in a test, because pytest replaces the streams between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JAX_MEMEFF_PROGRESS", raising=False)
    return stream


def test_a_terminal_shows_one_line_that_disappears(capsys, monkeypatch):
    stream = terminal(monkeypatch)
    with progress.line("compiling [bold]"):
        inner = sys.stderr
        with progress.line("another thread's"):
            pass
    written = stream.getvalue()
    assert inner is stream
    assert "compiling [bold]" in written and "another" not in written
    assert "0 s compiling" in written
    assert written.rstrip("\n\r").endswith("\x1b[2K")  # the line is erased
    assert capsys.readouterr().out == ""


class OnlyWrite:
    """Programs that log their standard error replace it by such an object."""

    def write(self, text: str) -> int:
        return len(text)


def test_a_stream_that_cannot_show_the_line_is_no_error(monkeypatch):
    """The line is not worth a failed compilation."""
    closed = io.StringIO()
    closed.close()
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(ascii_only, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for stream in (OnlyWrite(), closed, ascii_only):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.line("compiling"):
            pass
    assert ascii_only.buffer.getvalue() == b""


def test_files_and_the_setting_have_no_line(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setattr(stream, "isatty", lambda: False)
    with progress.line("text"):
        pass
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("JAX_MEMEFF_PROGRESS", "0")
    with progress.line("text"):
        pass
    monkeypatch.setattr(sys, "stderr", None)  # pythonw and daemons have none
    monkeypatch.setenv("JAX_MEMEFF_PROGRESS", "1")
    with progress.line("text"):
        pass
    assert stream.getvalue() == ""


def test_the_setting_is_checked(monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_PROGRESS", "yes")
    with pytest.raises(ValueError, match="JAX_MEMEFF_PROGRESS to be 0 or 1, got 'yes'"):
        config.progress()


def test_only_a_kernel_that_is_compiled_has_a_line(monkeypatch):
    stream = terminal(monkeypatch)
    spec = select(Problem("forward", "bf16", 64, 64, "sm_80"))
    monkeypatch.setattr(compiler, "lookup_source", lambda *_: "found")
    assert compiler.compile(spec, "sm_80") == "found"
    assert stream.getvalue() == ""

    def fails(*_):
        raise CompileError("no", {})

    monkeypatch.setattr(compiler, "lookup_source", lambda *_: None)
    monkeypatch.setattr(compiler, "compile_uncached", fails)
    with pytest.raises(CompileError):
        compiler.compile(spec, "sm_80")
    assert f"jax_memeff compiles {spec.name}" in stream.getvalue()
    with progress.line("the next one"):  # the failure has ended the first line
        pass
    assert "the next one" in stream.getvalue()
