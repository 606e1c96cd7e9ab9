"""A twin of the device: its memory holds token ids, and its model is a hash of all tokens it reads.

An error between scheduler, block tables and step inputs (another sequence's page, a token fed from
the wrong slot, a position written twice) changes some token. The twin evaluates steps in order, and
only when the engine waits for them, like a device that runs behind the host. So a host array that
changes after dispatch also changes some token.
"""

import functools
import operator
import zlib
from collections.abc import Callable

import jax
import numpy as np

from models.sampling import BEAM, MAX_LOGPROBS, SAMPLING_ROW, Logprobs
from paged.clock import VirtualClock
from paged.device.step import StepOutputs
from paged.requests.adapter import Adapter
from paged.requests.beam_search import BeamSearch

EOS, FIRST, VOCAB = 2, 3, 61
TAG = 2**20  # above every token: an entry of memory is token + TAG * tag


def next_token(tokens, seed: int, eos_rate: float) -> int:
    """The token that the twin generates after `tokens`. Half of the time the seed has no effect,
    so samples of one prompt share tokens for a while."""
    tokens = np.array([*tokens, 0], np.int64)
    tokens[-1] = seed * (zlib.crc32(tokens.tobytes()) % 2)
    digest = zlib.crc32(tokens.tobytes())
    return EOS if digest % 997 < eos_rate * 997 else FIRST + digest % (VOCAB - FIRST)


def candidates(tokens) -> tuple[np.ndarray, np.ndarray]:
    """The twin's next tokens for a beam, best first, and their log-probabilities."""
    rng = np.random.default_rng(zlib.crc32(np.array(tokens, np.int64).tobytes()))
    probs = np.sort(rng.dirichlet(np.full(VOCAB - EOS, 0.3)))[::-1]
    top = np.log(np.maximum(probs[:MAX_LOGPROBS], 1e-9)).astype(np.float32)
    return rng.permutation(np.arange(EOS, VOCAB))[:MAX_LOGPROBS].astype(np.int32), top


def logprob_of(tokens, token: int) -> float:
    """The log-probability that the twin gives for `token` after `tokens`."""
    return -(zlib.crc32(np.array([*tokens, token], np.int64).tobytes()) % 1000) / 64


def generate(prompt, seed: int, limit: int, eos_rate: float, ignore_eos: bool) -> list[int]:
    """The output that a request must get, computed without pages, batches or a schedule."""
    tokens = list(prompt)
    while len(tokens) < limit and (ignore_eos or len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, seed, eos_rate))
    return tokens[len(prompt) :]


def beam_search(prompt, how, limit: int) -> list[list[int]]:
    """The outputs of a beam search, computed with one list of tokens per beam."""
    eos = () if how.ignore_eos else (EOS,)
    search = BeamSearch(
        how.beam_width, limit - len(prompt), how.length_penalty, how.early_stopping, eos
    )
    beams: list[list[int]] = [[]]
    while beams:
        tokens, top = zip(*(candidates([*prompt, *beam]) for beam in beams))
        moves = search.advance([np.array(b) for b in beams], np.array(tokens), np.array(top))
        beams = [[*beams[parent], token] for parent, token in moves]
    return [hypothesis.tokens.tolist() for hypothesis in search.best(how.n)]


def tag_of(adapter: Adapter) -> int:
    """The number that the twin puts before all tokens that it computes with an adapter."""
    return 1 + zlib.crc32(f"{adapter.name} {adapter.content_hash}".encode()) % 1000


class HashingExecutor:
    """Each entry of memory holds a token and the tag of the adapter that computed it."""

    compilations, dtype = 0, "float32"
    adapters: "TwinLoads | None" = None

    def __init__(self, config, eos_rate: float = 0.0):
        self.clock = VirtualClock()
        self._config, self._eos_rate = config, eos_rate
        self.reset()

    def reset(self) -> None:
        config = self._config
        self._memory = np.full((config.num_blocks, config.page_size), -1, np.int64)
        self._history = np.full((config.max_num_seqs, config.max_model_len), -1, np.int64)
        self._host_memory = np.full((config.num_blocks, config.page_size), -1, np.int64)
        # By rank page: its adapter's tag, and its place there. By adapter slot: its rank pages.
        self._rank_pages: dict[int, tuple[int, int]] = {}
        self._adapter_slots: dict[int, list[int]] = {}
        if self.adapters is not None:
            self.adapters.reset()
        self._queue: list[_Pending | Callable[[], None]] = []

    def warm_up(self, progress: bool = True) -> None:
        pass

    def apply(self, moves) -> None:
        memory, host = self._memory, self._host_memory
        places = {"exports": (memory, host), "imports": (host, memory), "copies": (memory, memory)}
        for name, pools in moves.facts().items():
            for pairs in pools.values():
                self._queue.append(functools.partial(_move, *places[name], pairs))

    def apply_after(self, moves) -> None:
        assert not moves.after

    def load_slot(self, slot, tokens, logit_bias) -> None:
        def load():  # `tokens` is not copied: a change before the load shows
            self._history[slot] = -1
            self._history[slot, : len(tokens)] = tokens

        self._queue.append(load)

    def execute(self, inputs) -> "_Pending":
        pending = _Pending(self, inputs)
        self._queue.append(pending)
        return pending

    def run_next(self) -> None:
        pending = self._queue.pop(0)
        if isinstance(pending, _Pending):
            pending.result = self._run(pending.inputs)
        else:
            pending()

    def _run(self, inputs) -> StepOutputs:
        S = len(inputs.lengths)
        if inputs.num_prefill_tokens:
            assert inputs.iterations.max() == 1
        sampled = np.full((max(1, inputs.iterations.max()), S), -7, np.int32)
        shape = *sampled.shape, MAX_LOGPROBS
        chosen, top = np.zeros(sampled.shape), np.zeros(shape, np.float32)
        logprobs = Logprobs(chosen, np.zeros(shape, np.int32), top)
        for done in range(len(sampled)):
            of_iteration = jax.tree.map(operator.itemgetter(done), logprobs)
            self._iterate(inputs, done, sampled[done], of_iteration)
        self._check_prompt_targets(inputs)
        return StepOutputs(sampled, logprobs)

    def _iterate(self, inputs, done: int, sampled: np.ndarray, logprobs: Logprobs) -> None:
        S, page_size = len(inputs.lengths), self._memory.shape[1]
        written, tags = set(), self._tags(inputs)
        for t, row in enumerate(inputs.token_rows):
            if row == S or inputs.iterations[row] <= done:
                continue
            token, position = inputs.tokens[t], int(inputs.positions[t]) + done
            if token < 0 or done:
                token = self._history[inputs.slots[row], position]
            assert token >= 0, "read a token that no step has sampled"
            page, offset = divmod(position, page_size)
            place = int(inputs.tables[row, page]), offset
            assert place[0] != 0, "wrote to the null block"
            assert place not in written, "two tokens of a step share a place"
            written.add(place)
            self._memory[place] = token + TAG * tags[t]
        for row in np.flatnonzero((inputs.lengths > 0) & (inputs.iterations > done)):
            n = int(inputs.lengths[row]) + done
            memory = self._memory[inputs.tables[row, : -(-n // page_size)]].reshape(-1)[:n]
            seen, tag = memory, tags[inputs.last_tokens[row]]
            if len(inputs.num_segments):
                seen = memory % TAG
                assert (memory // TAG == tag).all(), "another adapter's keys and values"
            assert inputs.positions[inputs.last_tokens[row]] + done == n - 1
            how = inputs.sampling.view(SAMPLING_ROW)[row, 0]
            if inputs.samples[row] and how["repetition_penalty"] != 1:
                assert (self._history[inputs.slots[row], :n] == seen).all(), "a wrong history"
            if tag:
                seen = np.append(tag, seen)
            sampled[row] = next_token(seen, int(how["seed"]), self._eos_rate)
            logprobs.chosen[row] = logprob_of(seen, sampled[row])
            if how["logprobs"] == BEAM:
                logprobs.top_tokens[row], logprobs.top[row] = candidates(seen)
                sampled[row] = 0
            if inputs.samples[row] and n < self._history.shape[1]:
                self._history[inputs.slots[row], n] = sampled[row]

    def _tags(self, inputs) -> np.ndarray:
        """The tag of each token's adapter; 0 without an adapter."""
        tags = np.zeros(len(inputs.tokens), np.int64)
        count, end = int(inputs.num_segments[0]) if len(inputs.num_segments) else 0, 0
        for slot, start, stop in zip(
            inputs.segment_slots[:count], inputs.segment_starts, inputs.segment_ends
        ):
            assert end <= start < stop, "segments overlap"
            end, pages = stop, self._adapter_slots[slot]
            owners = [self._rank_pages[page] for page in pages]
            assert owners == [(owners[0][0], i) for i in range(len(pages))], "another's rank page"
            tags[start:stop] = owners[0][0]
        return tags

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        def write():
            self._adapter_slots[slot] = list(pages)
            for i, page in enumerate(pages):
                self._rank_pages[page] = tag_of(adapter), i

        self._queue.append(write)

    def _check_prompt_targets(self, inputs) -> None:
        asked = np.flatnonzero(inputs.prompt_targets >= 0)
        rows = inputs.token_rows[asked]
        after = np.array(inputs.positions)[asked] + 1
        assert (after < inputs.sampling.view(SAMPLING_ROW)["prompt_length"][rows, 0]).all()
        within = after < np.array(inputs.lengths)[rows]
        assert (inputs.tokens[asked[within] + 1] == inputs.prompt_targets[asked[within]]).all()


class TwinLoads:
    """Loads of adapters that take a random number of rounds each, so they may overtake each other.

    failing: share of the loads that fail.
    """

    def __init__(self, executor: HashingExecutor, failing: float = 0.0, seed: int = 0):
        self._executor, self.failing = executor, failing
        self._rng = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        self._coming: dict[Adapter, int] = {}  # rounds until the load finishes

    def begin(self, adapter: Adapter) -> None:
        self._coming[adapter] = int(self._rng.integers(0, 9))

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        self._coming = {adapter: rounds - 1 for adapter, rounds in self._coming.items()}
        done = [adapter for adapter, rounds in self._coming.items() if rounds < 0]
        for adapter in done:
            del self._coming[adapter]
        return [(a, "broken" if self._rng.random() < self.failing else None) for a in done]

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        self._executor.install(adapter, slot, pages)

    def wait(self) -> None:
        self._coming[min(self._coming, key=lambda adapter: self._coming[adapter])] = 0


def _move(source: np.ndarray, destination: np.ndarray, pairs) -> None:
    pairs = np.array(list(pairs)).reshape(-1, 2)
    assert len(np.unique(pairs[:, 1])) == len(pairs), "two blocks are moved to one place"
    destination[pairs[:, 1]] = source[pairs[:, 0]]


class _Pending:
    def __init__(self, executor: HashingExecutor, inputs):
        self._executor, self.inputs = executor, inputs
        self.result: StepOutputs | None = None

    def wait(self) -> StepOutputs:
        while self.result is None:
            self._executor.run_next()
        return self.result
