"""The served model with its adapters, and the requests that the server has accepted."""

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
from paged.requests.token_texts import TokenTexts
from paged.server.engine_client import Client
from paged.server.generation import Generation
from paged.server.metrics import ServerMetrics
from paged.server.openai_format import TOO_LONG, ApiError
from paged.server.settings import ServerConfig
from paged.validation import Prompt, validated_prompt

log = logging.getLogger("paged.server")
RATE_WINDOW_S = 30.0
MAX_RETRY_S = 600.0
MAX_COMPOSED = 4  # characters that a tokenizer may normalise to one (NFC)
MAX_THREADS = 2  # threads for long work
LAST_READ_S = 1.0  # seconds that clients have to read the shutdown's error


class Pace:
    """The rate at which prompts end: over the last RATE_WINDOW_S seconds, or since the server was
    last idle if that is shorter.

    now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._ends: deque[float] = deque()
        self._busy_since_s = now()

    def begin(self) -> None:
        """Restart the measurement after the server was idle."""
        self._busy_since_s = self._now()
        self._ends.clear()

    def end(self) -> None:
        self._ends.append(self._now())

    def seconds_for(self, count: int) -> int:
        """Estimated seconds until `count` prompts end, from 1 to MAX_RETRY_S; 1 if none has ended
        in the measured time."""
        now = self._now()
        while self._ends and self._ends[0] < now - RATE_WINDOW_S:
            self._ends.popleft()
        elapsed = min(RATE_WINDOW_S, now - self._busy_since_s)
        if not self._ends or elapsed <= 0:
            return 1
        return int(np.clip(np.ceil(count * elapsed / len(self._ends)), 1, MAX_RETRY_S))


class Service:
    """One model and its adapters, served by name. Calls come from asyncio's thread. Only
    `adapter`, `validated` and `check_length` are also called in threads of `in_thread`.

    chat_template: None for the tokenizer's own template, if it has one.
    logprobs: whether the engines compute log-probabilities. Simulated engines do not.
    dtype: of the engines' weights.
    """

    def __init__(
        self, client: Client, model: ModelConfig, config: EngineConfig, tokenizer, name: str,
        settings: ServerConfig | None = None, chat_template: str | None = None,
        logprobs: bool = True, dtype: str = "float32",
    ):  # fmt: skip
        self.client, self.model, self.config, self.tokenizer = client, model, config, tokenizer
        self.name, self.settings = name, settings or ServerConfig()
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.texts = TokenTexts(tokenizer)
        self.adapters = KnownAdapters(model, config, dtype)
        self.metrics = ServerMetrics(client)
        self.started_s = int(time.time())
        self.draining = False
        sharded = ShardedModel.split(model, config.tensor_parallel, dtype)
        self._sizes = policy_of(config.policy).sizes(config, sharded)
        self._has_logprobs = logprobs
        max_token_text = max(map(len, tokenizer.get_vocab()))
        self._max_text = MAX_COMPOSED * config.max_model_len * max_token_text
        self._active: dict[Generation, int] = {}  # number of prompts
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._pace = Pace()
        self._order = itertools.count()

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None for the model itself. Raises ApiError for other names."""
        if name in (None, self.name):
            return None
        if name not in self.adapters.names:
            message = f"model {shown(name)} is not served; /v1/models lists those that are"
            raise ApiError(404, message, "model", "model_not_found")
        return self.adapters.named(name)

    async def load_adapter(self, name: str, folder: str | Path) -> None:
        """Serve an adapter that PEFT has written. Raises ApiError for the model's own name, and if
        the folder cannot be read or served."""
        if name == self.name:
            raise ApiError(400, f"lora_name: {name!r} is the model itself", "lora_name")
        try:
            self.adapters.add(await asyncio.to_thread(self.adapters.read, name, folder))
        except (ValueError, OSError) as error:  # OSError: the folder vanishes while it is read
            raise ApiError(400, f"lora_path: {error}", "lora_path") from None

    def validated(self, prompt: Prompt, sampling: SamplingParams) -> list[int]:
        """A prompt's token ids. Raises ValueError for a request that no engine could serve."""
        if not self._has_logprobs:
            for name in ("logprobs", "prompt_logprobs"):
                if getattr(sampling, name) is not None:
                    raise ValueError(f"{name}: a simulated device computes none")
        return validated_prompt(
            prompt, sampling, self.tokenizer, self.model, self.config, self._sizes
        ).tolist()

    def check_length(self, text: str, field: str) -> None:
        """Raise ApiError for a text that exceeds max_model_len in any tokenization. Call this
        before tokenizing, which would take seconds."""
        if len(text) > self._max_text:
            message = (
                f"{field}: a text of {len(text):,} characters; max_model_len "
                f"({self.config.max_model_len}) tokens have at most {self._max_text:,}"
            )
            raise ApiError(400, message, field, TOO_LONG)

    async def in_thread[T](self, work: Callable[[], T]) -> T:
        """The result of long work in a thread; at most MAX_THREADS threads, to leave CPU time for
        other requests."""
        async with self._threads:
            return await asyncio.to_thread(work)

    @property
    def pending(self) -> int:
        """Prompts that run or wait."""
        return sum(self._active.values())

    def admit(self, count: int) -> None:
        """Raise ApiError if `count` more prompts are too many, or if the server accepts none."""
        if self.draining:
            message = "the server is shutting down"
            raise ApiError(503, message, code="shutting_down", headers={"Retry-After": "10"})
        if not self.client.alive:
            raise ApiError(503, "the engine has ended", code="engine_ended")
        pending, max_pending = self.pending, self.settings.max_pending
        if pending and pending + count > max_pending:
            seconds = self._pace.seconds_for(pending)
            message = (
                f"{pending} prompts are pending, and at most {max_pending} may be: "
                f"try again in {seconds} s"
            )
            headers = {"Retry-After": str(seconds)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    def begin(
        self, response_id: str, prompts: list[list[int]], sampling: SamplingParams,
        adapter: Adapter | None, cache_salt: str, streams: bool,
    ) -> Generation:  # fmt: skip
        """Serve validated prompts. Raises ApiError as `admit` does."""
        self.admit(len(prompts))
        requests = [
            ClusterRequest(
                f"{response_id}-{i}", next(self._order), time.monotonic(), tuple(prompt), sampling,
                adapter, cache_salt,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        generation = Generation(
            self.client, requests, self.tokenizer, streams, self.settings.max_buffered_tokens,
            self.settings.request_timeout_s,
        )  # fmt: skip
        if not self._active:
            self._pace.begin()
        self._active[generation] = len(prompts)
        generation.start()
        return generation

    def end(self, generation: Generation) -> None:
        """Release a generation once its response has been sent or its client has gone."""
        generation.close()
        if self._active.pop(generation, None) is not None:
            for reply in generation.replies:
                self._pace.end()
                self.metrics.ended(reply)

    async def drain(self) -> None:
        """Accept no more requests, and wait until all have ended. Requests that have not ended
        after `drain_s` seconds fail. Their errors have LAST_READ_S seconds to reach the clients."""
        self.draining = True
        log.info("draining: %d prompts are pending", self.pending)
        await self._idle(self.settings.drain_s)
        for generation in self._active:
            generation.fail(ApiError(503, "the server has shut down", code="shutting_down"))
        await self._idle(LAST_READ_S)

    async def _idle(self, max_s: float) -> None:
        deadline_s = time.monotonic() + max_s
        while self._active and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
