"""Host state of running sequences, as arrays over slots.

A slot is a small integer that a sequence keeps from admission to its end or preemption. On the
device the sequence's state has the same index. With arrays, a step over hundreds of running
sequences costs a few vector operations. In the `slot_mapping` of the attention ops, as in the
papers, a slot is the room for one token in the KV cache instead.
"""

import numpy as np

from models.sampling import BEAM, GREEDY_ROW
from paged.requests.sequence import Sequence, Status


def sampling_row(sequence: Sequence) -> np.ndarray:
    """A sequence's sampling parameters for the device: one `SAMPLING_ROW`."""
    how = sequence.group.sampling
    row = np.array(GREEDY_ROW)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                 "presence_penalty", "frequency_penalty"):  # fmt: skip
        row[name] = getattr(how, name)
    row["seed"] = sequence.seed
    row["prompt_length"] = sequence.num_prompt_tokens
    row["num_bias"] = len(how.logit_bias)
    if how.forced_output:
        row["forced"] = sequence.num_prompt_tokens + len(how.forced_output)
    row["logprobs"] = BEAM if how.is_beam_search else how.logprobs is not None or how.ranks
    return row


class Slots:
    """State of all slots, as arrays [num_slots].

    tokens:   [num_slots, max_tokens] int32 prompt and output, up to `known`.
    length:   tokens that exist once all dispatched steps have run, sampled ones included.
    known:    tokens that the host has read; the others are in flight.
    computed: tokens whose keys and values are written once all dispatched steps have run.
    prefill:  tokens that are computed in prefill rows. The known output beyond them is replayed:
              decoded again, a token at a time, because a policy that drops, compresses or skips
              tokens would treat it differently in a prompt.
    limit:    length at which generation ends.

    A sequence that generates while the host runs ahead:

        0                             known                        length
        |------ read by the host -----|-------- in flight ---------|
        |--------------- keys and values written ---------------|
                                                                computed

    A sequence whose prompt is being computed:

        0                                                          known = length
        |-------------------- read by the host --------------------|
        |--- keys and values written ---|
                                        computed

    With tokens in flight, computed = length - 1: the next step computes the newest token. Otherwise
    computed < length, with two exceptions. A beam has computed = length once its step is
    dispatched, since the host chooses its next token. For a held sequence, computed includes the
    tokens shared with its parent, which computes them for both. These may be all tokens.

    generation: number of the slot's earlier owners, to recognise results of an earlier owner.
    watched: whether the host must inspect each new token: for the first token's time, stop
        strings, stop tokens or streaming.
    beam: whether the sequence is a beam; its group's search chooses the next token.
    held: whether the sequence waits for its parent to compute the shared tokens.
    adapter: adapter slot on the device, -1 for none.
    sampling: [num_slots] `SAMPLING_ROW`, parameters of the next token's sampling.
    sampling_bits: [num_slots, n] int32, the same memory.
    """

    def __init__(self, num_slots: int, max_tokens: int, replays: bool = False):
        """replays: whether known output is replayed instead of prefilled."""
        self.num_slots, self.replays = num_slots, replays
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.length = np.zeros(num_slots, np.int64)
        self.known = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.prefill = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, bool)
        self.watched = np.zeros(num_slots, bool)
        self.beam = np.zeros(num_slots, bool)
        self.held = np.zeros(num_slots, bool)
        self.adapter = np.full(num_slots, -1)
        self.prompt_logprobs = np.zeros(num_slots, bool)
        self.ignore_eos = np.zeros(num_slots, bool)
        self.sampling = np.full(num_slots, GREEDY_ROW)
        self.sampling_bits = self.sampling.view(np.int32).reshape(num_slots, -1)
        self.owner: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def newest(self) -> np.ndarray:
        """The last known token of each slot [num_slots]."""
        return self.tokens[np.arange(self.num_slots), self.known - 1]

    def generate(self, slots: np.ndarray) -> np.ndarray:
        """bool [n]: whether each of `slots` [n] has only its newest token to compute, and then
        samples the next."""
        length = self.length[slots]
        left = length - self.computed[slots]
        return (left == 1) & (length < self.limit[slots]) & ~self.held[slots]

    def prefill_left(self, slots: np.ndarray) -> np.ndarray:
        """Tokens [n] of `slots` [n] left for prefill rows. 0 if one token is left, which a decode
        row computes."""
        left = np.minimum(self.prefill[slots], self.length[slots]) - self.computed[slots]
        return np.where(left > 1, left, 0)

    def replay(self, slots: np.ndarray) -> np.ndarray:
        """bool [n]: whether each of `slots` [n] replays in its next decode row: known output
        follows the token that it computes, so nothing is sampled."""
        behind = self.length[slots] - self.computed[slots] > 1
        return behind & (self.prefill_left(slots) == 0) & ~self.held[slots]

    def decoded(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Record k steps, each of which computed the newest token of every one of `slots` [n].
        tokens: [k, n], the next tokens read from the device."""
        steps = len(tokens)
        self.tokens[slots[:, None], self.known[slots][:, None] + np.arange(steps)] = tokens.T
        for count in (self.known, self.length, self.computed):
            count[slots] += steps

    def dispatched(self, slots: np.ndarray) -> None:
        """Record a dispatched step that computes the newest token of every one of `slots` [n]."""
        for count in (self.length, self.computed):
            count[slots] += 1

    def acquire(self, sequence: Sequence) -> int:
        """Assign a slot to `sequence`. No tokens are computed yet."""
        slot, group = self._free[-1], sequence.group
        n = len(sequence.tokens)
        self.tokens[slot, :n] = sequence.tokens
        self.length[slot] = self.known[slot] = n
        self.computed[slot] = 0
        self.prompt_length[slot] = group.num_prompt_tokens
        self.prefill[slot] = len(sequence.prefill_tokens(self.replays))
        self.limit[slot] = group.limit
        self.active[slot] = True
        how = group.sampling
        self.watched[slot] = True  # at least until its first token
        self.beam[slot] = group.search is not None
        self.held[slot] = sequence.parent is not None
        self.adapter[slot] = group.adapter_slot
        self.prompt_logprobs[slot] = group.misses_prompt_logprobs
        self.ignore_eos[slot] = how.ignore_eos
        self.sampling[slot] = sampling_row(sequence)
        self.owner[slot] = sequence
        self._free.pop()
        sequence.slot, sequence.status = slot, Status.RUNNING
        return slot

    def release(self, sequence: Sequence, status: Status) -> None:
        """Free the slot. The sequence keeps its known tokens; tokens in flight are dropped."""
        slot = sequence.slot
        assert self.owner[slot] is sequence, f"slot {slot} belongs to another sequence"
        sequence.tokens, sequence.block_keys = self.known_tokens(slot), None
        sequence.slot, sequence.status = -1, status
        self.owner[slot] = None
        self.active[slot] = False
        self.generation[slot] += 1
        self._free.append(slot)

    def sequence_in(self, slot: int) -> Sequence:
        sequence = self.owner[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def known_tokens(self, slot: int) -> np.ndarray:
        return self.tokens[slot, : self.known[slot]].copy()

    def check(self) -> None:
        """Assert the invariants above, and that each slot is free or owned by one running sequence.
        All hold between any two calls of the engine."""
        active = np.flatnonzero(self.active)
        owned = [slot for slot in range(self.num_slots) if self.owner[slot] is not None]
        assert owned == active.tolist(), f"slots {active.tolist()} are active, {owned} have owners"
        assert sorted([*self._free, *owned]) == [*range(self.num_slots)], "a slot is lost or twice"
        for slot in owned:
            sequence = self.sequence_in(slot)
            runs = sequence.slot == slot and sequence.status is Status.RUNNING
            assert runs, f"slot {slot}: its sequence does not run in it"
            parent = sequence.parent
            held = bool(self.held[slot])
            assert held == (parent is not None), f"slot {slot}: held is {held}, its parent {parent}"
            assert parent is None or parent.status is Status.RUNNING, f"slot {slot}: no parent runs"

        def require(good: np.ndarray, what: str) -> None:
            bad = active[~good].tolist()
            assert not bad, f"slots {bad}: not {what}"

        length, known, computed = self.length[active], self.known[active], self.computed[active]
        most = np.where(self.beam[active] | self.held[active], length, length - 1)
        require(self.prompt_length[active] <= known, "prompt_length <= known")
        require(known <= length, "known <= length")
        require(length <= self.limit[active], "length <= limit")
        require((computed >= 0) & (computed <= most), "0 <= computed < length")
        require((known == length) | (computed == length - 1), "all but the newest computed")
