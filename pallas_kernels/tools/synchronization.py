"""A check of a kernel's jaxpr: does the kernel wait for what it reads?

The interpreter cannot tell. If a product reads shared memory before the kernel has waited for the
copy that fills it, or before it has committed what threads wrote there, the interpreter still gives
the right numbers and finds no race. So this check follows each thread of a kernel in program order
and demands that

- the thread waits on a TMA copy's barrier before it touches the shared memory that the copy fills,
- shared memory that was written from registers is committed before a wgmma or a TMA copy reads it,
  and before the thread tells another thread that it is ready,
- the kernel waits for its copies to global memory before it ends.

The check knows buffers and barriers, but not their slots. It does not check whether a reader has
finished when it hands memory back to the writer. The interpreter finds both as races.

If a loop fills a buffer, every loop that reads it must wait in each iteration. Where the branches
of a condition differ, a copy or a write in one branch counts, and a wait or a commit counts only if
it is in all branches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pallas_kernels.mosaic import is_barrier, is_shared_memory, sub_jaxprs

_READS = {"get", "load", "wgmma_ref", "copy_smem_to_gmem"}
_ASYNCHRONOUS_READS = {"wgmma_ref", "copy_smem_to_gmem"}
_WRITES = {"swap", "store", "addupdate"}
_LOOPS = {"while", "scan"}


@dataclass
class _State:
    """What is unfinished at some point of a thread's program.

    unawaited: buffers that copies fill, with the barriers of these copies.
    uncommitted: buffers that were written from registers.
    storing: whether copies to global memory may be under way.
    """

    unawaited: dict[int, frozenset[int]] = field(default_factory=dict)
    uncommitted: frozenset[int] = frozenset()
    storing: bool = False

    def copy(self) -> "_State":
        return _State(dict(self.unawaited), self.uncommitted, self.storing)

    def join(self, other: "_State") -> "_State":
        barriers = {
            buffer: self.unawaited.get(buffer, frozenset())
            | other.unawaited.get(buffer, frozenset())
            for buffer in self.unawaited | other.unawaited
        }
        return _State(barriers, self.uncommitted | other.uncommitted, self.storing or other.storing)


def check(jaxpr) -> list[str]:
    """Where the Mosaic kernels of a traced function do not wait: one complaint each, or none.

    jaxpr: the result of `jax.make_jaxpr`. Raises ValueError if it calls no kernel.
    """
    kernels = list(_kernels(jaxpr))
    if not kernels:
        raise ValueError("the function calls no Mosaic kernel")
    return [complaint for kernel in kernels for complaint in _Checker(kernel).complaints]


def _kernels(jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        subs = sub_jaxprs(eqn)
        if eqn.primitive.name == "mpmd_map":
            yield from subs
        else:
            for sub in subs:
                yield from _kernels(sub)


class _Checker:
    def __init__(self, jaxpr):
        self.complaints: list[str] = []
        self._filled_in_loops: dict[int, frozenset[int]] = {}
        filled: dict[int, frozenset[int]] = {}
        self._collect(jaxpr, {}, False, filled)
        # All buffers that copies fill start as unawaited, because another thread may start copies.
        state = self._run(jaxpr, {}, _State(filled))
        if state.storing:
            self.complaints.append("the kernel may end before its copies to global memory")

    def _inner(self, eqn, sub, roots) -> dict:
        """For each reference of a sub-jaxpr, the identity of the buffer that was allocated."""
        skipped = {"cond": 1, "while": eqn.params.get("cond_nconsts", 0)}
        operands = eqn.invars[skipped.get(eqn.primitive.name, 0) :]
        inner = {v: roots[o] for v, o in zip(_inputs(sub), operands) if _known(o, roots)}
        for v in _inputs(sub):
            if (is_shared_memory(v.aval) or is_barrier(v.aval)) and v not in inner:
                inner[v] = id(v)
        return inner

    def _collect(self, jaxpr, roots, in_loop, filled) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "copy_gmem_to_smem":
                buffer, barrier = (roots[v] for v in eqn.invars[1:3])
                maps = [filled, self._filled_in_loops] if in_loop else [filled]
                for m in maps:
                    m[buffer] = m.get(buffer, frozenset()) | {barrier}
            loop = in_loop or eqn.primitive.name in _LOOPS
            for sub in _bodies(eqn):
                self._collect(sub, self._inner(eqn, sub, roots), loop, filled)

    def _run(self, jaxpr, roots, state: _State) -> _State:
        for eqn in jaxpr.eqns:
            name, subs = eqn.primitive.name, _bodies(eqn)
            buffers = {
                roots[v] for v in eqn.invars if _known(v, roots) and is_shared_memory(v.aval)
            }
            if name == "barrier_wait":
                barrier = roots[eqn.invars[0]]
                left = {b: waits - {barrier} for b, waits in state.unawaited.items()}
                state.unawaited = {b: waits for b, waits in left.items() if waits}
            elif name == "commit_smem":
                state.uncommitted = frozenset()
            elif name == "barrier_arrive":
                if state.uncommitted:
                    self._complain(eqn, "hands over shared memory before it is committed")
            elif name == "copy_gmem_to_smem":
                buffer, barrier = (roots[v] for v in eqn.invars[1:3])
                waits = state.unawaited.get(buffer, frozenset())
                state.unawaited[buffer] = waits | {barrier}
            elif name == "wait_smem_to_gmem":
                state.storing = state.storing and eqn.params["n"] > 0
            elif name in _READS | _WRITES:
                if buffers & set(state.unawaited):
                    self._complain(eqn, "touches shared memory before the copy into it is awaited")
                if name in _ASYNCHRONOUS_READS and buffers & state.uncommitted:
                    self._complain(eqn, "reads shared memory before what was written is committed")
                if name in _WRITES:
                    state.uncommitted |= buffers
                state.storing = state.storing or name == "copy_smem_to_gmem"
            elif name in _LOOPS:
                (body,) = subs
                inner = self._inner(eqn, body, roots)
                # Two passes, because an iteration begins with what the one before left unfinished.
                for _ in range(2):
                    start = state.join(_State(self._filled_in_loops))
                    state = state.join(self._run(body, inner, start))
            elif subs:
                ends = [self._run(s, self._inner(eqn, s, roots), state.copy()) for s in subs]
                state = ends[0]
                for end in ends[1:]:
                    state = state.join(end)
            else:
                assert not buffers, f"{name} touches shared memory, unknown to this check"
        return state

    def _complain(self, eqn, what: str) -> None:
        complaint = f"{eqn.primitive.name} {what}: {eqn}"
        if complaint not in self.complaints:
            self.complaints.append(complaint)


def _bodies(eqn) -> list:
    """The sub-jaxprs of an equation that may touch memory, so without a loop's condition."""
    return [eqn.params["body_jaxpr"]] if eqn.primitive.name == "while" else sub_jaxprs(eqn)


def _inputs(jaxpr) -> list:
    return [*jaxpr.constvars, *jaxpr.invars]


def _known(v, roots) -> bool:
    return not hasattr(v, "val") and v in roots
