"""Random users of an engine, who check its outputs and state: `python -m experiments.soak`.

Users' actions are drawn from the seed and the number of the step, so that a run can be repeated up
to any step, at any speed.
"""

import functools
import random
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.lib.engines import load_engine
from experiments.soak import checks
from experiments.soak.checks import Asked, Violation
from experiments.soak.comparison import LOGPROB_TOLERANCE, compare
from paged.config import EngineConfig
from paged.engine import Engine, OutputStream
from paged.kv_cache.moves import Moves
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.validation import token_limit

# Requests draw each parameter from these values. Output lengths are shares of a third of
# max_model_len.
OUTPUT_SHARES = (0.0, 0.1, 0.4, 1.0, 1.0)
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.0, 0.0, 0.7, 1.3),
    "top_k": (0, 0, 0, 1, 20),
    "top_p": (1.0, 1.0, 0.8),
    "min_p": (0.0, 0.0, 0.05),
    "repetition_penalty": (1.0, 1.0, 1.0, 1.3),
    "presence_penalty": (0.0, 0.0, 0.0, 0.5),
    "frequency_penalty": (0.0, 0.0, 0.0, -0.5),
    "logit_bias": ({}, {}, {}, {5: -100.0, 6: 2.5}),
    "stop": ((), (), (), ("e",), (".", " the"), ("\n", "zzz")),
    "stop_token_ids": ((), (), (), (7, 8, 9)),
    "ignore_eos": (False, False, True),
    "logprobs": (None, None, None, 0, 3),
    "prompt_logprobs": (None, None, None, None, 2),
}
# SEQUENCES: number of sequences of a request. Half of the requests with several sequences are beam
# searches. A beam search keeps only BEAMS_TAKE of the drawn parameters.
MOST_SEQUENCES = 4
SEQUENCES = (1, 1, 1, 1, 2, 3, MOST_SEQUENCES)
BEAMS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0, 1.0, 0.0, 2.0, -1.0),
    "early_stopping": (False, True, "never"),
}
BEAMS_TAKE = ("max_tokens", "seed", "ignore_eos", "prompt_logprobs")
NUM_PREFIXES, NUM_PINNED, MAX_UNFINISHED, NUM_STREAMS = 4, 2, 40, 3
COUNTED = (
    "requests", "parallel_samples", "beam_searches", "prompt_tokens", "output_tokens",
    "cached_tokens", "copied_blocks", "preemptions", "swapped_out", "swapped_in", "engine_steps",
    "ended_eos", "ended_length", "ended_stop", "ended_abort", "closed", "refused",
    "pinned_prefixes", "compared", "near_ties", "interrupted", "adapted", "adapters_evicted",
)  # fmt: skip
SHORTEST, LONGEST = -4.5, -1.5  # log10 of the seconds until a simulated Ctrl-C
AGAIN_S = 1e-3  # seconds until the next attempt, if the engine was not in a call

Operation = Callable[["Users", random.Random], None]


class Interruption(KeyboardInterrupt):
    """A simulated Ctrl-C, as opposed to a Ctrl-C from the keyboard."""


class Interrupts:
    """Interrupts a share of the operations within `around`, but only while `engine` is in a call,
    because outputs that the engine has already returned must not be lost."""

    def __init__(self, engine: Engine, share: float):
        self._engine, self.share, self._armed = engine, share, False

    @contextmanager
    def around(self, rng: random.Random) -> Iterator[None]:
        """A context in which Interruption may be raised. Only for the main thread."""
        if not self.share or rng.random() >= self.share:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(SHORTEST, LONGEST))
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _ring(self, *_) -> None:
        if self._armed and self._engine._owner is not None:
            self._armed = False
            raise Interruption
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


class Users:
    """Random users of `engine`.

    reference: an engine with the same model and ample memory that serves one request at a time.
    check_share: share of the repeatable requests whose outputs are compared with the reference's.
    sampling: values from which parameters are drawn.
    interrupts: share of operations that Ctrl-C may interrupt. Interrupts depend on the clock, so a
        run with interrupts cannot be repeated.
    tolerance: tolerance of `compare`.

    Raises ValueError if the engine's limits leave no room for requests of every kind.
    """

    def __init__(
        self, engine: Engine, reference: Engine, seed: int, check_share: float, sampling=SAMPLING,
        interrupts: float = 0.0, tolerance: float = LOGPROB_TOLERANCE,
    ):  # fmt: skip
        self.engine, self.reference, self.seed = engine, reference, seed
        self._sampling = sampling
        self.check_share, self._tolerance = check_share, tolerance
        self.interrupts = Interrupts(engine, interrupts)
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self.asked: dict[str, Asked] = {}
        self.streams: dict[str, OutputStream] = {}
        self.digest = 0  # CRC-32 of all operations and outputs
        config = engine.config
        self._third = config.max_model_len // 3
        # Without a prefix cache (DiffKV), the policy limits the number of pins.
        self.most_pins = NUM_PINNED if config.prefix_caching else min(NUM_PINNED, config.parts.pins)
        if self._third < 16:
            raise ValueError(f"max_model_len must be at least 48, not {config.max_model_len}")
        pinned = NUM_PINNED * self._third if config.prefix_caching else 0
        if not engine.host_policy.fits(config.max_model_len + config.page_size + pinned, 1):
            raise ValueError(
                f"kv_cache_tokens ({config.kv_cache_tokens}) must hold max_model_len "
                f"({config.max_model_len}), a page ({config.page_size}) and {pinned} pinned tokens"
            )
        vocabulary = min(engine.model.vocab_size, len(engine.tokenizer))
        self._ordinary = sorted(set(range(vocabulary)) - set(engine.tokenizer.all_special_ids))
        rng = random.Random(f"{seed} prefixes")
        self._prefixes = [self._tokens(rng, self._third) for _ in range(NUM_PREFIXES)]
        self._at_rest = checks.holdings(engine)
        self._held = engine.host_policy.used_units()  # units that stay in use at rest
        self._pinned = self._failures = self._records = self._without_record = 0
        self._oldest, self._oldest_for = "", 0

    # Actions

    def act(self, step: int, operations: dict[str, tuple[float, Operation]]) -> None:
        """Run each operation with its probability, in random order, then a step of the engine."""
        rng = random.Random(f"{self.seed} {step}")
        for name in rng.sample(list(operations), len(operations)):
            probability, operation = operations[name]
            if rng.random() < probability:
                self._do(functools.partial(operation, self, rng), rng)
                self._note(name, step)
        self._do(self.step, rng)

    def _do(self, operation: Callable[[], None], rng: random.Random) -> None:
        interrupted = False
        try:
            with self.interrupts.around(rng):
                operation()
        except Interruption:
            interrupted = True
        # After the handler, in which the exception would keep its frames and their objects alive.
        if interrupted:
            self._go_on()

    def _go_on(self) -> None:
        """Go on after an interruption: unfinished requests may end with 'error', and a failure
        removes the pinned prefixes."""
        self.counts["interrupted"] += 1
        for asked in self.asked.values():
            asked.interrupted = True
        for output in self.engine.step():
            self.take(output)
        failures = sum(event["event"] == "failure" for event in self.engine.events)
        if failures > self._failures:
            self._failures, self._pinned = failures, 0
            self._held = {name: units[:0] for name, units in self._held.items()}

    def request(self, rng: random.Random) -> tuple[list[int], SamplingParams]:
        """A prompt, often with a shared prefix, and its sampling parameters."""
        shared = rng.choice(self._prefixes)[: rng.choice((0, 0, self._third // 2, self._third))]
        own = max(1, int(self._third * rng.choice((0.0, 0.0, 0.1, 0.4, 1.0))))
        how = {name: rng.choice(values) for name, values in self._sampling.items()}
        how["max_tokens"] = max(1, int(self._third * rng.choice(OUTPUT_SHARES)))
        how["seed"] = rng.randrange(2**32)
        if how["temperature"] > 0 and rng.random() < 0.2:
            how["seed"] = None
        prompt = shared + self._tokens(rng, own)
        return prompt, self._several(rng, SamplingParams(**how), prompt)

    def _several(
        self, rng: random.Random, how: SamplingParams, prompt: list[int]
    ) -> SamplingParams:
        """`how`, often changed to several sequences, at most as many as the KV cache holds."""
        engine = self.engine
        count = min(rng.choice(SEQUENCES), engine.config.max_num_seqs)
        length = token_limit(np.array(prompt), how, engine.config)
        while count > 1 and not engine.host_policy.fits(length, count):
            count -= 1
        if count == 1:
            return how
        n = rng.randint(1, count)
        if rng.random() < 0.5:
            taken = {name: getattr(how, name) for name in BEAMS_TAKE}
            drawn = {name: rng.choice(values) for name, values in BEAMS.items()}
            return SamplingParams(**taken, **drawn, n=n, beam_width=count)
        return replace(how, n=n, best_of=count, temperature=how.temperature or 1.0)

    @property
    def prefix_length(self) -> int:
        """Tokens of a prefix that requests share."""
        return self._third

    @property
    def can_pin(self) -> bool:
        """Whether prefixes have a length that can be pinned."""
        can = self.engine.config.parts
        return can.shares(self._third) and can.pinned_tokens(self._third) > 0

    def _tokens(self, rng: random.Random, n: int) -> list[int]:
        return rng.choices(self._ordinary, k=n)

    def adapter(self, rng: random.Random) -> str | None:
        """The name of one of the engine's adapters, or None."""
        names = self.engine.adapters.names
        return rng.choice([None, *names]) if names else None

    def expect(
        self, request_id: str, prompt, how: SamplingParams, rng: random.Random,
        adapter: str | None = None,
    ) -> None:  # fmt: skip
        """Register an accepted request. The engine must return its output later."""
        repeatable = how.temperature == 0 or how.seed is not None
        alone = repeatable and rng.random() < self.check_share
        self.asked[request_id] = Asked(prompt, how, alone, adapter=adapter)
        self.counts["requests"] += 1
        self.counts["adapted"] += adapter is not None
        self.counts["beam_searches"] += how.is_beam_search
        self.counts["parallel_samples"] += how.num_sequences > 1 and not how.is_beam_search
        self.counts["prompt_tokens"] += len(prompt)

    @property
    def has_room(self) -> bool:
        return len(self.asked) < MAX_UNFINISHED

    def step(self) -> None:
        """Run a step of the engine, which must make progress, and check its state."""
        engine = self.engine
        busy = engine.has_unfinished()
        for output in engine.step():
            self.take(output)
        records = len(engine.metrics.steps)
        in_vain = busy and records == self._records and not engine.scheduler.gate.loading
        self._records = records
        self._without_record = self._without_record + 1 if in_vain else 0
        # The first step after a pause has no earlier step whose results it could record.
        if self._without_record > 2:
            raise Violation("stuck", f"{self._without_record} steps in which nothing was computed")
        self._check_oldest()
        checks.check_memory(engine)
        checks.check_slots(engine)

    def drain(self) -> None:
        """Run until all requests have ended; then check that the engine is in its initial state."""
        for request_id in list(self.streams):
            while request_id in self.streams:
                self.pull(request_id)
        while self.engine.has_unfinished():
            self.step()
        if self.asked:
            raise Violation("lost", f"no final output of {', '.join(self.asked)}")
        # The device keeps a copy of the last swap-out until the next one.
        pools = self.engine.host_policy.pools
        nothing = {pool.name: [(pool.null_unit, 0)] for pool in pools if pool.num_host_units > 1}
        self.engine.executor.apply(Moves(exports=nothing))
        self.check_at_rest()
        self._take_records()

    def pull(self, request_id: str) -> None:
        """Pull the next output of an open stream, and check it."""
        stream = self.streams[request_id]
        output = next(stream, None)
        if output is None:
            raise Violation("lost", f"the stream of {request_id} ended without a final output")
        if output.finished:
            del self.streams[request_id]
        self.take(output)
        if output.finished and next(stream, None) is not None:
            raise Violation("doubled", f"an output of {request_id} after its final one")

    def pin(self) -> None:
        """Pin the next prefix, if any is left. Requires that no request is unfinished."""
        if self._pinned < self.most_pins:
            self._do(self._pin, random.Random(f"{self.seed} pin {self.counts['interrupted']}"))
            self.check_at_rest()

    def _pin(self) -> None:
        self.engine.pin_prefix(self._prefixes[self._pinned])
        self._held = self.engine.host_policy.used_units()
        self._pinned += 1
        self.counts["pinned_prefixes"] += 1

    def _take_records(self) -> None:
        """Add the engine's records to the counts, and clear them, because they only grow."""
        metrics = self.engine.metrics
        for name in ("preemptions", "swapped_out", "swapped_in", "copied_blocks"):
            self.counts[name] += sum(getattr(step, name) for step in metrics.steps)
        self.counts["cached_tokens"] += sum(r.cached_tokens for r in metrics.requests)
        self.counts["engine_steps"] += len(metrics.steps)
        loads = (event for event in metrics.events if event["event"] == "load")
        self.counts["adapters_evicted"] += sum(len(load["evicted"]) for load in loads)
        metrics.clear()
        self.reference.metrics.clear()
        self._failures = self._records = 0

    def _note(self, *what) -> None:
        self.digest = zlib.crc32(repr(what).encode(), self.digest)

    # Checks

    def take(self, output: RequestOutput) -> None:
        """Check an output: the final one of a request, or an earlier one of a stream."""
        name = output.request_id
        asked = self.asked.get(name)
        if asked is None:
            raise Violation("doubled", f"an output of {name}, which has ended or never was")
        if output.prompt_tokens != asked.prompt:
            raise Violation("wrong_output", f"{name} came back with another prompt")
        if checks.takes_back(output, asked):
            raise Violation("wrong_output", f"{name} took back tokens that it had shown")
        asked.seen = [sequence.tokens for sequence in output.sequences]
        if output.finished:
            wrong = checks.what_is_wrong(output, asked, self.engine)
            if wrong:
                raise Violation("wrong_output", f"{name}: {wrong}; {asked.how}")
            # Two kinds of outputs are not compared: aborted beam searches, because their length is
            # unknown, and interrupted requests with several samples, because the number of
            # log-probabilities that ranked the samples is unknown.
            lone = not (asked.aborted or asked.interrupted) or asked.how.num_sequences == 1
            lone |= not (asked.interrupted or asked.how.is_beam_search)
            if asked.alone and lone:
                self._compare(output, asked)
            del self.asked[name]
            reason = "abort" if asked.aborted else output.finish_reason
            self.counts[f"ended_{reason}"] += 1
            self.counts["output_tokens"] += sum(map(len, asked.seen))
            self._note(name, asked.seen, reason)

    def _compare(self, output: RequestOutput, asked: Asked) -> None:
        """Check that the output equals the output of the request served alone, or, if aborted, is
        a prefix of that output."""
        wrong, near_ties = compare(output, asked, self.reference, self._tolerance)
        self.counts["compared"] += 1
        self.counts["near_ties"] += near_ties
        if wrong:
            raise Violation(
                "mismatched",
                f"{output.request_id} gave {wrong}; prompt {asked.prompt}, {asked.how}",
            )

    def _check_oldest(self) -> None:
        """Check that no request stays the oldest for too many steps. The oldest gains a token in
        every step (in a beam search every second step), so that all requests end, whatever requests
        arrive later."""
        scheduler = self.engine.scheduler
        unfinished = [*scheduler.running, *scheduler.waiting]
        group = min(unfinished, key=lambda group: group.order, default=None)
        name = group.request_id if group else ""
        same = name == self._oldest and group is not None and scheduler.gate.admits(group)
        self._oldest, self._oldest_for = name, self._oldest_for + 1 if same else 0
        if group is None:
            return
        most = group.limit * group.sampling.num_sequences + 8
        # While the oldest waited for its adapter, other requests overtook it. They end first.
        if group.overtaken:
            most += 2 * self.engine.config.max_model_len
        if self._oldest_for > most:
            raise Violation("stuck", f"{name} is the oldest for {self._oldest_for} steps")

    def check_at_rest(self) -> None:
        """Check that an engine without unfinished requests holds its initial state and the pins."""
        checks.check_memory(self.engine)
        checks.check_slots(self.engine)
        for name, units in self.engine.host_policy.used_units().items():
            leaked = np.setxor1d(units, self._held[name])
            if len(leaked):
                raise Violation("leaked_blocks", f"{name}: {leaked.tolist()} are in use by nobody")
        self.check_held(self._at_rest, "with nothing unfinished")
        if self.engine.step():
            raise Violation("doubled", "an output with nothing unfinished")

    def check_held(self, expected: dict[str, int], when: str) -> None:
        held = checks.holdings(self.engine)
        changed = [f"{k} holds {held[k]}, not {n}" for k, n in expected.items() if held[k] != n]
        if changed:
            raise Violation("leaked_state", f"{when}: {'; '.join(changed)}")


def reference_config(config: EngineConfig) -> EngineConfig:
    """The configuration for one request at a time: ample memory, no shared prefixes, no running
    ahead."""
    most, longest = min(MOST_SEQUENCES, config.max_num_seqs), config.max_model_len
    options: Any = config.policy_options
    if config.parts.pins:
        options = replace(options, pins=0)
    return replace(
        config, max_num_seqs=most, max_prefills_per_step=1, prefix_caching=False, run_ahead=False,
        kv_cache_tokens=most * (longest + config.page_size), watermark=0.0, policy_options=options,
    )  # fmt: skip


def make_users(
    config: EngineConfig, seed: int, check_share: float, interrupts: float, tolerance: float,
    served: Sequence[Adapter] = (), **model: Any,
) -> Users:  # fmt: skip
    """Users of an engine that is not warmed up yet.

    served: the adapters of requests.
    model: keyword arguments of `load_engine`.

    Raises ValueError for an invalid configuration.
    """
    engine = load_engine(config, **model)
    reference = load_engine(reference_config(config), **model)
    for adapter in served:
        engine.add_known_adapter(adapter)
        reference.add_known_adapter(adapter)
    return Users(engine, reference, seed, check_share, interrupts=interrupts, tolerance=tolerance)
