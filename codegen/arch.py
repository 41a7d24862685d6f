"""Names of GPU architectures, ``"sm_80"`` or ``"sm_90a"``, and their compute capabilities.

``"compute_80"`` is the virtual architecture of sm_80: kernels are PTX, which the driver compiles
for any device of capability 8.0 or later.
"""

from __future__ import annotations

import re

# The suffix "a" begins with capability 9.0, and "f" with 10.0.
_ARCH = re.compile(
    r"sm_(?:([1-9]\d{1,2})|(9\d|[1-9]\d\d)a|([1-9]\d\d)f)|compute_([1-9]\d{1,2})", re.ASCII
)

# Capabilities whose architecture-specific instructions (the "a" suffix) some kernels use. A kernel
# is compiled for the capability of one device, so the suffix costs no portability.
_ARCHITECTURE_SPECIFIC = frozenset({90, 100, 103})


def capability(arch: str) -> int:
    """The compute capability times ten: 80 for ``"sm_80"`` and ``"compute_80"``.

    Raises ``ValueError`` if ``arch`` is not the name of an architecture.

    >>> capability("sm_90a")
    90
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(
            f"expected the name of a GPU architecture such as 'sm_80' or 'sm_90a', got {arch!r}"
        )
    return int(next(filter(None, match.groups())))


def is_virtual(arch: str) -> bool:
    """Whether kernels for ``arch`` are PTX.

    >>> is_virtual("compute_80"), is_virtual("sm_80")
    (True, False)
    """
    return arch.startswith("compute_")


def of_capability(major: int, minor: int) -> str:
    """The architecture that kernels are compiled for on a device of this compute capability.

    >>> of_capability(8, 6), of_capability(9, 0)
    ('sm_86', 'sm_90a')
    """
    number = 10 * major + minor
    return f"sm_{number}{'a' if number in _ARCHITECTURE_SPECIFIC else ''}"
