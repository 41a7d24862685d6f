"""Fixtures of conftest.py in a session with several modules."""

import os
import pathlib
import subprocess
import sys

# Two modules have a parameter of the same name, and one test has no parameters.
MODULE = """
import pytest

VALUES = {values}

@pytest.fixture(scope="module", autouse=True)
def prepared(selected):
    assert selected == [{{"case": value}} for value in VALUES]

@pytest.mark.parametrize("case", VALUES)
def test_with(case): ...

def test_without(): ...
"""


def test_selected_parameters_are_those_of_the_module(tmp_path):
    modules = {"test_numbers.py": [1, 2], "test_words.py": ["some", "words"]}
    for name, values in modules.items():
        (tmp_path / name).write_text(MODULE.format(values=values))
    tests = str(pathlib.Path(__file__).parents[1])
    plugins = ("-p", "conftest", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, *plugins, *modules],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": tests, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "6 passed" in done.stdout, done.stdout + done.stderr
