"""The requests that an engine has accepted, until their last outputs are handed over."""

import itertools
from collections import deque
from weakref import WeakValueDictionary

from paged.requests.sequence import RequestOutput, SequenceGroup


class Requests:
    """unfinished: by id. outputs: for whoever calls `step` next. dropped: requests for whose
    outputs nobody waits, to be aborted at the next occasion; other threads may append to it.

    A request of `generate` or `stream` has a mailbox of its own, which its caller keeps.
    """

    def __init__(self) -> None:
        self.unfinished: dict[str, SequenceGroup] = {}
        self.outputs: list[RequestOutput] = []
        self.dropped: deque[SequenceGroup] = deque()
        self._mailboxes: WeakValueDictionary[str, deque[RequestOutput]] = WeakValueDictionary()
        self._numbers = itertools.count()

    def in_use(self, request_id: str) -> bool:
        """Whether a request of that id is unfinished, or has outputs that nobody has fetched."""
        if request_id in self.unfinished or self._mailboxes.get(request_id):
            return True
        return any(output.request_id == request_id for output in self.outputs)

    def new_id(self) -> str:
        """One that no request has had from here, and none has now."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if not self.in_use(name))

    def add(self, group: SequenceGroup) -> None:
        # Nobody fetches the output of a pinned prefix, so it must not keep its id in use.
        if group.mailbox is not None and not group.pin:
            self._mailboxes[group.request_id] = group.mailbox
        self.unfinished[group.request_id] = group

    def _box(self, group: SequenceGroup) -> list[RequestOutput] | deque[RequestOutput]:
        return self.outputs if group.mailbox is None else group.mailbox

    def deliver(self, group: SequenceGroup, output: RequestOutput) -> None:
        self._box(group).append(output)

    def final_output(self, group: SequenceGroup) -> RequestOutput | None:
        """The last output of a request, once it is delivered and as long as nobody fetched it."""
        ours = (out for out in self._box(group) if out.request_id == group.request_id)
        return next((out for out in ours if out.finished), None)
