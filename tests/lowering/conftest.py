"""The fixture of tests that lower for one architecture."""

import jax
import pytest


@pytest.fixture
def hopper(monkeypatch):
    """Programs are lowered for a GPU of Hopper."""
    jax.clear_caches()  # jax keeps lowered programs, whose architectures another test chose
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
