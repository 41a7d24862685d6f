"""python .ci/check_wheel.py WHEEL... : each is small, complete, and linked to no CUDA library."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LARGEST_BYTES = 2_000_000
# The driver is opened at run time, so a wheel also loads on machines without a GPU.
LINKED = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|ld-linux-.*)\.so\.\d+")
CONTENTS = (
    r"jax_memeff/_ffi\..*\.so",
    r"jax_memeff/py\.typed",
    r"jax_memeff/codegen/__init__\.py",
    r"jax_memeff/codegen/kernels/sm90/forward\.cuh",
    r"jax_memeff/codegen/memeff/arch/mma\.cuh",
    r"jax_memeff/include/memeff/params\.h",
)


def faults(wheel: Path) -> list[str]:
    found = []
    if (size := wheel.stat().st_size) > LARGEST_BYTES:
        found.append(f"expected at most {LARGEST_BYTES} bytes, got {size}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        names = archive.namelist()
        for pattern in CONTENTS:
            if not any(re.fullmatch(pattern, name) for name in names):
                found.append(f"expected a file {pattern}, got none")
        for name in names:
            if ".so" in Path(name).suffixes:
                library = archive.extract(name, directory)
                output = subprocess.run(
                    ["readelf", "-dW", library], check=True, capture_output=True, text=True
                ).stdout
                linked = re.findall(r"\(NEEDED\).*\[(.*)\]", output)
                found += [
                    f"{name} is linked to {needed}"
                    for needed in linked
                    if not LINKED.fullmatch(needed)
                ]
    return found


def main(wheels: list[str]) -> int:
    wrong = [f"{wheel}: {fault}" for wheel in wheels for fault in faults(Path(wheel))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    for wheel in wheels:
        print(f"{Path(wheel).name}: {Path(wheel).stat().st_size} bytes")
    return 1 if wrong or not wheels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
