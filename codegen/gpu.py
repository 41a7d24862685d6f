"""The resources of a GPU for a kernel: shared memory, the dtypes of its tensor cores, and wgmma."""

from __future__ import annotations

import dataclasses

from jax_memeff.codegen import arch as archs

FIRST_CAPABILITY = 75
"""Every kernel uses ldmatrix and the mma.sync fragments that sm_75 introduced. CUDA 13 compilers
support nothing older."""

WGMMA_ARCH = "sm_90a"
"""The only architecture with wgmma. sm_90 without the letter gets the mma.sync kernels."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Architectures with the same shared memory. The mma.sync kernels are configured for each."""

    name: str
    max_shared_bytes: int
    """The largest dynamic shared memory that a CTA may opt in to."""
    system_bytes: int = 1024
    """The shared memory that the system reserves for every CTA."""
    dtypes: tuple[str, ...] = ("f16", "bf16", "f32", "tf32")
    """The dtypes that the tensor cores multiply."""
    threads: int = 2048
    """The threads that an SM runs at a time."""
    ctas: int = 32
    """The CTAs that an SM runs at a time."""
    async_copies: bool = True
    """Whether it has ``cp.async``, so that threads do not wait for their copies."""

    def shared_bytes(self, blocks: int) -> int:
        """The bytes of shared memory that each of ``blocks`` CTAs on an SM may have."""
        return (self.max_shared_bytes + self.system_bytes) // blocks - self.system_bytes

    def resident_ctas(self, threads: int, shared_bytes: int) -> int:
        """The CTAs of this size that an SM runs at a time, if registers allow it.

        >>> SM80.resident_ctas(128, 80 * 1024), SM86.resident_ctas(128, 80 * 1024)
        (2, 1)
        """
        memory = self.max_shared_bytes + self.system_bytes
        of_memory = memory // max(shared_bytes + self.system_bytes, 1)
        return min(of_memory, self.threads // threads, self.ctas)


SM75 = Gpu(
    "sm_75",
    64 * 1024,
    system_bytes=0,
    dtypes=("f16",),
    threads=1024,
    ctas=16,
    async_copies=False,
)
SM80 = Gpu("sm_80, sm_87", 163 * 1024)
SM86 = Gpu("sm_86, sm_89, sm_120, sm_121", 99 * 1024, threads=1536, ctas=16)
SM90 = Gpu("sm_90, sm_100, sm_103, sm_110", 227 * 1024)

_BY_CAPABILITY = {75: SM75, 80: SM80, 87: SM80, 90: SM90, 100: SM90, 103: SM90, 110: SM90}


_MULTIPROCESSORS = {
    75: 40,  # T4
    80: 108,  # A100
    86: 84,  # A40, RTX A6000
    87: 16,  # Orin
    89: 128,  # RTX 4090
    90: 132,  # H100, H200
    100: 148,  # B200
    103: 148,  # B300
    110: 20,  # Thor
    120: 170,  # RTX 5090
    121: 48,  # GB10
}


def multiprocessors(arch: str) -> int:
    """The SMs of a typical GPU of ``arch``. A program is lowered before its device is known, so
    this number decides how work is divided; what is launched is limited to the device
    (ffi/src/launch.cc).

    >>> multiprocessors("compute_80"), multiprocessors("sm_90a")
    (108, 132)
    """
    return _MULTIPROCESSORS.get(archs.capability(arch), _MULTIPROCESSORS[90])


def of(arch: str) -> Gpu:
    """The GPU of ``arch``.

    An architecture that is not listed is treated as having 99 KB per CTA, which every GPU from
    sm_80 on offers.

    >>> of("sm_90a").max_shared_bytes // 1024, of("sm_89").max_shared_bytes // 1024
    (227, 99)
    """
    return _BY_CAPABILITY.get(archs.capability(arch), SM86)


def has_vector_reductions(arch: str) -> bool:
    """Whether one instruction adds four adjacent floats to global memory.

    >>> has_vector_reductions("sm_120"), has_vector_reductions("compute_80")
    (True, False)
    """
    return archs.capability(arch) >= 90


def has_wgmma(arch: str) -> bool:
    """Whether wgmma kernels run on ``arch``.

    >>> has_wgmma("sm_90a"), has_wgmma("sm_90")
    (True, False)
    """
    return arch == WGMMA_ARCH
