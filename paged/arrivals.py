"""Turns users' requests into sequence groups."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from paged.checks import is_bool, is_real, is_text, refusal
from paged.engine_loop import EngineLoop
from paged.known_output import check_known, go_on
from paged.registry import Requests
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceGroup, SequenceOutput
from paged.requests.stopping import TextStream
from paged.validation import Prompt, token_limit, validated_prompt


class Arrivals:
    """Checks requests, numbers them in the order of calls, and assigns missing ids and seeds."""

    def __init__(self, loop: EngineLoop, requests: Requests, tokenizer):
        self._loop, self._requests, self._tokenizer = loop, requests, tokenizer
        self._clock = loop.executor.clock
        self._rng = np.random.default_rng(loop.config.seed)
        self._num_requests = 0

    def validated(self, prompt: Prompt, sampling: SamplingParams) -> np.ndarray:
        """The prompt as token ids [n] int32. Raises ValueError as `validated_prompt` does."""
        loop = self._loop
        return validated_prompt(
            prompt, sampling, self._tokenizer, loop.model, loop.config, loop.host_policy
        )

    def check(self, request_id, arrival_time, stream) -> None:
        """Raise ValueError for arguments that `Engine.add_request` refuses."""
        if request_id is not None and not is_text(request_id):
            raise refusal("request_id", "a text", request_id)
        if request_id is not None and self._requests.in_use(request_id):
            raise ValueError(f"request id {request_id!r} is in use")
        if not is_bool(stream):
            raise refusal("stream", "True or False", stream)
        now = self._clock.now()
        if arrival_time is not None and not is_real(arrival_time):
            raise refusal("arrival_time", "a finite number", arrival_time)
        if arrival_time is not None and arrival_time > now:
            raise ValueError(f"arrival_time {arrival_time} is in the future: it is {now}")

    def check_known(
        self, known: Sequence[SequenceOutput], prompt: np.ndarray, sampling: SamplingParams
    ) -> None:
        """Raise ValueError if a request with this validated prompt cannot continue `known`."""
        loop = self._loop
        check_known(known, prompt, sampling, self._tokenizer, loop.model, loop.config)

    def new_group(
        self, tokens: np.ndarray, sampling: SamplingParams, request_id: str | None = None,
        arrival_time: float | None = None, cache_salt: str = "", stream: bool = False,
        mailbox: deque[RequestOutput] | None = None, adapter: Adapter | None = None,
        known_output: Sequence[SequenceOutput] | None = None,
    ) -> SequenceGroup:  # fmt: skip
        """A request's sequence group, not queued yet. Raises ValueError for a cache_salt that is no
        text.

        tokens: the validated prompt.
        mailbox: receives the request's outputs; None: `step` returns them.
        known_output: checked output that the request continues.
        """
        if not is_text(cache_salt):  # hashing it at admission would fail, and end all requests
            raise refusal("cache_salt", "a text", cache_salt)
        order = self._num_requests
        self._num_requests += 1
        if request_id is None:
            request_id = self._requests.new_id()
        seed = int(self._rng.integers(2**32)) if sampling.seed is None else sampling.seed
        limit = token_limit(tokens, sampling, self._loop.config)
        eos = self._loop.model.eos_token_ids
        group = SequenceGroup(request_id, order, tokens, sampling, seed, limit, eos)
        group.arrival_s = self._clock.now() if arrival_time is None else float(arrival_time)
        group.cache_salt, group.stream, group.mailbox = cache_salt, stream, mailbox
        group.adapter = adapter
        if self._tokenizer is not None and not group.search and (sampling.stop or stream):
            for sequence in group.sequences:
                sequence.text_stream = TextStream(self._tokenizer, sampling.stop)
        if known_output is not None:
            go_on(group, known_output)
        return group
