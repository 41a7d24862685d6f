"""``python -m jax_memeff`` with odd paths, flags that conflict, and Ctrl-C."""

import pytest
from command_line import environment

from jax_memeff import cli

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

__all__ = ["environment"]

BUILD = ["build", "--dtype", "f16", "--head-dim", "64", "--causal", "--arch", "sm_80"]


def test_an_output_whose_name_no_file_can_have_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as raised:
        cli.main([*BUILD, "--output", str(tmp_path / ("k" * 300))])
    assert raised.value.code == 2
    assert "kkk cannot be written: File name too long" in capsys.readouterr().err
