"""The compiled module (ffi/src/module.cc); importing it needs neither a GPU nor a driver.

The values are capsules, which typing has no name for before Python 3.13.
"""

from typing import Any

def call_type() -> Any: ...
def checksum(bytes: bytes) -> int: ...
def targets() -> dict[str, dict[str, Any]]: ...
