"""What the server serves, and the requests that it has accepted."""

import asyncio
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models.config import ModelConfig
from paged.adapters.known import KnownAdapters
from paged.checks import shown
from paged.cluster.messages import ClusterRequest
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.server.errors import TOO_LONG, ApiError
from paged.server.generation import Generation
from paged.server.metrics import ServerMetrics
from paged.server.owner import Owner
from paged.server.settings import ServerConfig
from paged.server.token_text import TokenTexts
from paged.validation import Prompt, validated_prompt

log = logging.getLogger("paged.server")
RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 600.0
MOST_COMPOSED = 4  # characters that a tokenizer may normalise to one (NFC)
MOST_LONG_BODIES = 2  # parsed at a time
LAST_WORD_S = 1.0  # in which clients must have read that the server ends


class Pace:
    """How fast requests end, over the last half minute of those in which there were any. now: gives
    the time in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._ends: deque[float] = deque()
        self._busy_since_s = now()

    def begin(self) -> None:
        """Requests come after there were none."""
        self._busy_since_s = self._now()
        self._ends.clear()

    def end(self) -> None:
        self._ends.append(self._now())

    def seconds_for(self, count: int) -> int:
        """In which so many requests end at this pace, from 1 to `LONGEST_RETRY_S`."""
        now = self._now()
        while self._ends and self._ends[0] < now - RATE_WINDOW_S:
            self._ends.popleft()
        elapsed = min(RATE_WINDOW_S, now - self._busy_since_s)
        if not self._ends or elapsed <= 0:
            return 1
        return int(np.clip(np.ceil(count * elapsed / len(self._ends)), 1, LONGEST_RETRY_S))


class Service:
    """One model under its name, with adapters under theirs. Its calls come from asyncio's thread.

    chat_template: None for the tokenizer's own, if it has one. logprobs: whether the engines
    compute log-probabilities, as simulated ones do not.
    """

    def __init__(
        self, owner: Owner, model: ModelConfig, config: EngineConfig, tokenizer, name: str,
        settings: ServerConfig | None = None, chat_template: str | None = None,
        logprobs: bool = True,
    ):  # fmt: skip
        self.owner, self.model, self.config, self.tokenizer = owner, model, config, tokenizer
        self.name, self.settings = name, settings or ServerConfig()
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.texts = TokenTexts(tokenizer)
        self.adapters = KnownAdapters(model, config)
        self.metrics = ServerMetrics(owner)
        self.started_s = int(time.time())
        self.draining = False
        self._sizes = policy_of(config.policy).sizes_of(config, ShardedModel.split(model))
        self._has_logprobs = logprobs
        longest_token = max(map(len, tokenizer.get_vocab()))
        self._longest_text = MOST_COMPOSED * config.max_model_len * longest_token
        self._active: dict[Generation, int] = {}  # with their prompts
        self._long_bodies = asyncio.Semaphore(MOST_LONG_BODIES)
        self._pace = Pace()
        self._order = itertools.count()

    # What requests name

    def adapter(self, name: str) -> Adapter | None:
        """None for the model as it is. Raises ApiError for a name that is not served."""
        if name == self.name:
            return None
        if name not in self.adapters.names:
            message = f"model {shown(name)} is not served; /v1/models lists those that are"
            raise ApiError(404, message, "model", "model_not_found")
        return self.adapters.named(name)

    async def load_adapter(self, name: str, folder: str | Path) -> None:
        """Serve a folder that PEFT wrote under this name. Raises ApiError for what cannot be."""
        if name == self.name:
            raise ApiError(400, f"lora_name: {name!r} is the model itself", "lora_name")
        try:
            self.adapters.add(await asyncio.to_thread(self.adapters.read, name, folder))
        except (ValueError, OSError) as error:  # the second: the folder goes while it is read
            raise ApiError(400, f"lora_path: {error}", "lora_path") from None

    # Prompts

    def validated(self, prompt: Prompt, sampling: SamplingParams) -> list[int]:
        """Its token ids. Raises ValueError for a request that no engine could serve."""
        if not self._has_logprobs:
            for name in ("logprobs", "prompt_logprobs"):
                if getattr(sampling, name) is not None:
                    raise ValueError(f"{name}: a simulated device computes none")
        tokens = validated_prompt(
            prompt, sampling, self.tokenizer, self.model, self.config, self._sizes
        )
        return tokens.tolist()

    def check_length(self, text: str, field: str) -> None:
        """Raise ApiError for a text that is too long whatever its tokens are, which would take
        seconds to find."""
        if len(text) > self._longest_text:
            message = (
                f"{field}: a text of {len(text):,} characters; those of max_model_len "
                f"({self.config.max_model_len}) tokens are {self._longest_text:,} at most"
            )
            raise ApiError(400, message, field, TOO_LONG)

    async def beside[T](self, work: Callable[[], T]) -> T:
        """The result of long work, in a thread: few at a time, so that threads remain for other
        requests."""
        async with self._long_bodies:
            return await asyncio.to_thread(work)

    # Requests

    @property
    def pending(self) -> int:
        """Prompts that are served or wait."""
        return sum(self._active.values())

    def admit(self, count: int) -> None:
        """Raises ApiError if so many prompts more are too many, or none are taken any more."""
        if self.draining:
            message = "the server is shutting down"
            raise ApiError(503, message, code="shutting_down", headers={"Retry-After": "10"})
        if not self.owner.alive:
            raise ApiError(503, "the engine has ended", code="engine_ended")
        pending = self.pending
        if pending and pending + count > self.settings.max_pending:
            seconds = self._pace.seconds_for(pending)
            message = (
                f"{pending} prompts are pending, and at most {self.settings.max_pending} may be: "
                f"try again in {seconds} s"
            )
            headers = {"Retry-After": str(seconds)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    def begin(
        self, answer_id: str, prompts: list[list[int]], sampling: SamplingParams,
        adapter: Adapter | None, cache_salt: str, streams: bool,
    ) -> Generation:  # fmt: skip
        """Serve prompts, each validated. Raises ApiError as `admit` does."""
        self.admit(len(prompts))
        requests = [
            ClusterRequest(
                f"{answer_id}-{i}", next(self._order), time.monotonic(), tuple(prompt), sampling,
                adapter, cache_salt,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        generation = Generation(
            self.owner, requests, self.tokenizer, streams, self.settings.max_buffered_tokens,
            self.settings.request_timeout_s,
        )  # fmt: skip
        if not self._active:
            self._pace.begin()
        self._active[generation] = len(prompts)
        generation.start()
        return generation

    def end(self, generation: Generation) -> None:
        """It has been answered, or nobody waits for it any more."""
        generation.close()
        if self._active.pop(generation, None) is not None:
            for reply in generation.replies:
                self._pace.end()
                self.metrics.ended(reply)

    async def drain(self) -> None:
        """Take no more requests, and return when none is left: `drain_s` from now at the latest,
        when the rest ends with an error, but for who does not read even that."""
        self.draining = True
        log.info("draining: %d prompts are pending", self.pending)
        deadline_s = time.monotonic() + self.settings.drain_s
        while self._active and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for generation in self._active:
            generation.end(ApiError(503, "the server has shut down", code="shutting_down"))
        deadline_s = time.monotonic() + LAST_WORD_S
        while self._active and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
