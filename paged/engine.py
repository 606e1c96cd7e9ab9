"""The engine's interface: requests in, tokens out. `EngineLoop` runs the steps.

Calls are exclusive, and an interruption leaves no half-done change. Ctrl-C raises KeyboardInterrupt
wherever CPython checks for signals: at the start of a function, after a call of C code, and at the
end of a loop's iteration. Threads switch at the same points. Between these points, plain
assignments, `+=` of lists and deques, and `del` run as one unit. So a method hands its result over
right before its `return`, without a call in between.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, Concatenate

import numpy as np

from models.config import ModelConfig
from paged.adapters.known import KnownAdapters
from paged.config import EngineConfig
from paged.decode_runs import LONGEST
from paged.device.buckets import Buckets
from paged.device.executor import DeviceExecutor, Executor
from paged.device.step import StepProgram
from paged.engine_loop import EngineLoop
from paged.event_log import EventLog
from paged.interrupts import keep_interrupts
from paged.known_output import check_known, go_on
from paged.kv_cache import policy_of
from paged.metrics import Metrics
from paged.registry import Requests
from paged.requests.adapter import Adapter
from paged.requests.output_stream import OutputStream
from paged.requests.sampling_params import SamplingParams, changed_fields
from paged.requests.sequence import RequestOutput, SequenceGroup, SequenceOutput
from paged.requests.stopping import TextStream
from paged.scheduling.scheduler import Scheduler
from paged.tensor_parallel import Shards
from paged.validation import (
    Prompt,
    check_arrival,
    check_model,
    check_pin,
    each_adapter,
    paired,
    token_limit,
    validated_prompt,
)

# A pin's request. When its only token is sampled, all keys and values of the prompt are written.
PIN = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)


def exclusive[**P, R](
    method: Callable[Concatenate["Engine", P], R],
) -> Callable[Concatenate["Engine", P], R]:
    """Make a method exclusive: it raises RuntimeError while another call of its engine runs. During
    the call, `_owner` is the name of the calling thread.

    `_settle` runs before the method, and again if the method raises. It recovers from an
    interrupted call, and may be interrupted itself.
    """

    @functools.wraps(method)
    def call(self: "Engine", *args: P.args, **kwargs: P.kwargs) -> R:
        thread = threading.current_thread().name
        if self._owner is not None:
            raise RuntimeError(
                f"the engine is in the middle of a call by thread {self._owner!r}: its calls must "
                f"come one after the other ({method.__name__} was called by thread {thread!r})"
            )
        self._owner = thread
        try:
            self._settle()
            return method(self, *args, **kwargs)
        except BaseException:
            self._settle()
            raise
        finally:
            self._owner = None

    return call


class Engine:
    """Serves one model through one executor, one call at a time.

    loop: schedules and runs steps.
    requests: unfinished requests and their outputs.
    adapters: the adapters that requests may name.
    event_log: writes `events`.
    metrics: records of steps and requests.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, executor: Executor, tokenizer=None
    ):
        check_model(model, config)
        keep_interrupts()
        self.model, self.config, self.executor, self.tokenizer = model, config, executor, tokenizer
        self.metrics = Metrics()
        self.event_log = EventLog(self.metrics.events)
        self.requests = Requests(self.metrics, executor.clock, tokenizer)
        self.loop = EngineLoop(model, config, executor, self.requests, self.metrics, self.event_log)
        self.adapters = KnownAdapters(model, config, executor.dtype)
        self._rng = np.random.default_rng(config.seed)  # draws the seeds of requests without a seed
        self._num_requests = 0
        self._owner: str | None = None  # the thread that is in a call
        self._half_done = False  # a change has begun and not ended: see `_settle`
        self.event_log.engine(config, model, executor.dtype)

    @classmethod
    def from_model(
        cls, params, model: ModelConfig, config: EngineConfig, tokenizer=None, implementation=None
    ) -> "Engine":
        """An engine on the default JAX device, or the first `tensor_parallel` devices;
        `implementation` goes to the attention ops and the adapters' ops.

        Raises ValueError, before anything is allocated, if there are too few devices, if the model
        cannot be split over them or served by the policy, or if its sequences cannot have
        max_model_len tokens.
        """
        check_model(model, config)
        shards = Shards(
            model, config.tensor_parallel, dtype=params["embed"].dtype,
            head_order=policy_of(config.policy).head_order(config, model),
        )  # fmt: skip
        executor = DeviceExecutor(
            params,
            StepProgram.declare(config, shards, implementation),
            shapes=Buckets.declare(config).shapes(),
            adapter_host_bytes=config.adapter_host_bytes,
            quantization=config.quantization,
        )
        return cls(model, config, executor, tokenizer)

    @property
    def events(self) -> list[dict]:
        """The event log, in order: enough to replay the run. `EventLog` describes the events. After
        `metrics.clear()` later events cannot be replayed."""
        return self.metrics.events

    @property
    def scheduler(self) -> Scheduler:
        """Replaced by a new one after a failure."""
        return self.loop.scheduler

    @property
    def host_policy(self) -> Any:
        """The policy's `HostPolicy`, of its own type; replaced by a new one after a failure."""
        return self.loop.host_policy

    @exclusive
    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared step shape; afterwards nothing compiles."""
        self._half_done = True
        self.loop.warm_up(progress)
        self._half_done = False

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Register a LoRA adapter, a folder written by PEFT, under a name for requests.

        Its weights are loaded to the device when a request needs them. If the name is in use, later
        requests get the new content. The folder is read here, to check it. If steps must not wait
        for that, call `adapters.read` in another thread, and `add_known_adapter` with its result
        between two other calls.

        Raises ValueError, naming file and field or tensor, if the adapter cannot be served with
        this model; also without adapter slots, and for a name that is empty or no text.
        """
        self.add_known_adapter(self.adapters.read(name, folder))

    @exclusive
    def add_known_adapter(self, adapter: Adapter) -> None:
        """Register an adapter that `adapters.read` of this or another engine has returned. Its
        folder is read again to load it. Raises ValueError if its rank is too large, or no adapters
        are configured."""
        self.adapters.check(adapter)
        self._half_done = True
        self.event_log.adapter(self.executor.clock.now(), self.loop.round, adapter)
        self.adapters.add(adapter)
        self._half_done = False

    # Requests

    @exclusive
    def add_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, request_id: str | None = None,
        arrival_time: float | None = None, stream: bool = False, cache_salt: str = "",
        adapter: str | None = None, known_output: List[SequenceOutput] | None = None,
    ) -> str:  # fmt: skip
        """Queue a request; returns its id.

        prompt: text, or token ids.
        arrival_time: seconds on the engine's clock, now by default.
        stream: whether `step` returns the output whenever it grows, not only at its end. A beam
            search has one output, at its end.
        cache_salt: cached prefixes are shared only among requests with equal salt and adapter.
        adapter: name of the adapter; None for the base model. If the adapter cannot be loaded, the
            request ends with 'error'.
        known_output: each sequence's output from another engine's stream; the request continues
            it (Punica §5.3).

        Generation ends at max_tokens or max_model_len, whichever comes first. An interrupted call
        has queued nothing.

        Raises ValueError, and queues nothing, for:
            a prompt that is empty, is text without a tokenizer, has a token outside the vocabulary,
            or is too long for max_model_len or the cache;
            sampling parameters that the model, the tokenizer, the policy or max_num_seqs rules out;
            the id of a request that is unfinished or has outputs not fetched yet;
            an arrival time in the future;
            an unknown adapter;
            known output that `known_output.check_known` refuses;
            an argument of the wrong type.

        This and all other calls but `has_unfinished` and `skip_rounds` raise RuntimeError while
        another call runs.
        """
        sampling = SamplingParams() if sampling is None else sampling
        tokens = self._validated(prompt, sampling)
        check_arrival(request_id, arrival_time, stream, cache_salt, self.executor.clock.now())
        if request_id is not None and self.requests.in_use(request_id):
            raise ValueError(f"request id {request_id!r} is in use")
        known = self.adapters.named(adapter)
        if known_output is not None:
            model, config = self.model, self.config
            check_known(known_output, tokens, sampling, self.tokenizer, model, config)
        group = self._new_group(
            tokens, sampling, request_id, arrival_time, cache_salt, bool(stream), adapter=known,
            known_output=known_output,
        )  # fmt: skip
        self._accept(group)
        return group.request_id

    def _validated(self, prompt: Prompt, sampling: SamplingParams) -> np.ndarray:
        model, config, policy = self.model, self.config, self.host_policy
        return validated_prompt(prompt, sampling, self.tokenizer, model, config, policy)

    def _new_group(
        self, tokens: np.ndarray, sampling: SamplingParams, request_id: str | None = None,
        arrival_time: float | None = None, cache_salt: str = "", stream: bool = False,
        mailbox: deque[RequestOutput] | None = None, adapter: Adapter | None = None,
        known_output: List[SequenceOutput] | None = None,
    ) -> SequenceGroup:  # fmt: skip
        """A request's sequence group, numbered in the order of calls, and not queued yet.

        tokens: the validated prompt.
        mailbox: receives the request's outputs; None: `step` returns them.
        known_output: checked output that the request continues.
        """
        order = self._num_requests
        self._num_requests += 1
        if request_id is None:
            request_id = self.requests.new_id()
        seed = int(self._rng.integers(2**32)) if sampling.seed is None else sampling.seed
        limit = token_limit(tokens, sampling, self.config)
        group = SequenceGroup(
            request_id, order, tokens, sampling, seed, limit, self.model.eos_token_ids
        )
        group.arrival_s = self.executor.clock.now() if arrival_time is None else float(arrival_time)
        group.cache_salt, group.stream, group.mailbox = cache_salt, stream, mailbox
        group.adapter = adapter
        if self.tokenizer is not None and not group.search and (sampling.stop or stream):
            for sequence in group.sequences:
                sequence.text_stream = TextStream(self.tokenizer, sampling.stop)
        if known_output is not None:
            go_on(group, known_output)
        return group

    def _accept(self, group: SequenceGroup) -> None:
        """Queue a checked request, and log its arrival."""
        sampling = changed_fields(group.sampling) | {"seed": group.sequences[0].seed}
        self._half_done = True
        self.event_log.arrival(self.loop.round, group, sampling)
        self.scheduler.add(group)
        self.requests.add(group)
        self._half_done = False

    @exclusive
    def abort(self, request_id: str) -> RequestOutput:
        """End a request in any state; returns its output so far. If an interruption loses this
        output, `step` or the request's stream returns it.

        Raises ValueError for an id that is unknown or has finished.
        """
        if not isinstance(request_id, str) or request_id not in self.requests.unfinished:
            raise ValueError(f"request {request_id!r} is unknown or has finished")
        group = self.requests.unfinished[request_id]
        self._abort(group)
        output = self.requests.final_output(group)
        assert output is not None
        self.requests.forget_streamed(request_id)
        return output

    def _abort(self, group: SequenceGroup) -> None:
        self._half_done = True
        self.event_log.abort(self.executor.clock.now(), self.loop.round, group)
        self.scheduler.abort(group)
        self.requests.retire(group)
        self._half_done = False

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        left = self.requests.unfinished or self.requests.outputs
        return bool(self._half_done or left or self.loop.is_in_flight)

    def skip_rounds(self, count: int) -> None:
        """Advance `EngineLoop.round` by `count` rounds of an idle engine, without running them."""
        assert not self.has_unfinished()
        self.loop.round += count

    # Calls that serve requests

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Dispatch the next step and apply the previous step's outputs. Returns outputs of requests
        that ended, and of streamed requests that grew. `generate` and `stream` return the outputs
        of their own requests instead.

        If this or another call fails or is interrupted halfway, all requests end with reason
        'error', and the engine starts afresh, without cached and pinned prefixes. The outputs of
        these requests are returned as usual, with the tokens so far. A text that the tokenizer
        cannot decode is empty, and the last log-probabilities may be missing.
        """
        self._advance()
        return self.requests.take()

    @exclusive
    def run_until(self, until_s: float, max_steps: int = LONGEST) -> list[RequestOutput]:
        """See `step`. In simulated time one call may execute a run of up to `max_steps` decode
        steps whose own calls would begin before `until_s` (`paged.decode_runs`). Results are the
        same, but the event log lacks the `schedule` events of these steps, and the `step` events of
        steps whose outputs the run applies."""
        self._advance(until_s, max_steps)
        return self.requests.take()

    def _advance(self, until_s: float | None = None, max_steps: int = LONGEST) -> None:
        self._half_done = True
        self.loop.run_step(until_s, max_steps)
        self._half_done = False

    @exclusive
    def generate(
        self,
        prompts: List[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
        adapters: List[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Outputs of `prompts`, in order. Other requests continue meanwhile.

        prompts: a list, tuple or other sequence.
        sampling: parameters for all prompts, or a sequence with parameters for each prompt.
        adapters: a sequence with a name or None for each prompt.

        Raises ValueError as `add_request` does. If one prompt is refused, none is queued. If the
        call is interrupted between steps, its requests are aborted; within a step, all requests end
        (see `step`).
        """
        mailbox = deque[RequestOutput]()
        valid = [(self._validated(p, how), how) for p, how in paired(prompts, sampling)]
        known = [self.adapters.named(name) for name in each_adapter(adapters, len(valid))]
        groups = [
            self._new_group(tokens, how, mailbox=mailbox, adapter=adapter)
            for (tokens, how), adapter in zip(valid, known, strict=True)
        ]
        # If this call is interrupted, `_settle` aborts these groups.
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
    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> OutputStream:
        """Queue a request. Returns an iterator over its output, each time it grows; a beam search
        has one output, at its end. Other requests continue meanwhile.

        While the request runs, its text may end in the beginning of a stop string; the final text
        is cut before the first whole stop string. Closing or dropping the iterator aborts the
        request.
        """
        how = SamplingParams() if sampling is None else sampling
        tokens = self._validated(prompt, how)
        known = self.adapters.named(adapter)
        stream = OutputStream(self._next_output, self._close)
        group = self._new_group(tokens, how, stream=True, mailbox=stream.mailbox, adapter=known)
        self.requests.open(stream, group)
        self._accept(group)
        return stream

    @exclusive
    def _next_output(self, stream: OutputStream) -> RequestOutput:
        group, mailbox = stream.group, stream.mailbox
        while not mailbox:
            if group is None or self.requests.unfinished.get(group.request_id) is not group:
                raise StopIteration
            self._advance()
        return self.requests.fetch(stream)

    @exclusive
    def _close(self, stream: OutputStream) -> None:
        if stream.group is not None:
            self.requests.dropped.append(stream.group)
        self._settle()

    @exclusive
    def pin_prefix(self, prompt: Prompt, cache_salt: str = "", adapter: str | None = None) -> int:
        """Compute a shared prefix, and keep its blocks for good (vLLM §4.4). A request that
        continues in the last block copies that block. Later requests must fit beside pinned blocks,
        even those that continue them. Returns the number of tokens of `prompt`.

        Without a prefix cache (DiffKV), the whole tiles before the prompt's last two tokens are
        shared, and the policy's option `pins` limits the number of prefixes.

        Raises ValueError:
            without prefix caching or a free pin;
            if the prompt is invalid, too short, never shared by the policy, or has logits that are
            not finite;
            if the adapter is unknown or cannot be loaded;
            while requests are unfinished, because a pin would take memory that their acceptance
            counted on.
        """
        tokens, mailbox = self._validated(prompt, PIN), deque[RequestOutput]()
        check_pin(tokens, cache_salt, self.config, self.host_policy)
        if count := len(self.requests.unfinished):
            raise ValueError(f"{count} requests are unfinished: pin prefixes before")
        length, known = len(tokens), self.adapters.named(adapter)
        group = self._new_group(
            tokens, PIN, "pin", cache_salt=cache_salt, mailbox=mailbox, adapter=known
        )
        group.pin = True
        self._accept(group)
        # An interruption before the pin is complete resets the engine, which drops all pins.
        self._half_done = True
        while not mailbox:
            self.loop.run_step()
        pinned = mailbox[0].finish_reason != "error"
        if pinned:
            self.event_log.pin(self.executor.clock.now(), self.loop.round, tokens, group)
        self._half_done = False
        if not pinned:
            reason = "its logits are not finite, or its adapter cannot be loaded"
            raise ValueError(f"the prefix cannot be pinned: {reason}")
        return length

    # After an interruption

    def _settle(self) -> None:
        """Recover from an interrupted call, and abort requests whose callers have left. If this
        method is interrupted too, the next call repeats it."""
        if self._half_done:
            self._start_afresh()
        self.requests.drop_streams()
        dropped = self.requests.dropped
        while dropped:
            group = dropped[0]
            if self.requests.unfinished.get(group.request_id) is group:
                self._abort(group)
            self.requests.forget(group)
            del dropped[0]

    def _start_afresh(self) -> None:
        """End all requests and reset the loop: after half a change host and device may disagree."""
        for group in list(self.requests.unfinished.values()):
            self.requests.fail(group, self.scheduler.slots)
        # Logged last: the event also ends a request that an interruption left only in the log.
        self.event_log.failure(self.executor.clock.now(), self.loop.round)
        self.loop.reset()
        self._half_done = False
