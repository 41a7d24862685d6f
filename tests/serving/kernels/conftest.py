"""Fixtures of tests with a ragged batch of paged_case.py."""

import emulator
import paged_case
import pytest


@pytest.fixture(scope="module")
def lowered(machine, selected, request):
    """Lowers the programs of all cases before the first one runs, by the module's own ``lower`` if
    it has one.
    """
    lower = getattr(request.module, "lower", paged_case.lower)
    calls = [(call["case"], call["arch"]) for call in selected if {"case", "arch"} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)
