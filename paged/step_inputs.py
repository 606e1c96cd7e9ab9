"""What one step hands to the device: padded arrays of declared sizes."""

import functools
from dataclasses import dataclass, replace

import flax.struct
import jax
import numpy as np

from models.sampling import GREEDY_ROW, Array, SamplingArrays
from paged.config import EngineConfig
from paged.kv_cache.policy import HostPolicy
from paged.scheduler import ScheduledStep
from paged.slots import Slots

FROM_DEVICE = -1  # a token that the host has not read yet: the device has it under the slot


@flax.struct.dataclass
class StepInputs:
    """One step of Tp prefill tokens of Sp sequences, then Sd sequences with one token each.

    T = Tp + Sd tokens and S = Sp + Sd rows, all padded; int32 unless said otherwise.

    tokens: [T] ids, or FROM_DEVICE.  positions: [T].  token_rows: [T] row of each token, S for
    padding.  query_starts: [Sp + 1] first token of each prefill row.  lengths: [S] tokens in the
    cache after the step, 0 for padding.  last_tokens: [S] index in T of each row's last token.
    slots: [S], num_slots for padding.  samples: [S] not 0 where a token is sampled.  iterations:
    [S] tokens that a decode row computes, one after the other (all 1 without `multi_step`).
    prompt_targets: [Tp] the prompt token whose log-probability is asked for after this one, or -1.
    tables: [S, M].  sampling: [S] each.
    """

    tokens: Array
    positions: Array
    token_rows: Array
    query_starts: Array
    lengths: Array
    last_tokens: Array
    slots: Array
    samples: Array
    iterations: Array
    prompt_targets: Array
    tables: Array
    sampling: SamplingArrays

    @property
    def num_prefill_rows(self) -> int:
        return self.query_starts.shape[0] - 1

    @property
    def num_prefill_tokens(self) -> int:
        return self.tokens.shape[0] - (self.lengths.shape[0] - self.num_prefill_rows)


def _steps(largest: int, smallest: int, linear_above: int) -> tuple[int, ...]:
    """Powers of two from `smallest`, multiples of `linear_above` beyond it, up to `largest`."""
    sizes, size = [], min(smallest, largest)
    while size < largest:
        sizes.append(size)
        size = size * 2 if size < linear_above else size + linear_above
    return (*sizes, largest)


@dataclass(frozen=True)
class Buckets:
    """The declared sizes of steps, each of which is compiled once.

    prefill: sizes of Tp.  decode: sizes of Sd in steps without prefill.  mixed: sizes of Sd in
    steps with prefill; few, because they multiply with those of Tp.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def declare(cls, config: EngineConfig) -> "Buckets":
        prefill = _steps(config.max_num_batched_tokens, smallest=64, linear_above=2048)
        decode = _steps(config.max_num_seqs, smallest=1, linear_above=128)
        return cls(prefill, decode, mixed=decode[::-3][::-1])

    def shapes(self) -> list[tuple[int, int]]:
        """All (Tp, Sd), the largest first."""
        mixed = [(tp, sd) for tp in self.prefill for sd in self.mixed]
        return sorted(mixed + [(0, sd) for sd in self.decode], reverse=True)

    def pick(self, num_prefill_tokens: int, num_decodes: int) -> tuple[int, int]:
        """The smallest declared (Tp, Sd) that holds a step."""
        if num_prefill_tokens == 0:
            return 0, _at_least(self.decode, num_decodes)
        return _at_least(self.prefill, num_prefill_tokens), _at_least(self.mixed, num_decodes)


def _at_least(sizes: tuple[int, ...], n: int) -> int:
    return next(size for size in sizes if size >= n)


def build_step_inputs(
    step: ScheduledStep, slots: Slots, policy: HostPolicy, buckets: Buckets, prefill_rows: int
) -> tuple[StepInputs, np.ndarray]:
    """A scheduled step padded to its bucket, and the row of each of its sequences [n].

    Arrays are fresh: the device may read them in place, and after the next step is scheduled.
    """
    Tp, Sd = buckets.pick(step.num_prefill_tokens, step.num_decodes)
    inputs = empty_step_inputs(Tp, Sd, prefill_rows, slots.num_slots, policy.table_width)
    n, num_prefills = len(step.slots), step.num_prefills

    # Prefills fill rows from 0, rows of one token from Sp.
    rows = np.arange(n)
    rows[num_prefills:] += inputs.num_prefill_rows - num_prefills
    # Where a decode row stands after its first iteration.
    inputs.lengths[rows] = step.starts + step.counts
    inputs.lengths[rows[num_prefills:]] = step.starts[num_prefills:] + 1
    inputs.slots[rows] = step.slots
    inputs.samples[rows] = step.samples
    inputs.iterations[rows] = 1
    inputs.iterations[rows[num_prefills:]] = step.counts[num_prefills:]
    inputs.tables[rows] = policy.tables(step.slots)
    sampling = np.full(len(inputs.lengths), GREEDY_ROW)
    sampling[rows] = slots.sampling[step.slots]

    at = 0
    for row in range(num_prefills):
        slot, start, count = step.slots[row], step.starts[row], step.counts[row]
        inputs.tokens[at : at + count] = slots.tokens[slot, start : start + count]
        inputs.positions[at : at + count] = np.arange(start, start + count)
        inputs.token_rows[at : at + count] = row
        if slots.prompt_logprobs[slot]:
            targets = slots.tokens[slot, start + 1 : start + count + 1].copy()
            targets[max(0, slots.prompt_length[slot] - start - 1) :] = -1
            inputs.prompt_targets[at : at + count] = targets
        at += count
        inputs.query_starts[row + 1 :] = at
        inputs.last_tokens[row] = at - 1

    decodes = slice(Tp, Tp + step.num_decodes)
    slot, position = step.slots[num_prefills:], step.starts[num_prefills:]
    known = position < slots.known[slot]
    inputs.tokens[decodes] = np.where(known, slots.tokens[slot, position], FROM_DEVICE)
    inputs.positions[decodes] = position
    inputs.token_rows[decodes] = rows[num_prefills:]
    inputs.last_tokens[rows[num_prefills:]] = np.arange(Tp, Tp + step.num_decodes)
    return replace(inputs, sampling=SamplingArrays.columns(sampling)), rows


def empty_step_inputs(
    Tp: int, Sd: int, prefill_rows: int, num_slots: int, table_width: int
) -> StepInputs:
    """A step in which all is padding: what warm-up runs."""
    Sp = prefill_rows if Tp else 0
    T, S = Tp + Sd, Sp + Sd
    zeros = functools.partial(np.zeros, dtype=np.int32)
    return StepInputs(
        tokens=zeros(T),
        positions=zeros(T),
        token_rows=np.full(T, S, np.int32),
        query_starts=zeros(Sp + 1),
        lengths=zeros(S),
        last_tokens=zeros(S),
        slots=np.full(S, num_slots, np.int32),
        samples=zeros(S),
        iterations=zeros(S),
        prompt_targets=np.full(Tp, -1, np.int32),
        tables=zeros((S, table_width)),
        sampling=SamplingArrays.columns(np.full(S, GREEDY_ROW)),
    )


def pack(inputs: StepInputs) -> np.ndarray:
    """All arrays of a step as one [n] int32: one transfer instead of one for each array."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(inputs)])


def unpack(packed: jax.Array, like: StepInputs) -> StepInputs:
    """The inverse of `pack` on the device, given arrays of the same shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        jax.lax.bitcast_convert_type(packed[end - leaf.size : end], leaf.dtype).reshape(leaf.shape)
        for end, leaf in zip(ends, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)
