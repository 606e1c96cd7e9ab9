"""The requests that an engine has accepted and whose last outputs have not been fetched."""

import itertools
from collections import deque
from weakref import WeakValueDictionary

from paged.requests.sequence import RequestOutput, SequenceGroup


class Requests:
    """Requests and their outputs.

    unfinished: the requests that have not finished, by id.
    outputs: the outputs that the next call of `step` returns.
    dropped: requests whose outputs nobody waits for. The engine aborts them at the next
        opportunity. Other threads may append to it.

    A request of `generate` or `stream` has its own mailbox, which its caller keeps.
    """

    def __init__(self) -> None:
        self.unfinished: dict[str, SequenceGroup] = {}
        self.outputs: list[RequestOutput] = []
        self.dropped: deque[SequenceGroup] = deque()
        self._mailboxes: WeakValueDictionary[str, deque[RequestOutput]] = WeakValueDictionary()
        self._numbers = itertools.count()

    def in_use(self, request_id: str) -> bool:
        """Whether a request with this id is unfinished, or has outputs that nobody has fetched."""
        if request_id in self.unfinished or self._mailboxes.get(request_id):
            return True
        return any(output.request_id == request_id for output in self.outputs)

    def new_id(self) -> str:
        """An id that this function has not given before and that is not in use."""
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
        """The last output of a request, if it has been delivered and nobody has fetched it."""
        ours = (out for out in self._box(group) if out.request_id == group.request_id)
        return next((out for out in ours if out.finished), None)
