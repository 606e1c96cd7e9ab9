"""A runner: one engine, driven by one thread, behind an inbox (Punica §6)."""

import contextlib
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from paged.cluster.messages import ClusterRequest, Event, Figures, Grown, Growth, Progress, Status
from paged.decode_runs import Ahead
from paged.engine import Engine
from paged.requests.sequence import RequestOutput, Sequence, SequenceGroup, SequenceOutput
from paged.stats import Tally

MakeEngine = Callable[[], Engine]  # The engine must be warm.
FIGURES_S = 0.25  # least seconds between two `Figures`; the live page polls more rarely


class Runner(Protocol):
    """The cluster's interface to a local or remote runner; both calls return at once.

    A move is `cancel` on the source and `add` on the target, with a new attempt.
    """

    def add(self, request: ClusterRequest, attempt: int) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None:
        """Free the attempt's memory; tokens of its last step are dropped. No effect if the attempt
        has ended."""
        ...


@dataclass(slots=True)
class _Attempt:
    """An attempt at a request.

    sent: number of output tokens that the cluster knows, by sequence.
    ended: whether the end has been reported, by sequence.
    grows: whether every token is reported; otherwise only the first tokens and the end.
    plain: the only sequence of a request that reports every token and nothing else; None for other
        requests.
    """

    request: ClusterRequest
    number: int
    group: SequenceGroup
    sent: list[int]
    ended: list[bool]
    grows: bool
    plain: Sequence | None


class EngineRunner:
    """Runs an engine. Other threads may call `add`, `cancel`, `call` and `close`, which take effect
    between two steps.

    keep_records: whether the engine keeps its records; otherwise `tally` sums them up.
    tells_status: whether each step's events end with a `Status`, which a cluster needs. A `Status`
        takes time, because all waiting requests are counted. With tells_status most tokens of a
        step are in one `Grown`, without it in one `Progress` for each request.
    tells_figures: whether events also have `Figures`; only with tells_status and without
        keep_records.
    """

    def __init__(
        self, engine: Engine, keep_records: bool = False, tells_status: bool = True,
        tells_figures: bool = True,
    ):  # fmt: skip
        self.engine, self._keep_records = engine, keep_records
        self._tells_status = tells_status
        self._tells_figures = tells_figures and tells_status and not keep_records
        self.tally = Tally(engine)
        self._kv_tokens = engine.host_policy.free_tokens()
        self._next_figures_s = 0.0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: list[Event] = []  # events that `step` has not returned yet
        self._attempts: dict[str, _Attempt] = {}
        self._working_set: frozenset[tuple[str, int]] | None = None  # None: attempts have changed
        self._closed = False

    def add(self, request: ClusterRequest, attempt: int, grows: bool = True) -> None:
        """grows: whether every token is reported; otherwise only the first tokens and the end."""
        self._inbox.put(lambda: self._add(request, attempt, grows))

    def cancel(self, request_id: str, attempt: int) -> None:
        self._inbox.put(lambda: self._cancel(request_id, attempt))

    def call(self, what: Callable[[], None]) -> None:
        """Call `what` between two steps, in the thread of `run`."""
        self._inbox.put(what)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Stop reporting requests that the engine has lost in a failure."""
        for request_id in request_ids:
            self._attempts.pop(request_id, None)
        self._working_set = None

    def close(self) -> None:
        """End `run`."""
        self._inbox.put(None)

    def run(self, heartbeat_s: float) -> Iterator[list[Event]]:
        """Serve until `close`. Yields the new events after each step; an idle runner yields every
        `heartbeat_s` seconds."""
        while not self._closed:
            if not self.has_work:
                with contextlib.suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=heartbeat_s))
            yield self.step()

    @property
    def has_work(self) -> bool:
        return self.engine.has_unfinished() or not self._inbox.empty()

    def step(self, logged: bool = True) -> list[Event]:
        """Empty the inbox, and run a step if there is work. Returns the new events; the status, if
        any, is the last.

        logged: whether the event log must have the step. Other steps may be simulated faster.
        """
        while not self._inbox.empty():
            self._take(self._inbox.get())
        if not self.engine.has_unfinished():
            return self._told([])
        return self._told(self.engine.step() if logged else self.engine.run_until(math.inf, 1))

    def ahead(self) -> Ahead | None:
        """The next steps that only decode, provided that the inbox stays empty. None if the inbox
        is not empty, or if the engine cannot predict its steps."""
        return self.engine.loop.decodes_ahead() if self._inbox.empty() else None

    def take(self, until_s: float) -> list[Event]:
        """Run all steps of `ahead` whose engine calls begin before `until_s`, without reading the
        inbox. Returns the new events."""
        clock = self.engine.executor.clock
        while clock.now() < until_s:
            ended = self.engine.run_until(until_s)
            assert not ended, "rows that only decode do not end"
        return self._told([])

    @property
    def is_asked(self) -> bool:
        """Whether something is in the inbox."""
        return not self._inbox.empty()

    def _told(self, outputs: Iterable[RequestOutput]) -> list[Event]:
        """The new events after a step that returned `outputs`."""
        ended = {output.request_id: output for output in outputs}
        slots = self.engine.scheduler.slots
        known, newest = slots.known.tolist(), slots.newest().tolist()
        grown: list[tuple[str, int, int, list[int]]] = []
        for request_id, attempt in list(self._attempts.items()):
            plain = attempt.plain
            if plain is not None and (slot := plain.slot) >= 0 and request_id not in ended:
                # A fast path for by far the most frequent case: one more token of a request.
                start = attempt.sent[0]
                count = known[slot] - plain.group.num_prompt_tokens
                if count > start:
                    tokens = [newest[slot]] if count == start + 1 else self._tokens(plain, start)
                    attempt.sent[0] = count
                    grown.append((request_id, attempt.number, start, tokens))
                continue
            output = ended.get(request_id)
            told_enough = not attempt.grows and any(attempt.sent)
            if output is None and (told_enough or attempt.group.first_token_s is None):
                continue
            growth = tuple(self._growth(attempt))
            if growth or output is not None:
                self._events.append(Progress(request_id, attempt.number, growth, output))
            if output is not None:
                del self._attempts[request_id]
                self._working_set = None
        if self._tells_status and grown:
            self._events.append(Grown(grown))
        elif grown:
            self._events += [_progress(*each) for each in grown]
        if not self._keep_records:
            self.tally.count()
        events, self._events = self._events, []
        return [*events, *self._figures(), self._status()] if self._tells_status else events

    def _take(self, call: Callable[[], None] | None) -> None:
        if call is None:
            self._closed = True
        else:
            call()

    def _add(self, request: ClusterRequest, attempt: int, grows: bool) -> None:
        engine, adapter = self.engine, request.adapter
        try:
            # Since this request was placed, the name may have been given to another adapter.
            if adapter is not None and not engine.adapters.means(adapter):
                engine.add_known_adapter(adapter)
            engine.add_request(
                request.prompt, request.sampling, request.request_id,
                cache_salt=request.cache_salt, adapter=None if adapter is None else adapter.name,
                known_output=request.known or None,
            )  # fmt: skip
        except ValueError as error:
            refusal = Progress(request.request_id, attempt, refused=str(error))
            self._events.append(refusal)
            return
        group = engine.requests.unfinished[request.request_id]
        sent = [len(self._tokens(sequence)) for sequence in group.sequences]
        ended = [sequence.finish_reason is not None for sequence in group.sequences]
        how = group.sampling
        tells_more = how.is_beam_search or how.ranks or how.logprobs is not None
        is_plain = grows and not tells_more and len(group.sequences) == 1
        plain = group.sequences[0] if is_plain else None
        self._attempts[request.request_id] = _Attempt(
            request, attempt, group, sent, ended, grows, plain
        )
        self._working_set = None

    def _cancel(self, request_id: str, attempt: int) -> None:
        running = self._attempts.get(request_id)
        if running is not None and running.number == attempt:
            del self._attempts[request_id]
            self._working_set = None
            if request_id in self.engine.requests.unfinished:  # a failure may have ended it
                self.engine.abort(request_id)

    def _known(self, sequence: Sequence) -> int:
        slots = self.engine.scheduler.slots
        known = slots.known[sequence.slot] if sequence.slot >= 0 else len(sequence.tokens)
        return int(known) - sequence.num_prompt_tokens

    def _tokens(self, sequence: Sequence, start: int = 0) -> list[int]:
        """The sequence's output tokens from `start` on."""
        slots, first = self.engine.scheduler.slots, sequence.num_prompt_tokens + start
        if sequence.slot < 0:
            return sequence.tokens[first:].tolist()
        return slots.tokens[sequence.slot, first : slots.known[sequence.slot]].tolist()

    def _growth(self, attempt: _Attempt) -> Iterator[Growth]:
        group = attempt.group
        if group.search is not None:  # Only the end is reported, because beams replace each other.
            return
        for i, sequence in enumerate(group.sequences):
            start, count = attempt.sent[i], self._known(sequence)
            if count == start and (sequence.finish_reason is None or attempt.ended[i]):
                continue
            attempt.sent[i], attempt.ended[i] = count, sequence.finish_reason is not None
            asked = group.sampling.logprobs is not None
            output = SequenceOutput(
                tokens=self._tokens(sequence, start),
                text="",
                finish_reason=sequence.finish_reason,
                logprobs=sequence.logprobs[start:] if asked else None,
                score=sequence.cumulative_logprob if group.sampling.ranks else None,
            )
            yield Growth(i, start, output)

    def _figures(self) -> Iterator[Figures]:
        """Yields `Figures` if tells_figures, at most once every FIGURES_S seconds."""
        if self._tells_figures and (now := time.monotonic()) >= self._next_figures_s:
            self._next_figures_s = now + FIGURES_S
            yield Figures(self.tally.stats(), replace(self.tally.totals))

    def _status(self) -> Status:
        engine, page_size = self.engine, self.engine.config.page_size
        waiting, attempts = engine.scheduler.waiting, self._attempts.values()
        free = engine.host_policy.free_tokens()
        for group in waiting:
            width = 1 if group.search is None else group.sampling.beam_width
            pages = sum(len(s.tokens) // page_size + 1 for s in group.unfinished)
            free -= width * pages * page_size
        newest, store = None, engine.loop.adapter_store
        # A request that waits for its adapter does not wait for memory.
        admits = engine.scheduler.gate.admits
        starved = any(group.num_preemptions and admits(group) for group in waiting)
        if starved and len(attempts) > 1:
            newest = max(attempts, key=lambda attempt: attempt.request.order).request.request_id
        if self._working_set is None:
            pairs = ((name, attempt.number) for name, attempt in self._attempts.items())
            self._working_set = frozenset(pairs)
        return Status(
            working_set=self._working_set,
            free_tokens=free,
            kv_tokens=self._kv_tokens,
            newest=newest,
            resident_adapters=frozenset(store.ready if store else ()),
            adapter_loads=store.num_loads if store else 0,
        )


def _progress(request_id: str, attempt: int, start: int, tokens: list[int]) -> Progress:
    """The `Progress` that equals an entry of `Grown`."""
    return Progress(request_id, attempt, (Growth(0, start, SequenceOutput(tokens, "", None)),))
