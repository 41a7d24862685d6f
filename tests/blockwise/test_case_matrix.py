"""The test matrix is complete, every case has kernels, and the blockwise path passes all cases.

``test_kernels.py`` runs all cases on a GPU.
"""

from __future__ import annotations

import itertools

import case_matrix
import kernel_cases
import pytest
from attention_case import Case, passed
from case_matrix import AXES
from dropout_bits import assert_dropout_bits
from oracle_checks import assert_matches_the_oracle

from jax_memeff._cuda import selection


@pytest.fixture
def archs(monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")


def kernels(case):
    """The kernels of a call, forward and backward."""
    operands, _, _ = passed(case, *case.arrays(None))
    return [
        selection.kernels(operands, case.options, needs_grad)
        for needs_grad in (None, case.needs_grad)
    ]


@pytest.mark.quick
def test_every_pair_of_values_occurs():
    rows = case_matrix.rows().values()
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            together = {one: first, other: second}
            occurs = any(row[one] == first and row[other] == second for row in rows)
            assert occurs == case_matrix.possible(together), together
    names = [str(case) for case in case_matrix.cases()]
    assert 250 <= len(names) == len(set(names)) <= 400


def test_what_is_sanitized_is_among_the_cases():
    sanitized = case_matrix.sanitized_cases()
    assert set(map(str, sanitized)) <= {
        str(case) for case in (*kernel_cases.cases(), *case_matrix.cases())
    }
    assert max(max(case.T, case.S, case.H) for case in sanitized) <= 320


def test_every_case_has_kernels(archs):
    for case in case_matrix.cases():
        kernels(case)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("case", case_matrix.small_cases(), ids=str)
def test_the_blockwise_path_matches_the_oracle(case):
    assert_matches_the_oracle(case)


@pytest.mark.rotating(5)
@pytest.mark.parametrize("case", case_matrix.listed_cases(), ids=str)
def test_lists_of_keys_match_the_oracle(case):
    assert_matches_the_oracle(case)


DROPOUT = {"T": 40, "S": 40, "H": 16, "dtype": "float32", "dropout": 0.3, "scale": 1.0}
LENGTHS = ((40, 40), (21, 33))


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(**DROPOUT, position=(48, 160)),
        Case(**DROPOUT, lengths=LENGTHS, packed=True),
        Case(**DROPOUT, projections=True),
        Case(**DROPOUT, keys=("BKT", 40)),
        Case(**DROPOUT, keys=("BKT", 40), lengths=LENGTHS, packed=True, position=(48, 160)),
    ],
    ids=str,
)
def test_dropout_bits_of_the_blockwise_path(case):
    assert_dropout_bits(case)
