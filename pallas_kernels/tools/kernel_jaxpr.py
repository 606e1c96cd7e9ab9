"""A kernel's thread blocks, and its work for one tile, from its jaxpr."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pallas_kernels.mosaic import is_barrier, is_shared_memory, sub_jaxprs, viewed

LOOPS = {"while", "scan"}
WARPGROUP = 128  # threads
_ROWS, _COLUMNS = 64, 256  # the largest product of one wgmma


@dataclass(frozen=True)
class Launch:
    """A kernel's thread blocks, and their work for one tile. This work is one pass through each of
    two loops: the innermost copying loop that copies most, and the loop that multiplies most.

    grid: thread blocks along each axis.
    warpgroups: warpgroups of a thread block. With two or three warpgroups, one only copies. Four
        warpgroups form two `lanes`. In each lane, one warpgroup copies tiles and the other
        multiplies them.
    in_flight: bytes of all buffers in shared memory that the copies of a pass fill. This is the
        most that can be in flight at a time.
    copied: bytes that all warpgroups copy from global to shared memory.
    flops: FLOPs of one warpgroup.
    operands: bytes of shared memory that one warpgroup reads, mostly as operands of wgmma.
    stored: bytes that one warpgroup writes to shared memory.
    """

    name: str
    grid: tuple[int, ...]
    warpgroups: int
    in_flight: int
    copied: int
    flops: int
    operands: int
    stored: int

    @property
    def threads(self) -> int:
        return WARPGROUP * self.warpgroups

    @property
    def multiplying(self) -> int:
        """The number of warpgroups that multiply a tile."""
        return max(1, self.warpgroups // self.lanes - 1)

    @property
    def tile_flops(self) -> int:
        return self.multiplying * self.flops

    @property
    def through_shared(self) -> int:
        """Bytes that all warpgroups move through shared memory."""
        return self.copied + self.multiplying * (self.operands + self.stored)

    @property
    def lanes(self) -> int:
        return 2 if self.warpgroups == 4 else 1


def launches(jaxpr) -> list[Launch]:
    """The Mosaic kernels that a traced function calls, in order."""
    found = []
    for eqn in calls(jaxpr):
        (mesh,), (body,) = eqn.params["meshes"], sub_jaxprs(eqn)
        passes: list[_Pass] = []
        _collect(body, {}, passes, _Pass())
        empty = _Pass()
        inner = (one for one in passes if not any(other.copied for other in one.loops))
        copying = max(inner, key=lambda one: one.copied, default=empty)
        multiplying = max(passes, key=lambda one: one.flops, default=empty)
        found.append(
            Launch(
                name=eqn.params["name"],
                grid=tuple(mesh.grid),
                warpgroups=mesh.num_threads or 1,
                in_flight=sum(copying.filled.values()),
                copied=copying.copied,
                flops=multiplying.flops,
                operands=multiplying.operands,
                stored=multiplying.stored,
            )
        )
    return found


def calls(jaxpr) -> Iterator:
    """The equations of a traced function that call Mosaic kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn
        else:
            for sub in sub_jaxprs(eqn):
                yield from calls(sub)


@dataclass
class _Pass:
    """One pass through a loop, without its inner `loops`.

    filled: buffer -> bytes.
    """

    loops: list["_Pass"] = field(default_factory=list)
    filled: dict[int, int] = field(default_factory=dict)
    copied: int = 0
    flops: int = 0
    operands: int = 0
    stored: int = 0


def _collect(jaxpr, roots, passes: list[_Pass], here: _Pass, conditional: bool = False) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "copy_gmem_to_smem":
            here.copied += _bytes(viewed(eqn, 1))
            here.filled[roots[eqn.invars[1]]] = _bytes(eqn.invars[1].aval)
        elif name == "wgmma_ref":
            acc, a, b = (viewed(eqn, i) for i in range(3))
            (M, N), K = acc.shape, a.shape[1]
            here.flops += 2 * M * N * K
            # Every wgmma reads all of its operands.
            here.operands += math.ceil(M / _ROWS) * _bytes(b)
            if is_shared_memory(eqn.invars[1].aval):
                here.operands += math.ceil(N / _COLUMNS) * _bytes(a)
        elif name == "mma":
            _, a, b = (x.aval for x in eqn.invars)
            here.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        # Loads and stores under a condition are excluded, because they run only for some tiles.
        elif name in ("get", "load") and is_shared_memory(eqn.invars[0].aval):
            here.operands += 0 if conditional else _bytes(eqn.outvars[0].aval)
        elif name == "swap" and is_shared_memory(eqn.invars[0].aval):
            here.stored += 0 if conditional else _bytes(eqn.invars[1].aval)
        for sub in bodies(eqn):
            inside = here
            if name in LOOPS:
                inside = _Pass()
                passes.append(inside)
                here.loops.append(inside)
            guarded = name not in LOOPS and (conditional or name == "cond")
            _collect(sub, inner_roots(eqn, sub, roots), passes, inside, guarded)


def _bytes(aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def bodies(eqn) -> list:
    """The sub-jaxprs of an equation, without a loop's condition, which cannot access memory."""
    return [eqn.params["body_jaxpr"]] if eqn.primitive.name == "while" else sub_jaxprs(eqn)


def inner_roots(eqn, sub, roots) -> dict:
    """For each reference of a sub-jaxpr, the identity of its buffer or barrier."""
    skipped = {"cond": 1, "while": eqn.params.get("cond_nconsts", 0)}
    operands = eqn.invars[skipped.get(eqn.primitive.name, 0) :]
    inner = {v: roots[o] for v, o in zip(_inputs(sub), operands) if known(o, roots)}
    for v in _inputs(sub):
        if (is_shared_memory(v.aval) or is_barrier(v.aval)) and v not in inner:
            inner[v] = id(v)
    return inner


def known(v, roots) -> bool:
    return not hasattr(v, "val") and v in roots


def _inputs(jaxpr) -> list:
    return [*jaxpr.constvars, *jaxpr.invars]
