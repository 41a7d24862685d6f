"""``python -m jax_memeff`` in this process, with a cache of its own and no GPU."""

import pytest

from jax_memeff import cli


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_MEMEFF_ARCHS", raising=False)
    monkeypatch.setattr(cli, "_device_archs", lambda: ())


def run(capsys, *arguments):
    code = cli.main(arguments)
    return code, capsys.readouterr().out
