"""The engine requests for one HTTP request, and their outputs as deltas of choices."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from paged.cluster.messages import ClusterRequest, Growth
from paged.requests.sequence import RequestOutput, TokenLogprob
from paged.requests.text_deltas import TextDeltas
from paged.server.engine_client import Client, Reply
from paged.server.openai_format import ApiError

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}  # the engine's reason → OpenAI's


class ClientLeft(Exception):
    """The client has disconnected, and no longer waits for the response."""


@dataclass(frozen=True)
class Delta:
    """The new part of a choice, or a whole choice that is not streamed.

    index: the choice's index in the response.
    logprobs: log-probabilities of `tokens`; None if not requested.
    offsets: characters of the choice's text before each token; used with `logprobs` only.
    first: whether the part begins the choice.
    """

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None
    finish_reason: str | None
    offsets: Sequence[int]
    first: bool


@dataclass
class _Choice:
    """The state of a streamed choice.

    num_sent: tokens in the choice's deltas so far.
    pending: later tokens that have no text yet; the next delta has them.
    """

    index: int
    text: TextDeltas
    num_sent: int = 0
    pending: list[int] = field(default_factory=list)
    begun: bool = False


@dataclass(eq=False)
class Generation:
    """The engine requests for one HTTP request, one for each prompt, from `start` to `close`.

    streams: whether `deltas` will be read.
    max_buffered: tokens that may wait for a slow reader.
    timeout_s: seconds from the start after which waiting fails.
    """

    client: Client
    requests: list[ClusterRequest]
    tokenizer: object
    streams: bool
    max_buffered: int
    timeout_s: float
    replies: list[Reply] = field(default_factory=list)
    _choices: dict[tuple[int, int], _Choice] = field(default_factory=dict)  # by prompt, sequence
    _failure: ApiError | ClientLeft | None = None

    def start(self) -> None:
        self._ready = asyncio.Event()
        self.deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        for request in self.requests:
            self.replies.append(Reply(self.streams, self.max_buffered, self._ready))
            self.client.submit(request, self.replies[-1])

    def fail(self, error: ApiError | ClientLeft) -> None:
        """Make the response's wait for the engine raise `error`. Later calls have no effect."""
        self._failure = self._failure or error
        self._ready.set()

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for request, reply in zip(self.requests, self.replies):
            if not reply.ended:
                self.client.abort(request.request_id)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, once all have ended. Raises ApiError if an output is missing
        or was cut by a failure."""
        return [_whole_output(reply) for reply in self.replies]

    async def _news(self) -> None:
        """Wait for a reply's growth or end. Raises ApiError or ClientLeft if the wait fails."""
        try:
            async with asyncio.timeout_at(self.deadline_s):
                await self._ready.wait()
        except TimeoutError:
            message = f"the request has taken longer than {self.timeout_s:g} s"
            raise ApiError(504, message, code="timeout") from None
        self._ready.clear()
        if self._failure:
            raise self._failure
        if not self.client.alive:
            raise ApiError(503, "the engine has ended")

    async def finish(self) -> list[RequestOutput]:
        """Wait for the outputs of all prompts. Raises ApiError if an output is missing, cut or
        late, and ClientLeft once the client has disconnected."""
        while not all(reply.ended for reply in self.replies):
            await self._news()
        return self.outputs

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new deltas as they arrive. Raises ApiError if a request fails or takes too long,
        and ClientLeft once the client has disconnected."""
        running = dict(enumerate(self.replies))
        while running:
            await self._news()
            new: list[Delta] = []
            for i, reply in list(running.items()):
                if reply.ended:
                    del running[i]
                    new += self.rest(i)
                else:
                    grown = (self._grown(i, growth) for growth in reply.take())
                    new += [delta for delta in grown if delta is not None]
            if new:
                yield new

    def rest(self, i: int) -> list[Delta]:
        """The last delta of each choice of prompt `i`, which has ended; the whole choice if nothing
        was streamed. Raises ApiError if the prompt's output is missing or cut."""
        deltas = []
        for at, sequence in enumerate(_whole_output(self.replies[i]).sequences):
            choice, logprobs = self._choice(i, at), sequence.logprobs
            tokens = sequence.tokens[choice.num_sent :]
            deltas.append(
                Delta(
                    choice.index,
                    choice.text.rest(sequence.text),
                    tokens,
                    None if logprobs is None else logprobs[choice.num_sent :],
                    FINISH[sequence.finish_reason or ""],
                    [] if logprobs is None else choice.text.push(tokens),
                    not choice.begun,
                )
            )
        return deltas

    def _grown(self, i: int, growth: Growth) -> Delta | None:
        """The delta of new tokens; None if there is nothing to send yet. The last tokens wait for
        `rest`, because only the final output has their text."""
        if growth.output.finish_reason is not None:
            return None
        choice, logprobs = self._choice(i, growth.index), growth.output.logprobs
        assert growth.start == choice.num_sent + len(choice.pending), "a token is lost or repeated"
        tokens = choice.pending + growth.output.tokens
        offsets = choice.text.push(growth.output.tokens)
        text, first = choice.text.take(), not choice.begun
        if not text and logprobs is None and not first:
            choice.pending = tokens
            return None
        choice.num_sent += len(tokens)
        choice.begun, choice.pending = True, []
        return Delta(choice.index, text, tokens, logprobs, None, offsets, first)

    def _choice(self, i: int, at: int) -> _Choice:
        """Sequence `at` of prompt `i`."""
        if (i, at) not in self._choices:
            sampling = self.requests[i].sampling
            text = TextDeltas(self.tokenizer, sampling.stop)
            self._choices[i, at] = _Choice(i * sampling.n + at, text)
        return self._choices[i, at]


def _whole_output(reply: Reply) -> RequestOutput:
    if reply.output is None:
        raise ApiError(500, f"the engine could not serve the request: {reply.failure}")
    if any(sequence.finish_reason not in FINISH for sequence in reply.output.sequences):
        raise ApiError(500, "the engine has failed in the middle of the request")
    return reply.output
