"""The description of a kernel has the sizes of arrays that it assumes, and the host checks them, so
a program from a file cannot pass a smaller array.
"""

import jax.numpy as jnp
import pytest

from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select


def dims(problem):
    return {array.name: array.dims for array in select(problem).captured_arrays}


@pytest.mark.parametrize("size", [16, 48, 256])
def test_a_page_table_has_all_pages_of_a_sequence(size):
    features = {"pages": AskedPages(size), "varlen": True, "lengths": True}
    found = dims(Problem("forward", "bf16", 64, 64, "sm_90a", features))
    assert found["page_table"] == f"B S/{size}"


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_have_the_dims_of_their_arrays(exact):
    table, gain = jnp.ones((4, 9)), jnp.float32(2)
    program, _ = traced_score_function(lambda s, b, h, q, k: 2.5 * s + gain * table[h, q - k])
    asked = AskedFunctions(program.structure, None, gradients=(0, 1), exact=exact)
    features = {"functions": asked, "deterministic": exact}
    found = dims(Problem("backward", "bf16", 64, 64, "sm_90a", features))
    rank = [array.ndim for array in program.arrays]
    own = {0: "4" if exact else "", 2: "captured{0}.1 captured{0}.2" + "*4" * exact}
    for index in range(2):
        want = f"B~ {own[rank[index]].format(index)}".rstrip()
        assert found[f"captured{index}_gradient"] == want
    assert found["function_literals"] == str(max(1, program.literal_count))
    assert found.get("captured_scale") == ("1" if exact else None)
