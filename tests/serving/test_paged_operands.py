"""The canonical form of a paged call: packed sequences with a pool of pages as keys."""

import jax
import jax.numpy as jnp
import numpy as np
import paging

from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling
from jax_memeff._call.sequences import Pages, Sequences
from jax_memeff._op import primitives


def test_the_pool_is_read_through_the_table():
    rng = np.random.default_rng(0)
    case = paging.paging(rng, lengths=[37, 0, 16, 1], counts=[3, 0, 16, 1], gap=2)
    page_size = case.key_pages.shape[1]

    def pool(pages):
        return jnp.asarray(pages).reshape(1, -1, *pages.shape[2:])

    operands = Operands(
        query=jnp.asarray(case.query)[None],
        key=pool(case.key_pages),
        value=pool(case.value_pages),
        bias=None,
        mask=Mask.causal("bottom_right"),
        dropout=None,
        position=None,
        sequences=Sequences(
            jnp.asarray(case.starts).at[-1].set(len(case.query)),
            jnp.zeros(5, jnp.int32),
            jnp.asarray(case.counts),
            jnp.asarray(case.lengths),
            20,
            case.table.shape[1] * page_size,
        ),
        pages=Pages(jnp.asarray(case.table), None, None, page_size),
    )
    out, lse = jax.jit(lambda x: primitives.forward(x, Options(Scaling(8**-0.5))))(operands)
    expected = paging.answer(case)
    np.testing.assert_allclose(out[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(lse[0], expected[1], atol=1e-5)
