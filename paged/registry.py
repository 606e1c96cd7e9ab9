"""The requests that an engine has accepted, until their last outputs are delivered."""

import itertools
import weakref
from collections import deque
from collections.abc import MutableSequence

from paged.clock import VirtualClock, WallClock
from paged.event_log import finish_event
from paged.metrics import Metrics, request_record
from paged.outputs import request_output
from paged.requests.output_stream import OutputStream
from paged.requests.sequence import RequestOutput, SequenceGroup, Status
from paged.scheduling.slots import Slots


class Requests:
    """The accepted requests, and their outputs.

    unfinished: requests without their last output, by id.
    outputs: outputs that the next call of `step` returns.
    streams: requests of `stream` by id, until their last output is fetched, each with a weak
        reference to its iterator. The reference has no callback, because an interrupt in a callback
        would be lost.
    dropped: requests to abort before the next call, because no caller waits for their outputs.

    A request of `generate` or `stream` has a mailbox of its own, which its caller keeps.
    """

    def __init__(self, metrics: Metrics, clock: WallClock | VirtualClock, tokenizer):
        self.unfinished: dict[str, SequenceGroup] = {}
        self.outputs: list[RequestOutput] = []
        self.dropped: deque[SequenceGroup] = deque()
        self.streams: dict[str, tuple[weakref.ref[OutputStream], SequenceGroup]] = {}
        self._numbers = itertools.count()
        self._metrics, self._clock, self._tokenizer = metrics, clock, tokenizer

    def in_use(self, request_id: str) -> bool:
        """Whether a request of that id is unfinished, or has outputs not fetched yet."""
        if request_id in self.unfinished or request_id in self.streams:
            return True
        return any(output.request_id == request_id for output in self.outputs)

    def new_id(self) -> str:
        """An id that is not in use, and that this method has never returned."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if not self.in_use(name))

    def add(self, group: SequenceGroup) -> None:
        self.unfinished[group.request_id] = group

    def open(self, stream: OutputStream, group: SequenceGroup) -> None:
        """Register a stream before its request is queued, so that `drop_streams` aborts the request
        if the stream never reaches the caller."""
        stream.group = group
        self.streams[group.request_id] = weakref.ref(stream), group

    def fetch(self, stream: OutputStream) -> RequestOutput:
        """Remove and return the next output of a stream, which must have one."""
        output = stream.mailbox[0]
        if output.finished:
            self.streams.pop(output.request_id, None)
        del stream.mailbox[0]
        return output

    def drop_streams(self) -> None:
        """Drop the requests whose stream has been garbage-collected."""
        for stream, group in list(self.streams.values()):
            if stream() is None:
                self.dropped.append(group)

    def forget(self, group: SequenceGroup) -> None:
        """Delete the outputs of an ended request, for which no caller waits."""
        if group.mailbox is not None:
            group.mailbox.clear()
        if group.request_id in self.streams and self.streams[group.request_id][1] is group:
            del self.streams[group.request_id]

    def _box(self, group: SequenceGroup) -> MutableSequence[RequestOutput]:
        return self.outputs if group.mailbox is None else group.mailbox

    def deliver(self, group: SequenceGroup) -> None:
        """Deliver the output so far of an unfinished request."""
        self._box(group).append(request_output(group, self._tokenizer))

    def take(self) -> list[RequestOutput]:
        """Remove and return the outputs for `step`."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def forget_streamed(self, request_id: str) -> None:
        """Delete streamed outputs not fetched yet. The last output contains their tokens."""
        self.outputs = [kept for kept in self.outputs if kept.request_id != request_id]

    def retire(self, group: SequenceGroup, with_text: bool = True) -> None:
        """Deliver the last output of a request whose sequences have ended, record the end, and
        forget the request. A failure or an interruption leaves all of this done, or nothing."""
        output = request_output(group, self._tokenizer if with_text else None)
        record = request_record(group, output, self._clock.now())
        event, box, metrics = finish_event(record), self._box(group), self._metrics
        # No call, so no interruption, from here on: see `paged.engine`.
        box += (output,)
        metrics.requests += (record,)
        metrics.events += (event,)
        del self.unfinished[group.request_id]

    def fail(self, group: SequenceGroup, slots: Slots) -> None:
        """End a request in any state, after a failure, with the tokens so far. Sequences that had
        not ended get the reason 'error'."""
        for sequence in group.sequences:
            if (slot := sequence.slot) >= 0:
                sequence.tokens, sequence.slot = slots.known_tokens(slot), -1
            sequence.status = Status.FINISHED
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
        try:
            self.retire(group)
        except Exception:  # the tokenizer's error, which may be the cause of the failure
            self.retire(group, with_text=False)

    def final_output(self, group: SequenceGroup) -> RequestOutput | None:
        """The last output of a request; None if it is not delivered yet, or already fetched."""
        ours = (out for out in self._box(group) if out.request_id == group.request_id)
        return next((out for out in ours if out.finished), None)
