"""Fixtures of tests with a ragged batch of paged_case.py."""

import emulator
import paged_case
import pytest


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    calls = [(call["case"], call["arch"]) for call in selected if {"case", "arch"} <= {*call}]
    machine.submit(emulator.lower_together, paged_case.lower, calls).result(timeout=600)
