"""A check of a kernel's jaxpr: does the kernel wait for the data that it reads?

The interpreter does not detect every missing wait. A product may read shared memory before the
kernel has waited for the copy into the memory, or before threads' stores to the memory are
committed. The interpreter still computes the right numbers and reports no race. So this check
follows each thread of a kernel in program order and requires that

- a thread waits for a copy, at the copy's barrier, before it accesses the shared memory that the
  copy fills, and again after the thread has handed that memory back;
- a thread that only fills memory waits at a barrier of the readers before it fills the memory
  again;
- shared memory that was written from registers is committed before a wgmma or a TMA copy reads it,
  and before the thread arrives at a barrier;
- a product has ended before the memory that it reads is written or handed back;
- a copy to global memory has ended before the memory that it reads is written;
- the kernel waits for its copies to global memory before it ends;
- each barrier at which a thread waits has an arrival.

The check distinguishes buffers and barriers, but not their slots, and does not count waits at a
barrier. If a reader hands memory back too early, the check reports this only if the same reader
reads the memory once more. In all other cases the interpreter reports a race, or hangs.

Loops of several threads belong together if they are nested equally deep: a loop over items, and
inside it a loop over the items' tiles. If a loop fills a buffer, every loop that reads the buffer
and is nested equally or less deep must wait in each iteration. If the branches of a condition
differ, a copy or a write in one branch is assumed to happen. A wait or a commit is assumed to
happen only if all branches have it. There is one exception: a thread that fills memory may skip its
wait, as for the first tiles.

Copies before Hopper (cp.async) have no barriers. A thread waits until only its latest copies are in
flight. Their number depends on the tile. So the check treats each such wait as a wait for the
buffer that is read next, and a wait for all copies as a wait for all buffers.
"""

from dataclasses import dataclass, field, replace

from pallas_kernels.mosaic import is_shared_memory, products_left, reduces_rows, sub_jaxprs
from pallas_kernels.tools.kernel_jaxpr import LOOPS, bodies, calls, inner_roots, known

_READS = {"get", "load", "wgmma_ref", "copy_smem_to_gmem"}
_ASYNCHRONOUS_READS = {"wgmma_ref", "copy_smem_to_gmem"}
_WRITES = {"swap", "store", "addupdate"}
_CP_ASYNC = 0  # represents the barrier of copies without a barrier


@dataclass
class _State:
    """Unfinished operations at a point of a thread's program.

    unawaited: the buffers that copies fill -> the barriers of these copies.
    uncommitted: the buffers that were written from registers.
    storing: whether copies to global memory may be in flight.
    stored: the buffers that copies to global memory may still read.
    multiplying: the buffers of each running product, the oldest product first.
    vouched: the buffers of cp.async that the latest wait may cover. The wait covers only the buffer
        that is read first.
    """

    unawaited: dict[int, frozenset[int]] = field(default_factory=dict)
    uncommitted: frozenset[int] = frozenset()
    storing: bool = False
    stored: frozenset[int] = frozenset()
    multiplying: tuple[frozenset[int], ...] = ()
    vouched: frozenset[int] = frozenset()

    def copy(self) -> "_State":
        return replace(self, unawaited=dict(self.unawaited))

    def join(self, other: "_State") -> "_State":
        barriers = {
            buffer: self.unawaited.get(buffer, frozenset())
            | other.unawaited.get(buffer, frozenset())
            for buffer in self.unawaited | other.unawaited
        }
        return _State(
            barriers,
            self.uncommitted | other.uncommitted,
            self.storing or other.storing,
            self.stored | other.stored,
            max(self.multiplying, other.multiplying, key=len),
            self.vouched & other.vouched,
        )

    @property
    def multiplied(self) -> frozenset[int]:
        return frozenset().union(*self.multiplying)

    def end_waits(self, barrier: int) -> None:
        left = {b: waits - {barrier} for b, waits in self.unawaited.items()}
        self.unawaited = {b: waits for b, waits in left.items() if waits}


def check(jaxpr) -> list[str]:
    """The missing waits of a traced function's Mosaic kernels, with one message each.

    jaxpr: the result of `jax.make_jaxpr`.

    Raises ValueError if the function calls no kernel.
    """
    kernels = [body for call in calls(jaxpr) for body in sub_jaxprs(call)]
    if not kernels:
        raise ValueError("the function calls no Mosaic kernel")
    return [complaint for kernel in kernels for complaint in _Checker(kernel).complaints]


class _Checker:
    """The check of one kernel.

    _handed_back: barrier -> the buffers that an arrival at it hands back to the filling thread.
    """

    def __init__(self, jaxpr):
        self.complaints: list[str] = []
        self._filled: dict[int, frozenset[int]] = {}
        self._fill_depth: dict[int, int] = {}
        self._arrived: set[int] = set()
        self._handed_back: dict[int, set[int]] = {}
        self._collect(jaxpr, {}, 0)
        self._check_fills(jaxpr, {}, None, set(), None)
        # All buffers that copies fill begin as unawaited, because another thread may start copies.
        state = self._run(jaxpr, {}, _State(dict(self._filled)), 0)
        if state.storing:
            self.complaints.append("the kernel may end before its copies to global memory")

    def _collect(self, jaxpr, roots, depth: int) -> None:
        """Record the buffers that copies fill, the copies' loop depths, and all arrivals."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "copy_gmem_to_smem":
                buffer, barrier = _filled_by(eqn, roots)
                self._filled[buffer] = self._filled.get(buffer, frozenset()) | {barrier}
                self._fill_depth[buffer] = max(depth, self._fill_depth.get(buffer, 0))
                self._arrived.add(barrier)
            elif eqn.primitive.name == "barrier_arrive":
                self._arrived.add(roots[eqn.invars[0]])
            for sub in bodies(eqn):
                inner = inner_roots(eqn, sub, roots)
                self._collect(sub, inner, depth + (eqn.primitive.name in LOOPS))

    def _check_fills(self, jaxpr, roots, latest: int | None, read: set[int], loop) -> int | None:
        """Check that a loop waits before it fills a buffer that it does not read, and record the
        barrier of this wait in `_handed_back`.

        latest: the barrier of the last wait in this iteration, or None.
        read: the buffers that the iteration reads.
        loop: the loop, or None outside of all loops.

        Returns `latest` after the equations of `jaxpr`.
        """
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == "barrier_wait":
                latest = roots[eqn.invars[0]]
            elif name == "copy_gmem_to_smem" and loop is not None:
                buffer, _ = _filled_by(eqn, roots)
                if latest is not None and buffer not in read:
                    self._handed_back.setdefault(latest, set()).add(buffer)
                elif buffer not in read:
                    self._complain(eqn, "fills shared memory again before it was handed back")
            elif name in LOOPS:
                (body,) = bodies(eqn)
                inner = inner_roots(eqn, body, roots)
                self._check_fills(body, inner, None, _read(body, inner), eqn)
            else:
                ends = [
                    self._check_fills(sub, inner_roots(eqn, sub, roots), latest, read, loop)
                    for sub in bodies(eqn)
                ]
                latest = next((end for end in ends if end != latest), latest)
        return latest

    def _run(self, jaxpr, roots, state: _State, depth: int) -> _State:
        for eqn in jaxpr.eqns:
            name, subs = eqn.primitive.name, bodies(eqn)
            buffers = {roots[v] for v in eqn.invars if known(v, roots) and is_shared_memory(v.aval)}
            if name == "barrier_wait":
                barrier = roots[eqn.invars[0]]
                state.end_waits(barrier)
                if barrier not in self._arrived:
                    self._complain(eqn, "waits at a barrier at which no thread arrives")
            elif (newer := products_left(eqn)) is not None:
                state.multiplying = state.multiplying[max(0, len(state.multiplying) - newer) :]
            elif name == "wait_gmem_to_smem":
                state.vouched = frozenset(b for b, f in self._filled.items() if _CP_ASYNC in f)
                if eqn.params["n"] == 0:
                    state.end_waits(_CP_ASYNC)
            elif name == "commit_smem":
                state.uncommitted = frozenset()
            elif name == "barrier_arrive":
                if state.uncommitted:
                    self._complain(eqn, "hands over shared memory before it is committed")
                for buffer in self._handed_back.get(roots[eqn.invars[0]], ()):
                    if buffer in state.multiplied:
                        self._complain(eqn, "hands back shared memory that a product still reads")
                    state.unawaited[buffer] = self._filled[buffer]
            elif name == "copy_gmem_to_smem":
                buffer, barrier = _filled_by(eqn, roots)
                waits = state.unawaited.get(buffer, frozenset())
                state.unawaited[buffer] = waits | {barrier}
                if buffer in state.multiplied:
                    self._complain(eqn, "fills shared memory that a product still reads")
                state.vouched -= {buffer}
            elif name == "wait_smem_to_gmem":
                if eqn.params["n"] == 0:
                    state.stored = frozenset()
                    state.storing = state.storing and eqn.params["wait_read_only"]
            elif name in _READS | _WRITES:
                self._touch(eqn, name, buffers, state)
            elif name in LOOPS:
                (body,) = subs
                inner = inner_roots(eqn, body, roots)
                again = {b: f for b, f in self._filled.items() if self._fill_depth[b] > depth}
                # Two passes, because an iteration begins with the previous iteration's unfinished
                # operations.
                for _ in range(2):
                    start = state.join(_State(again))
                    state = state.join(self._run(body, inner, start, depth + 1))
            elif subs:
                ends = [self._run(s, inner_roots(eqn, s, roots), state.copy(), depth) for s in subs]
                state = ends[0]
                for end in ends[1:]:
                    state = state.join(end)
            elif reduces_rows(eqn):
                # A reduction waits before and after it runs, and nothing else reads its scratch.
                assert not buffers & set(self._filled), f"{eqn} reduces where a copy writes"
            else:
                assert not buffers, f"{name} touches shared memory, unknown to this check"
        return state

    def _touch(self, eqn, name: str, buffers: set[int], state: _State) -> None:
        for buffer in buffers & set(state.unawaited):
            if buffer in state.vouched:
                state.vouched = frozenset({buffer})
            else:
                self._complain(eqn, "touches shared memory before the copy into it is awaited")
        if name in _ASYNCHRONOUS_READS and buffers & state.uncommitted:
            self._complain(eqn, "reads shared memory before what was written is committed")
        if name == "wgmma_ref":
            state.multiplying += (frozenset(buffers),)
        if name in _WRITES:
            state.uncommitted |= buffers
            if buffers & state.multiplied:
                self._complain(eqn, "writes to shared memory that a product still reads")
            if buffers & state.stored:
                self._complain(eqn, "writes to shared memory that a copy still reads")
        if name == "copy_smem_to_gmem":
            state.storing = True
            state.stored |= buffers

    def _complain(self, eqn, what: str) -> None:
        complaint = f"{eqn.primitive.name} {what}: {eqn}"
        if complaint not in self.complaints:
            self.complaints.append(complaint)


def _filled_by(eqn, roots) -> tuple[int, int]:
    """The buffer that a copy fills, and the barrier at which the copy arrives."""
    barrier = roots[eqn.invars[2]] if eqn.params["has_barrier"] else _CP_ASYNC
    return roots[eqn.invars[1]], barrier


def _read(jaxpr, roots) -> set[int]:
    """The buffers that are read anywhere in a jaxpr."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _READS:
            found |= {roots[v] for v in eqn.invars if known(v, roots) and is_shared_memory(v.aval)}
        for sub in bodies(eqn):
            found |= _read(sub, inner_roots(eqn, sub, roots))
    return found
