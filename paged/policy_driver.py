"""Both halves of a KV policy without an engine, for tests and for programs that time the halves."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import DevicePolicy, ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from paged.step_inputs import StepInputs, empty_step_inputs

Chunks = Sequence[tuple[int, int]]  # (slot, number of tokens) of a step's chunks


class HostDriver:
    """A host half with a sequence in each slot, and inputs of steps that compute these sequences.

    prompts: tokens of each sequence at admission.
    limits: most tokens of each sequence.
    number: the last step's number.
    computed: [slots] tokens computed.
    """

    def __init__(
        self, config: EngineConfig, model: ShardedModel, prompts: Sequence[int],
        limits: Sequence[int],
    ):  # fmt: skip
        self.config, self.host = config, policy_of(config.policy).host(config, model)
        self.number, self.computed = 0, np.zeros(len(prompts), np.int64)
        for slot, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            tokens = np.zeros(prompt, np.int32)
            group = SequenceGroup(str(slot), slot, tokens, SamplingParams(), 0, limit)
            self.host.admit(slot, group.sequences[0])

    def advance(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Advance the host half by a step that computes the tokens of `slots` up to `ends`."""
        self.number += 1
        self.host.append(slots, ends)
        self.host.advance(self.number, slots, self.computed[slots], ends)
        self.computed[slots] = ends
        assert not self.host.take_moves().facts()

    def prefill(self, slot: int, end: int) -> None:
        """Advance the host half by prefill steps of a prompt up to `end`, with chunks as large as a
        step allows."""
        while (start := int(self.computed[slot])) < end:
            chunk = min(end - start, self.config.max_num_batched_tokens)
            self.advance(np.array([slot]), np.array([start + chunk]))

    def inputs(self, chunks: Chunks, Tp: int, Sd: int) -> StepInputs:
        """Inputs of a greedy step that computes these chunks, padded to Tp and Sd tokens. Advances
        the host half by this step. Chunks of one token are decode rows if Sd > 0."""
        num_slots, prefill_rows = self.config.max_num_seqs, self.config.max_prefills_per_step
        inputs = empty_step_inputs(
            Tp, Sd, prefill_rows, num_slots, self.host.table_width, self.config.adapter_slots > 0
        )
        prefills = [chunk for chunk in chunks if chunk[1] > 1 or not Sd]
        decodes = [chunk for chunk in chunks if chunk not in prefills]
        ends = np.cumsum([0, *(count for _, count in prefills)])
        inputs.query_starts[:] = ends[-1]
        inputs.query_starts[: len(prefills)] = ends[:-1]
        rows = [(row, *chunk, int(ends[row])) for row, chunk in enumerate(prefills)]
        first = inputs.num_prefill_rows
        rows += [(first + row, *chunk, Tp + row) for row, chunk in enumerate(decodes)]
        for row, slot, count, at in rows:
            start = int(self.computed[slot])
            inputs.slots[row], inputs.lengths[row] = slot, start + count
            inputs.last_tokens[row] = at + count - 1
            inputs.samples[row] = inputs.iterations[row] = 1
            inputs.token_rows[at : at + count] = row
            inputs.positions[at : at + count] = np.arange(start, start + count)
        slots = np.array([slot for slot, _ in chunks])
        self.advance(slots, self.computed[slots] + [count for _, count in chunks])
        for row, slot, *_ in rows:
            self.host.tables(np.array([slot]), np.asarray(inputs.tables)[row : row + 1])
        return inputs

    def decode(self) -> StepInputs:
        """Inputs of a step that appends a token to every sequence. Advances the host half."""
        return self.inputs([(slot, 1) for slot in range(len(self.computed))], 0, len(self.computed))


def decode_inputs(config: EngineConfig, model: ShardedModel, contexts: Sequence[int]) -> StepInputs:
    """Inputs of a greedy decode step of every slot. contexts: each sequence's tokens afterwards."""
    driver = HostDriver(config, model, contexts, contexts)
    driver.advance(np.arange(len(contexts)), np.array(contexts) - 1)
    return driver.decode()


def attend(device: DevicePolicy, cache, inputs: StepInputs, q_LxTxHxD, k_LxTxKxD, v_LxTxKxD) -> Any:
    """A step's attention in all layers: `(cache, out [L, T, H, D])`."""
    cache, plan = device.begin_step(cache, inputs)

    def of_layer(cache, arguments):
        layer, q, k, v = arguments
        out, cache = device.attend(layer, q, k, v, cache, plan, inputs)
        return cache, out

    numbers = jnp.arange(len(q_LxTxHxD), dtype=jnp.int32)
    cache, out = jax.lax.scan(of_layer, cache, (numbers, q_LxTxHxD, k_LxTxKxD, v_LxTxKxD))
    return device.end_step(cache, plan, inputs), out
