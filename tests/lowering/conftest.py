"""The fixture of tests that lower for one architecture."""

import jax
import pytest


@pytest.fixture
def hopper(monkeypatch):
    """Lowers programs for a Hopper GPU."""
    jax.clear_caches()  # jax caches lowered programs, maybe for the architectures of another test
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
