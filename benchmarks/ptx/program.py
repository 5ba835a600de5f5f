"""The text of a compiled kernel as instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recbft.experiments.lists import split_list

LABEL = re.compile(r"^(\$L\w+):$")
INSTRUCTION = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: as it is written.
        guard: the predicate that says which threads take part, or None for all.
        unless: whether those take part for which it is false.
        name: such as ``add``, with its qualifiers behind dots in ``parts``.
        operands: as written, the destination first.
    """

    text: str
    guard: str | None
    unless: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def kind(self) -> str:
        """The type it computes in."""
        return self.parts[-1]

    @classmethod
    def parse(cls, text: str) -> Instruction:
        found = INSTRUCTION.match(text)
        assert found is not None, text
        unless, guard, name, operands = found.groups()
        return cls(text, guard, unless == "!", tuple(name.split(".")), tuple(split_list(operands)) if operands else ())


@dataclass(frozen=True)
class Program:
    """A kernel: its parameters as (type, name), threads, instructions, and where labels stand among them."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @classmethod
    def parse(cls, ptx: str) -> Program:
        head, body = ptx.split(".entry", 1)[1].split("\n{", 1)
        name, threads = re.match(r"\s*(\w+)", head), re.search(r"\.reqntid (\d+)", head)
        assert name is not None and threads is not None
        parameters = re.findall(r"\.param \.(\w+)[^,\n]*? (\w+_param_\d+)", head)
        text = re.sub(r"//.*", "", body.split("$L__func_end")[0])
        instructions: list[Instruction] = []
        labels = {}
        for line in map(str.strip, text.split("\n")):
            if found := LABEL.match(line):
                labels[found[1]] = len(instructions)
            elif not line.startswith("."):
                parts = (part.strip() for part in line.split(";"))
                instructions += [Instruction.parse(part) for part in parts if part not in ("", "{", "}")]
        return cls(name[1], tuple(parameters), int(threads[1]), tuple(instructions), labels)


def grouped(operand: str) -> list[str]:
    """The registers of an operand that may be several in braces."""
    return split_list(operand[1:-1]) if operand.startswith("{") else [operand]
