"""Exact attention for JAX in linear memory, with kernels generated for each problem.

Names are imported when they are first used, so that ``jax_memeff.codegen`` and the command line
start without JAX.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_memeff import dropout as dropout
    from jax_memeff._api.attention import dot_product_attention as dot_product_attention
    from jax_memeff._api.attention import (
        dot_product_attention_packed as dot_product_attention_packed,
    )
    from jax_memeff._api.check import check as check
    from jax_memeff._api.merge import merge_attention as merge_attention
    from jax_memeff._api.paged.append import append_to_pages as append_to_pages
    from jax_memeff._api.paged.attention import paged_attention as paged_attention
    from jax_memeff._api.paged.pool import PagePool as PagePool
    from jax_memeff._api.patch import patch_jax_nn as patch_jax_nn
    from jax_memeff._api.picture import picture as picture
    from jax_memeff._api.ring import ring_attention as ring_attention
    from jax_memeff._api.varlen import varlen_attention as varlen_attention
    from jax_memeff._call.mask import Mask as Mask
    from jax_memeff._call.mask.pictures import Picture as Picture
    from jax_memeff._call.offsets import Offsets as Offsets
    from jax_memeff._cuda.export import export_disabled_checks as export_disabled_checks
    from jax_memeff._cuda.export import register_targets as register_targets
    from jax_memeff._op.vjp import forward_mode as forward_mode
    from jax_memeff._ring.schedule import unzigzag as unzigzag
    from jax_memeff._ring.schedule import zigzag as zigzag
    from jax_memeff.errors import CompileError as CompileError
    from jax_memeff.errors import OutOfPagesError as OutOfPagesError
    from jax_memeff.errors import UnsupportedError as UnsupportedError

_MODULE_OF = {
    "CompileError": "errors",
    "Mask": "_call.mask",
    "Offsets": "_call.offsets",
    "OutOfPagesError": "errors",
    "PagePool": "_api.paged.pool",
    "Picture": "_call.mask.pictures",
    "UnsupportedError": "errors",
    "append_to_pages": "_api.paged.append",
    "check": "_api.check",
    "dot_product_attention": "_api.attention",
    "dot_product_attention_packed": "_api.attention",
    "export_disabled_checks": "_cuda.export",
    "forward_mode": "_op.vjp",
    "merge_attention": "_api.merge",
    "paged_attention": "_api.paged.attention",
    "patch_jax_nn": "_api.patch",
    "picture": "_api.picture",
    "register_targets": "_cuda.export",
    "ring_attention": "_api.ring",
    "unzigzag": "_ring.schedule",
    "varlen_attention": "_api.varlen",
    "zigzag": "_ring.schedule",
}


def _require_whole_package() -> None:
    """Raise ``ImportError`` in a source tree, which lacks the parts that pip builds or adds."""
    find = importlib.util.find_spec
    lacking = [name for name in ("_ffi", "codegen") if find(f"{__name__}.{name}") is None]
    if lacking:
        root = Path(__file__).resolve().parents[1]
        is_clone = (root / "pyproject.toml").is_file()
        what = f"-e '{root}'" if is_clone else "--force-reinstall WHEEL_OR_CLONE"
        raise ImportError(
            f"jax_memeff in {root} is not completely installed for this Python (it lacks "
            f"{' and '.join(lacking)}): run {sys.executable} -m pip install {what}",
            name=__name__,
        )


_require_whole_package()

if "jax" in sys.modules:
    importlib.import_module("jax_memeff._op.contexts")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Reading the version searches the installed distributions.
        value = importlib.import_module("importlib.metadata").version("jax-memeff")
    elif name == "__all__":
        # Without it ``from jax_memeff import *`` finds only names that are already imported.
        value = [*_MODULE_OF, "dropout"]
    elif name == "dropout":
        value = importlib.import_module("jax_memeff.dropout")
    elif name in _MODULE_OF:
        module = importlib.import_module(f"jax_memeff.{_MODULE_OF[name]}")
        value = getattr(module, name)
    else:
        raise AttributeError(f"module 'jax_memeff' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "dropout", "__version__"])
