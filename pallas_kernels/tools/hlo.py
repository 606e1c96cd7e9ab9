"""Reads a compiled GPU program as XLA prints it: its kernels, and the bytes that a kernel moves."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Opcodes that launch no kernel of their own.
FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all partition-id optimization-barrier"
    " fusion-done copy-done all-reduce-done async-done".split()
)
CONTROL = ("while", "conditional", "call")
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all", "send", "recv",
)  # fmt: skip
SLICES = ("slice", "dynamic-slice", "gather")  # They read only the returned part of operand 0.
# By opcode: the number of the operand that is written into operand 0.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
ARITHMETIC = frozenset(
    "add subtract multiply divide maximum minimum exponential log tanh rsqrt sine cosine negate "
    "logistic".split()
)
# A fusion's kind is the first of these opcodes that it contains. MOVING applies only to fusions
# without arithmetic.
COMPUTING = ("dot", "scatter", "reduce", "gather")
MOVING = ("concatenate", "pad", "transpose", "dynamic-slice", "slice", "copy")


@dataclass(frozen=True)
class Op:
    """One instruction.

    shape: the result's shape, as XLA prints it.
    operands: names of the instructions that compute the operands.
    text: the rest of the line, after the operands.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    text: str

    @property
    def bytes(self) -> int:
        return sum(_array_bytes(*array) for array in re.findall(r"(\w+)\[([\d,]*)\]", self.shape))

    @property
    def called(self) -> str:
        """The computation that a fusion runs, or ''."""
        found = re.search(r"calls=%?([\w.\-]+)", self.text)
        return found[1] if found else ""

    @property
    def argument(self) -> str:
        """A parameter's name in Python, as in "params['layers'][0]['wq']"."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1].replace("\\", "") if found else ""


def _array_bytes(dtype: str, dims: str) -> int:
    found = re.match(r"(?:pred|[a-z]+(\d+))", dtype)
    assert found, dtype
    return math.prod(map(int, filter(None, dims.split(",")))) * int(found[1] or 8) // 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel reads and writes.

    read: bytes read, without the pools that the kernel reads by index.
    written: bytes written. For an array that is updated in place, only the update is included.
    pools: the number of pools that the kernel reads by index.
    """

    read: int = 0
    written: int = 0
    pools: int = 0


class Program:
    """A compiled program.

    computations: computation's name -> instruction's name -> instruction, in scheduled order.
    entry: the instructions of the main computation, by name.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry: dict[str, Op] = {}
        self._roots: dict[str, Op] = {}
        name = ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = head[2]
                ops = self.computations[name] = {}
                if head[1]:
                    self.entry = ops
            elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
                op = _op(found[2], found[3])
                self.computations[name][op.name] = op
                if found[1]:
                    self._roots[name] = op
        assert self.entry, "no program"

    def __iter__(self) -> Iterator[Op]:
        for ops in self.computations.values():
            yield from ops.values()

    def kernels(self) -> list[Op]:
        """The main computation's instructions that run on the device; a loop is one instruction."""
        return [op for op in self.entry.values() if op.opcode not in FREE]

    def kind(self, kernel: Op) -> str:
        """A kernel's kind: a custom call's target, 'elementwise', or an opcode. An opcode of
        `MOVING` means that the kernel only moves data."""
        inside = [kernel, *self._inside(kernel)]
        targets = [re.search(r'custom_call_target="([^"]+)"', op.text) for op in inside]
        for found in filter(None, targets):
            return found[1]
        codes = {op.opcode.removesuffix("-start") for op in inside}
        for code in (*CONTROL, *COLLECTIVES, *COMPUTING):
            if code in codes:
                return code
        if any(op.opcode in ARITHMETIC and op.shape.startswith(("f", "bf")) for op in inside):
            return "elementwise"
        return next((code for code in MOVING if code in codes), kernel.opcode)

    def _inside(self, kernel: Op) -> Iterator[Op]:
        for op in self.computations.get(kernel.called, {}).values():
            yield op
            yield from self._inside(op)

    def arguments(self, kernel: Op) -> list[str]:
        """The Python names of the kernel's operands that are arguments of the program."""
        found = []
        for name in kernel.operands:
            op = self.entry[name]
            while op.opcode == "bitcast":
                op = self.entry[op.operands[0]]
            if op.opcode == "parameter":
                found.append(op.argument)
        return found

    def traffic(self, kernel: Op, pool_bytes: int) -> Traffic:
        """The traffic of a kernel. It is zero for loops and branches, because the number of their
        iterations is unknown.

        pool_bytes: size of a pool. Custom calls read arrays of this size by index.
        """
        if kernel.opcode in CONTROL:
            return Traffic()
        if kernel.opcode != "fusion":
            operands = [self.entry[name].bytes for name in kernel.operands]
            pools = operands.count(pool_bytes)
            return Traffic(sum(operands) - pools * pool_bytes, kernel.bytes, pools)
        inside, root = self.computations[kernel.called], self._roots[kernel.called]
        shares, read, pools = _shares_read(inside, root), 0, 0
        calls = any(op.opcode == "custom-call" for op in inside.values())
        for op in inside.values():
            if op.opcode == "parameter":
                indexed = calls and op.bytes == pool_bytes
                pools += indexed
                read += 0 if indexed else round(op.bytes * shares[op.name])
        return Traffic(read, _written(inside, root), pools)


def _op(name: str, rest: str) -> Op:
    shape, rest = _split_balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    operands, text = _split_balanced("(" + rest)
    return Op(name, opcode, shape, tuple(re.findall(r"%([\w.\-]+)", operands)), text)


def _split_balanced(text: str) -> tuple[str, str]:
    """The parenthesised prefix of a text, and the rest of the text."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise AssertionError(f"no end: {text}")


def _shares_read(inside: dict[str, Op], root: Op) -> dict[str, float]:
    """For each array in a fusion, the share of its elements that is computed or read, without the
    elements that a slice drops."""
    shares = dict.fromkeys(inside, 0.0) | {root.name: 1.0}
    for op in reversed(inside.values()):
        for name in set(op.operands):
            share = shares[op.name]
            if name not in op.operands[1:]:
                if op.opcode in SLICES:
                    share *= op.bytes / inside[name].bytes
                elif op.opcode in UPDATES:
                    share = 0.0
            shares[name] = min(1.0, shares[name] + share)
    return shares


def _written(inside: dict[str, Op], result: Op) -> int:
    if result.opcode == "bitcast":
        return _written(inside, inside[result.operands[0]])
    if result.opcode == "tuple":
        return sum(_written(inside, inside[name]) for name in result.operands)
    if result.opcode in UPDATES:
        return inside[result.operands[UPDATES[result.opcode]]].bytes
    return result.bytes
