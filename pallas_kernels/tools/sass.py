"""Reads a kernel's machine code (SASS), as nvdisasm prints it: the instructions for one tile.

A kernel's work is a loop over tiles, which is the innermost loop with tensor-core instructions. A
kernel with a warpgroup that only fetches has a second loop over tiles, with the copies. As in
compilers, a loop is a branch back to a block that dominates the branch.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_ENDS = ("EXIT", "RET", "BRX")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    opcode: the opcode with its modifiers.
    target: the label to which the instruction may branch.
    conditional: whether a predicate may disable the instruction.
    """

    opcode: str
    target: str | None = None
    conditional: bool = False

    def is_one_of(self, *names: str) -> bool:
        return self.opcode.split(".")[0] in names

    @property
    def is_product(self) -> bool:
        return self.is_one_of("HGMMA", "HMMA", "QGMMA", "IGMMA", "IMMA")

    @property
    def is_copy(self) -> bool:
        """Whether the instruction copies global to shared memory (cp.async, TMA)."""
        return self.is_one_of("UTMALDG", "UBLKCP", "LDGSTS")

    @property
    def ends(self) -> bool:
        return self.is_one_of(*_ENDS)

    @property
    def is_wait(self) -> bool:
        return self.opcode.startswith("SYNCS.PHASECHK")

    @property
    def flops(self) -> int:
        """FLOPs of a warpgroup. HGMMA is one instruction of four warps, HMMA of one warp."""
        if found := re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", self.opcode):
            m, n, k = map(int, found.groups())
            return 2 * m * n * k
        if found := re.match(r"HMMA\.(16)(8)(8|16)\b", self.opcode):
            m, n, k = map(int, found.groups())
            return 4 * 2 * m * n * k
        return 0


@dataclass(frozen=True)
class Loop:
    """A warp's pass through a loop, on the shortest path with all products and copies. This path
    excludes instructions that only some tiles need, such as masks.

    block_barriers: the number of instructions for barriers of threads (BAR).
    transaction_barriers: the number of instructions for barriers of copies (SYNCS, an mbarrier).
    flops: FLOPs of a warpgroup.
    """

    instructions: int
    block_barriers: int
    transaction_barriers: int
    products: int
    copies: int
    flops: int


def loops(text: str) -> tuple[Loop | None, Loop | None]:
    """The loop that multiplies tiles, and the loop that only copies tiles. Either may be None."""
    graph = _Graph(text)
    multiplying = list(graph.innermost(lambda i: i.is_product))
    products = [graph.pass_through(*loop, lambda i: i.is_product or i.is_copy)
                for loop in multiplying]  # fmt: skip
    copies = [
        graph.pass_through(*loop, lambda i: i.is_wait or i.is_copy)
        for loop in graph.innermost(lambda i: i.is_copy)
        if not any(header == loop[0] for header, _ in multiplying)
    ]
    return (
        # Masked tiles may have a separate loop. The loop without masks is shorter.
        min(products, key=lambda loop: (-loop.flops, loop.instructions), default=None),
        min(
            (loop for loop in copies if not loop.products),
            key=lambda loop: (-loop.copies, loop.instructions),
            default=None,
        ),
    )


def instructions(text: str) -> Iterator[Instruction | str]:
    """Instructions and labels, in the order of the text."""
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            yield label[1]
        elif found := _INSTRUCTION.search(line):
            condition, opcode, operands = found.groups()
            target = _TARGET.search(operands)
            branches = opcode.split(".")[0] in ("BRA", "JMP")
            # "BRA P1, `(...)" is conditional too.
            conditional = bool(condition) or bool(re.match(r"\s+!?U?P\d", operands))
            yield Instruction(opcode, target[1] if branches and target else None, conditional)


class _Graph:
    """Basic blocks 0, 1, … in the order of the text, and each block's successors."""

    def __init__(self, text: str):
        self.blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for item in instructions(text):
            last = self.blocks[-1]
            if last and (isinstance(item, str) or last[-1].target or last[-1].ends):
                self.blocks.append([])
            if isinstance(item, str):
                labels[item] = len(self.blocks) - 1
            else:
                self.blocks[-1].append(item)
        self.after: list[list[int]] = []
        for number, block in enumerate(self.blocks):
            end = block[-1] if block else Instruction("NOP")
            following = [labels[end.target]] if end.target in labels else []
            goes_on = end.conditional or not (end.target or end.ends)
            if goes_on and number + 1 < len(self.blocks):
                following.append(number + 1)
            self.after.append(following)
        self.before: list[list[int]] = [[] for _ in self.blocks]
        for number, following in enumerate(self.after):
            for other in following:
                self.before[other].append(number)
        self.loops = self._loops()

    def _dominators(self) -> list[set[int]]:
        """For each block, the blocks that every path to it passes."""
        everything = set(range(len(self.blocks)))
        found = [{0}] + [everything] * (len(self.blocks) - 1)
        changed = True
        while changed:
            changed = False
            for block in range(1, len(self.blocks)):
                before = [found[other] for other in self.before[block]]
                new = {block} | (set.intersection(*before) if before else set())
                changed = changed or new != found[block]
                found[block] = new
        return found

    def _loops(self) -> dict[int, set[int]]:
        """The blocks of each loop, by the block at which it begins."""
        dominators, found = self._dominators(), dict[int, set[int]]()
        for end, following in enumerate(self.after):
            for header in following:
                if header in dominators[end]:
                    body, left = found.setdefault(header, {header}), [end]
                    while left:
                        block = left.pop()
                        if block not in body:
                            body.add(block)
                            left.extend(self.before[block])
        return found

    def innermost(self, what: Callable[[Instruction], bool]) -> Iterator[tuple[int, set[int]]]:
        """Loops that contain an instruction of kind `what`, but have no inner loop that does."""
        holding = {
            header: body
            for header, body in self.loops.items()
            if any(what(i) for block in body for i in self.blocks[block])
        }
        for header, body in holding.items():
            if not any(other in body and other != header for other in holding):
                yield header, body

    def pass_through(
        self, header: int, body: set[int], kept: Callable[[Instruction], bool]
    ) -> Loop:
        inside = set()  # Blocks of inner loops. Such a loop repeats a failed wait.
        for other, blocks in self.loops.items():
            if other in body and other != header:
                inside |= blocks
        value = {
            block: (
                0 if block in inside else sum(map(kept, self.blocks[block])),
                -len(self.blocks[block]),
            )
            for block in body
        }
        best = {header: (value[header], [header])}
        for block in self._order(header, body):
            if block not in best:
                continue
            (kept_so_far, length), path = best[block]
            for other in self.after[block]:
                if other in body and other not in path:
                    new = kept_so_far + value[other][0], length + value[other][1]
                    if other not in best or new > best[other][0]:
                        best[other] = new, [*path, other]
        ends = [best[block] for block in best if header in self.after[block]]
        _, path = max(ends, key=lambda end: end[0])
        ran = [i for block in path for i in self.blocks[block]]
        return Loop(
            len(ran),
            sum(i.is_one_of("BAR") for i in ran),
            sum(i.is_one_of("SYNCS") for i in ran),
            sum(i.is_product for i in ran),
            sum(i.is_copy for i in ran),
            sum(i.flops for i in ran),
        )

    def _order(self, header: int, body: set[int]) -> list[int]:
        """The blocks of a loop in topological order, without back edges."""
        order: list[int] = []
        seen = {header}
        stack = [(header, iter(self.after[header]))]
        while stack:
            block, following = stack[-1]
            for other in following:
                if other in body and other not in seen:
                    seen.add(other)
                    stack.append((other, iter(self.after[other])))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]
