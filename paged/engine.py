"""The engine: requests in, tokens out. `EngineLoop` serves them; here is how to ask."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

import numpy as np

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine_loop import EngineLoop
from paged.executor import DeviceExecutor
from paged.sequence import RequestOutput, SamplingParams
from paged.step import StepProgram
from paged.step_inputs import Buckets
from paged.tensor_parallel import Shards
from paged.validation import Prompt


class Engine(EngineLoop):
    """Serves one model through one executor. `metrics` holds what happened."""

    @classmethod
    def from_model(
        cls, params, model: ModelConfig, config: EngineConfig, tokenizer=None, implementation=None
    ) -> "Engine":
        """An engine on the default JAX device, or the first `tensor_parallel` devices;
        `implementation` goes to the attention ops.

        Raises ValueError if the model cannot be spread over them.
        """
        shards = Shards(model, config.tensor_parallel)
        executor = DeviceExecutor(
            params,
            StepProgram.declare(config, shards, implementation),
            shapes=Buckets.declare(config).shapes(),
            num_blocks=config.num_blocks,
            page_size=config.page_size,
        )
        return cls(model, config, executor, tokenizer)

    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared step shape; afterwards nothing compiles."""
        self.executor.warm_up(progress)
        self.metrics.compilations_warmup = self.executor.compilations - self._compilations_at_start
        self._compilations_at_start = self.executor.compilations

    def generate(
        self,
        prompts: List[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Outputs of `prompts` in order; other requests run on beside them.

        Nothing is queued if one of them is refused, and nothing is left behind if the call is
        interrupted.
        """
        if isinstance(prompts, str):
            raise ValueError("generate takes a list of prompts, not one string")
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(sampling)} sampling parameters")
        valid = [(self._validated(p, how), how) for p, how in zip(prompts, sampling, strict=True)]
        mailbox: deque[RequestOutput] = deque()
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for tokens, how in valid:
                ids.append(self._enqueue(tokens, how))
                self._mailboxes[ids[-1]] = mailbox
            while len(done) < len(ids):
                self._advance()
                while mailbox:
                    output = mailbox.popleft()
                    done[output.request_id] = output
        finally:
            self._abandon(ids)
        return [done[i] for i in ids]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One request's output each time it grows, a beam search's at its end alone; other requests
        run on beside it.

        The text may show the beginning of a stop string that the final text is cut before. The
        request is queued when the first output is asked for; closing the iterator aborts it.
        """
        how = sampling or SamplingParams()
        return self._stream(self._validated(prompt, how), how)

    def _stream(self, tokens: np.ndarray, sampling: SamplingParams) -> Iterator[RequestOutput]:
        request_id = self._enqueue(tokens, sampling, stream=True)
        mailbox = self._mailboxes[request_id] = deque()
        try:
            finished = False
            while not finished:
                while not mailbox:
                    self._advance()
                finished = mailbox[0].finished
                yield mailbox.popleft()
        finally:
            self._abandon([request_id])

    def pin_prefix(self, prompt: Prompt, cache_salt: str = "") -> int:
        """Compute a prompt that many requests will begin with, and keep its blocks for good (vLLM
        §4.4, shared prefix); whoever goes on from its last one copies it. Returns its length.

        Raises ValueError without prefix caching, for a bad prompt or one whose logits are not
        finite, and while requests are unfinished: these were accepted for the memory that is there
        now.
        """
        if not self.config.prefix_caching:
            raise ValueError("pinning a prefix needs prefix_caching")
        if self._groups:
            raise ValueError(f"{len(self._groups)} requests are unfinished: pin prefixes before")
        # The token that it generates is confirmed only with the whole prompt written.
        how = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        tokens = self._validated(prompt, how)
        mailbox: deque[RequestOutput] = deque()
        self._mailboxes["pin"] = mailbox
        try:
            self._enqueue(tokens, how, "pin", cache_salt=cache_salt)
            self._groups["pin"].pin = True
            while not mailbox:
                self._advance()
        finally:
            self._abandon(["pin"])
        if mailbox[0].finish_reason == "error":
            raise ValueError("the prefix cannot be pinned: its logits are not finite")
        now = self.executor.clock.now()
        self.metrics.event("pin", now, round=self._round, prompt=tokens, cache_salt=cache_salt)
        return len(tokens)

    def _abandon(self, request_ids: list[str]) -> None:
        """Abort those of the requests that still run; nobody waits for their outputs."""
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
            if request_id in self._groups:
                self.abort(request_id)
