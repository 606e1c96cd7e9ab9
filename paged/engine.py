"""The engine: requests in, tokens out. `EngineLoop` serves them; here is how to ask."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.device.executor import DeviceExecutor
from paged.device.step import StepProgram
from paged.device.step_inputs import Buckets
from paged.device.tensor_parallel import Shards
from paged.engine_loop import EngineLoop
from paged.exclusive import exclusive
from paged.kv_cache import POLICIES
from paged.requests.sequence import RequestOutput, SamplingParams, SequenceGroup
from paged.requests.validation import Prompt, check_model, check_sequence


class Engine(EngineLoop):
    """Serves one model through one executor. `metrics` holds what happened."""

    @classmethod
    def from_model(
        cls, params, model: ModelConfig, config: EngineConfig, tokenizer=None, implementation=None
    ) -> "Engine":
        """An engine on the default JAX device, or the first `tensor_parallel` devices;
        `implementation` goes to the attention ops.

        Raises ValueError, before anything is allocated, if the model cannot be spread over them or
        is not for sequences of max_model_len tokens.
        """
        check_model(model, config)
        policy = POLICIES[config.policy]
        shards = Shards(
            model, config.tensor_parallel, dtype=params["embed"].dtype,
            head_order=policy.head_order(config, model),
        )  # fmt: skip
        executor = DeviceExecutor(
            params,
            StepProgram.declare(config, shards, implementation),
            shapes=Buckets.declare(config).shapes(),
        )
        return cls(model, config, executor, tokenizer)

    @exclusive
    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared step shape; afterwards nothing compiles."""
        self._half_done = True
        self.executor.warm_up(progress)
        self._half_done = False
        self.metrics.compilations_warmup = self.executor.compilations - self._compilations_at_start
        self._compilations_at_start = self.executor.compilations

    @exclusive
    def generate(
        self,
        prompts: List[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Outputs of `prompts` in order; other requests run on beside them.

        prompts: a list, tuple or other sequence; sampling: of all, or such a sequence with each
        one's.
        Raises ValueError as `add_request` does. Nothing is queued if one of them is refused, and
        nothing is left behind if the call is interrupted.
        """
        check_sequence("prompts", "prompts", prompts)
        sampling = SamplingParams() if sampling is None else sampling
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        check_sequence("sampling", "SamplingParams", sampling)
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(sampling)} sampling parameters")
        valid = [(self._validated(p, how), how) for p, how in zip(prompts, sampling, strict=True)]
        mailbox: deque[RequestOutput] = deque()
        groups = [self._new_group(tokens, how, mailbox=mailbox) for tokens, how in valid]
        # If this call is interrupted nobody waits for them.
        self.requests.dropped.extend(groups)
        for group in groups:
            self._accept(group)
        done: dict[str, RequestOutput] = {}
        while len(done) < len(groups):
            self._advance()
            while mailbox:
                output = mailbox.popleft()
                done[output.request_id] = output
        self._settle()
        return [done[group.request_id] for group in groups]

    @exclusive
    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> "OutputStream":
        """Queue a request; an iterator over its output each time it grows, a beam search's at its
        end alone. Other requests run on beside it.

        The text may show the beginning of a stop string that the final text is cut before. Closing
        the iterator, or dropping it, aborts the request.
        """
        how = SamplingParams() if sampling is None else sampling
        stream = OutputStream(self)
        group = self._new_group(self._validated(prompt, how), how, mailbox=stream.mailbox)
        group.stream = True
        stream.group = group  # before it is queued: if nobody gets the stream, it is aborted
        self._accept(group)
        return stream

    @exclusive
    def _next_output(self, stream: "OutputStream") -> RequestOutput:
        group, mailbox = stream.group, stream.mailbox
        while not mailbox:
            if group is None or self.requests.unfinished.get(group.request_id) is not group:
                raise StopIteration
            self._advance()
        output = mailbox[0]
        del mailbox[0]
        return output

    @exclusive
    def _close(self, stream: "OutputStream") -> None:
        stream.drop()
        self._settle()

    @exclusive
    def pin_prefix(self, prompt: Prompt, cache_salt: str = "") -> int:
        """Compute a prompt that many requests will begin with, and keep its blocks for good (vLLM
        §4.4, shared prefix); whoever goes on from its last one copies it. Returns its length.

        Raises ValueError without prefix caching, for a bad prompt or one whose logits are not
        finite, and while requests are unfinished: these were accepted for the memory that is there
        now.
        """
        if not self.config.prefix_caching:
            raise ValueError("pinning a prefix needs prefix_caching")
        if self.requests.unfinished:
            count = len(self.requests.unfinished)
            raise ValueError(f"{count} requests are unfinished: pin prefixes before")
        # The token that it generates is confirmed only with the whole prompt written.
        how = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        tokens, mailbox = self._validated(prompt, how), deque[RequestOutput]()
        length = len(tokens)
        group = self._new_group(tokens, how, "pin", cache_salt=cache_salt, mailbox=mailbox)
        group.pin = True
        self._accept(group)
        # Until the caller knows of the pin it is not there: all of this is one change.
        self._half_done = True
        while not mailbox:
            self._run_step()
        if mailbox[0].finish_reason == "error":
            self._half_done = False
            raise ValueError("the prefix cannot be pinned: its logits are not finite")
        now = self.executor.clock.now()
        self.metrics.event("pin", now, round=self._round, prompt=tokens, cache_salt=cache_salt)
        self._half_done = False
        return length


class OutputStream(Iterator[RequestOutput]):
    """The outputs of a request of `Engine.stream`. Asking for the next one drives the engine.

    After an interruption it goes on with what there is: an output with reason 'error', if the
    request was ended.
    """

    group: SequenceGroup | None = None

    def __init__(self, engine: Engine):
        self._engine = engine
        self.mailbox: deque[RequestOutput] = deque()

    def __next__(self) -> RequestOutput:
        return self._engine._next_output(self)

    def close(self) -> None:
        """Abort the request, if it runs, and forget its outputs."""
        self._engine._close(self)

    def drop(self) -> None:
        """Have the request aborted, and its outputs forgotten, before the engine does anything
        else."""
        if self.group is not None and (self.mailbox or not self.group.finished):
            self._engine.requests.dropped.append(self.group)

    def __del__(self):
        # Python may call this anywhere, in another thread's step too.
        self.drop()
