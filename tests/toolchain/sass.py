"""Machine code of a kernel: the origin of the left operands of its products.

Hazard: ptxas (CUDA 13.0) has packed probabilities into registers that held keys for all Q blocks,
so the next Q block was multiplied by probabilities. Neither its log nor the emulator shows that.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\.F32")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@(!?U?P\w+) +)?([A-Z][\w.]*) *([^;]*);")
_FUNCTION = re.compile(r"Function : (\w+)")
_REGISTER = re.compile(r"R(\d+)")
_LEFT_OPERAND_REGISTERS = 4
_WIDTHS = {"2": 2, "64": 2, "LARGE_DIM": 2, "4": 4, "128": 4}
"""The number of registers that an instruction with a modifier writes; others write one."""


class Instruction(NamedTuple):
    """One line of a listing."""

    address: int
    predicate: str | None
    operation: str
    operands: tuple[str, ...]

    @property
    def written(self) -> range:
        """The vector registers that the instruction writes."""
        return _written(self.operation, self.operands[0])

    def next_addresses(self, following: int) -> Iterator[int]:
        """The possible addresses after this one; ``following`` is the address of the next line."""
        name = self.operation.partition(".")[0]
        if name == "BRA":
            yield int(self.operands[-1], 16)
        unconditional = self.predicate is None and len(self.operands) == 1
        if name not in {"BRA", "EXIT", "RET"} or not unconditional:
            yield following


@functools.cache
def _written(operation: str, destination: str) -> range:
    if not (first := _REGISTER.match(destination)):
        return range(0)
    return range(int(first[1]), int(first[1]) + _written_width(operation))


def _written_width(operation: str) -> int:
    if product := _PRODUCT.match(operation):
        return int(product[1]) // 2
    if operation == "CS2R":
        return 2
    return max(_WIDTHS.get(modifier, 1) for modifier in operation.split("."))


def functions(image: bytes, directory: Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel of a fatbin. Writes the fatbin into ``directory``."""
    from cuda import pathfinder  # the parser needs none of CUDA's packages

    file = directory / "image.fatbin"
    file.write_bytes(image)
    tools = [pathfinder.find_nvidia_binary_utility(name) for name in ("cuobjdump", "nvdisasm")]
    path = ":".join(str(Path(tool).parent) for tool in tools if tool)
    listing = subprocess.run(
        ["cuobjdump", "-sass", file], env={"PATH": path}, check=True, capture_output=True, text=True
    )
    return parse(listing.stdout)


def parse(listing: str) -> dict[str, list[Instruction]]:
    """The instructions of each function in the output of ``cuobjdump -sass``."""
    found: dict[str, list[Instruction]] = {}
    for line in listing.splitlines():
        if function := _FUNCTION.search(line):
            found[function[1]] = []
        elif match := _INSTRUCTION.search(line):
            address, predicate, operation, operands = match.groups()
            words = tuple(word.strip() for word in operands.split(","))
            instruction = Instruction(int(address, 16), predicate, operation, words)
            next(reversed(found.values())).append(instruction)
    return found


def overwritten_operands(code: list[Instruction]) -> list[str]:
    """Products whose left operand is a loaded value on one path of a thread and a different result
    on another path.
    """
    before: dict[int, list[Instruction]] = {}
    followers = [*(instruction.address for instruction in code[1:]), -1]
    for instruction, following in zip(code, followers, strict=True):
        for address in instruction.next_addresses(following):
            before.setdefault(address, []).append(instruction)
    wrong = []
    for product in code:
        if not product.operation.startswith("HGMMA"):
            continue
        if not (left := _REGISTER.fullmatch(product.operands[1])):
            continue  # it is in shared memory
        for register in range(int(left[1]), int(left[1]) + _LEFT_OPERAND_REGISTERS):
            sources = {source.operation for source in _sources(before, product, register)}
            loads = {source for source in sources if source.startswith("LDS")}
            if loads and sources != loads:
                wrong.append(
                    f"{product.address:#x}: R{register} is of {', '.join(sorted(sources))}"
                )
    return wrong


def _sources(
    before: dict[int, list[Instruction]], reader: Instruction, register: int
) -> Iterator[Instruction]:
    """The instructions that may have set the register that ``reader`` reads."""
    seen: set[Instruction] = set()
    waiting = list(before.get(reader.address, ()))
    while waiting:
        instruction = waiting.pop()
        if instruction in seen:
            continue
        seen.add(instruction)
        if register in instruction.written:
            yield instruction
            if instruction.predicate is None:
                continue
        waiting += before.get(instruction.address, ())
