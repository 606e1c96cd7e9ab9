"""A twin of the device: memory is an array of token ids, the model a hash of all that it reads.

Whatever is wrong between scheduler, block tables and step inputs (a page of another sequence, a
token fed from the wrong slot, a position written twice) changes some token. Steps are evaluated
only when waited for, in order, as on a device that runs behind: host arrays that change after
dispatch show as well.
"""

import zlib

import numpy as np

from models.sampling import SAMPLING_ROW
from paged.clock import VirtualClock
from paged.executor import StepOutputs

EOS, FIRST, VOCAB = 2, 3, 61


def next_token(tokens, seed: int, eos_rate: float) -> int:
    """What the twin generates after `tokens`."""
    digest = zlib.crc32(np.array([*tokens, seed], np.int64).tobytes())
    return EOS if digest % 997 < eos_rate * 997 else FIRST + digest % (VOCAB - FIRST)


def generate(prompt, seed: int, limit: int, eos_rate: float, ignore_eos: bool) -> list[int]:
    """The output that a request must get: no pages, no batches, no schedule."""
    tokens = list(prompt)
    while len(tokens) < limit and (ignore_eos or len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, seed, eos_rate))
    return tokens[len(prompt) :]


class HashingExecutor:
    compilations = 0

    def __init__(self, config, eos_rate: float = 0.0):
        self.clock = VirtualClock()
        self._memory = np.full((config.num_blocks, config.page_size), -1, np.int64)
        self._history = np.full((config.max_num_seqs, config.max_model_len), -1, np.int64)
        self._eos_rate = eos_rate
        self._queue: list[_Pending | _Load] = []

    def warm_up(self, progress: bool = True) -> None:
        pass

    def copy_blocks(self, copies) -> None:
        raise AssertionError("no decoding method of these tests shares blocks")

    def load_slot(self, slot, tokens, logit_bias) -> None:
        self._queue.append(_Load(slot, tokens))

    def execute(self, inputs) -> "_Pending":
        pending = _Pending(self, inputs)
        self._queue.append(pending)
        return pending

    def run_next(self) -> None:
        pending = self._queue.pop(0)
        if isinstance(pending, _Load):
            self._history[pending.slot] = -1
            self._history[pending.slot, : len(pending.tokens)] = pending.tokens
        else:
            pending.result = self._run(pending.inputs)

    def _run(self, inputs) -> StepOutputs:
        S = len(inputs.lengths)
        if inputs.num_prefill_tokens:
            assert inputs.iterations.max() == 1
        sampled = np.full((max(1, inputs.iterations.max()), S), -7, np.int32)
        for done in range(len(sampled)):
            self._iterate(inputs, done, sampled[done])
        self._check_prompt_targets(inputs)
        return StepOutputs(sampled)

    def _iterate(self, inputs, done: int, sampled: np.ndarray) -> None:
        S, page_size = len(inputs.lengths), self._memory.shape[1]
        written = set()
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
            self._memory[place] = token
        for row in np.flatnonzero((inputs.lengths > 0) & (inputs.iterations > done)):
            n = int(inputs.lengths[row]) + done
            seen = self._memory[inputs.tables[row, : -(-n // page_size)]].reshape(-1)[:n]
            assert inputs.positions[inputs.last_tokens[row]] + done == n - 1
            how = inputs.sampling.view(SAMPLING_ROW)[row, 0]
            if inputs.samples[row] and how["repetition_penalty"] != 1:
                assert (self._history[inputs.slots[row], :n] == seen).all(), "a wrong history"
            sampled[row] = next_token(seen, int(how["seed"]), self._eos_rate)
            if inputs.samples[row] and n < self._history.shape[1]:
                self._history[inputs.slots[row], n] = sampled[row]

    def _check_prompt_targets(self, inputs) -> None:
        asked = np.flatnonzero(inputs.prompt_targets >= 0)
        rows = inputs.token_rows[asked]
        after = np.array(inputs.positions)[asked] + 1
        assert (after < inputs.sampling.view(SAMPLING_ROW)["prompt_length"][rows, 0]).all()
        within = after < np.array(inputs.lengths)[rows]
        assert (inputs.tokens[asked[within] + 1] == inputs.prompt_targets[asked[within]]).all()


class _Load:
    def __init__(self, slot: int, tokens):
        self.slot, self.tokens = slot, tokens  # not copied: changes before it is used show


class _Pending:
    def __init__(self, executor: HashingExecutor, inputs):
        self._executor, self.inputs = executor, inputs
        self.result: StepOutputs | None = None

    def wait(self) -> StepOutputs:
        while self.result is None:
            self._executor.run_next()
        return self.result
