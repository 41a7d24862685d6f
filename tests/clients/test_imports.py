"""What the adapters import."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick


def test_adapters_cost_nothing_without_their_libraries():
    """The modules of layers need the library whose classes they extend, and say which."""
    program = """
import sys
libraries = ("equinox", "flax", "haiku", "haliax")
sys.modules |= dict.fromkeys(libraries)  # as if they were not installed
import jax_memeff
jax_memeff.Mask
assert "jax_memeff.clients" not in sys.modules
import jax_memeff.clients
import jax_memeff.clients.levanter, jax_memeff.clients.maxtext
for name in ("equinox", "haiku"):
    try:
        __import__(f"jax_memeff.clients.{name}")
    except ModuleNotFoundError as error:
        print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("equinox\nhaiku\n", "")
