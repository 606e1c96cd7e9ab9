"""The engine's requests of one HTTP request: one for each prompt, from their start to their end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paged.cluster.messages import ClusterRequest, Growth
from paged.requests.sequence import RequestOutput
from paged.server.answers import FINISH, Delta
from paged.server.errors import ApiError
from paged.server.owner import Owner
from paged.server.reply import Reply
from paged.server.token_text import ChoiceText


class Left(Exception):
    """The client has gone: nobody waits for the answer."""


@dataclass
class _Choice:
    """How far a choice has been told. held: tokens that have no text yet, and come with the next
    that has some."""

    index: int
    text: ChoiceText
    num_tokens: int = 0
    held: list[int] = field(default_factory=list)
    begun: bool = False


_Choices = dict[tuple[int, int], _Choice]  # by prompt and sequence


@dataclass(eq=False)
class Generation:
    """Served from the first `deltas` or `outputs` on, until it is closed, which aborts what has not
    ended. streams: whether `deltas` will be asked for. timeout_s: of all of it."""

    owner: Owner
    requests: list[ClusterRequest]
    tokenizer: object
    streams: bool
    most_buffered: int
    timeout_s: float
    replies: list[Reply] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    _ended: ApiError | Left | None = None

    def start(self) -> None:
        self._ready = asyncio.Event()
        self.deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        for request in self.requests:
            reply = Reply(self.streams, self.most_buffered, self._ready)
            self.replies.append(reply)
            self.owner.submit(request, reply)

    def end(self, reason: ApiError | Left) -> None:
        """Have whoever waits raise this."""
        self._ended = self._ended or reason
        self._ready.set()

    def close(self) -> None:
        for request, reply in zip(self.requests, self.replies):
            if not reply.ended:
                self.owner.abort(request.request_id)

    async def _news(self) -> None:
        """Wait until something has come. Raises ApiError or Left where nothing more will."""
        try:
            async with asyncio.timeout_at(self.deadline_s):
                await self._ready.wait()
        except TimeoutError:
            message = f"the request has taken longer than {self.timeout_s:g} s"
            raise ApiError(504, message, code="timeout") from None
        self._ready.clear()
        if self._ended:
            raise self._ended
        if not self.owner.alive:
            raise ApiError(503, "the engine has ended")

    async def finish(self) -> list[RequestOutput]:
        """The outputs of all prompts. Raises ApiError if one has none."""
        while not all(reply.ended for reply in self.replies):
            await self._news()
        self.outputs = [_output(reply) for reply in self.replies]
        return self.outputs

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, whenever something is. Raises ApiError if one of the requests fails."""
        choices: _Choices = {}
        left = dict(enumerate(self.replies))
        while left:
            await self._news()
            new: list[Delta] = []
            for i, reply in list(left.items()):
                if reply.ended:
                    del left[i]
                    new += self._rest(i, _output(reply), choices)
                else:
                    grown = reply.take()
                    new += [d for growth in grown if (d := self._grown(i, growth, choices))]
            if new:
                yield new
        self.outputs = [_output(reply) for reply in self.replies]

    def _grown(self, i: int, growth: Growth, choices: _Choices) -> Delta | None:
        """None if nothing can be told yet."""
        # How much of its last tokens is text, the end tells.
        if growth.output.finish_reason is not None:
            return None
        choice = self._choice(i, growth.index, choices)
        known = choice.num_tokens + len(choice.held)
        assert growth.start == known, "a token is lost or repeated"
        tokens, logprobs = choice.held + growth.output.tokens, growth.output.logprobs
        text, first = choice.text.grow(growth.output.tokens), not choice.begun
        if not text and logprobs is None and not first:
            choice.held = tokens
            return None
        choice.num_tokens += len(tokens)
        choice.begun, choice.held = True, []
        return Delta(choice.index, text, tokens, logprobs, None, first)

    def _choice(self, i: int, at: int, choices: _Choices) -> _Choice:
        """Sequence `at` of prompt i."""
        if (i, at) not in choices:
            how = self.requests[i].sampling
            choices[i, at] = _Choice(i * how.n + at, ChoiceText(self.tokenizer, how))
        return choices[i, at]

    def _rest(self, i: int, output: RequestOutput, choices: _Choices) -> list[Delta]:
        deltas = []
        for at, sequence in enumerate(output.sequences):
            choice = self._choice(i, at, choices)
            logprobs = sequence.logprobs
            deltas.append(
                Delta(
                    choice.index,
                    choice.text.finish(sequence),
                    sequence.tokens[choice.num_tokens :],
                    None if logprobs is None else logprobs[choice.num_tokens :],
                    FINISH[sequence.finish_reason or ""],
                    not choice.begun,
                )
            )
        return deltas


def _output(reply: Reply) -> RequestOutput:
    """Raises ApiError where the engine has none, or has given up."""
    if reply.output is None:
        raise ApiError(500, f"the engine could not serve the request: {reply.failure}")
    if any(sequence.finish_reason not in FINISH for sequence in reply.output.sequences):
        raise ApiError(500, "the engine has failed in the middle of the request")
    return reply.output
