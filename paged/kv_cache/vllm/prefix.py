"""The prefix cache over block tables: blocks of a sequence that other sequences may share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.blocks.block_table import BlockTables
from paged.blocks.prefix_cache import PrefixCache, chain
from paged.kv_cache.parts import Parts
from paged.requests.sequence import Sequence


@dataclass(frozen=True)
class Found:
    """A cached prefix that a sequence can continue.

    blocks: [n] int32 full blocks.
    key: key of the last full block, or the group's root.
    tail: [0 or 1] int32, the pinned block with the tokens after the full blocks.
    num_tokens: tokens of the prefix.
    end: `end_key` of the prefix.
    num_cached: number of cached full blocks; more than in `blocks` if the policy cannot resume
        at the last one.
    """

    blocks: np.ndarray
    key: bytes
    tail: np.ndarray
    num_tokens: int
    end: bytes
    num_cached: int


def end_key(key: bytes, tail: bytes) -> bytes:
    """Key of a prefix: the key of its full blocks, of fixed length, and its tail's token bytes."""
    return key + tail


class Prefixes:
    """Publishes full blocks, looks up cached prefixes, and keeps pinned blocks.

    can_resume: `end_key` of a prefix -> whether the policy keeps all other state that a sequence
        needs to continue the prefix. A sequence can always start without a prefix.
    pins: [num_blocks] number of pins that reference each block.
    num_pinned: distinct blocks of all pins.
    num_references: references of all pins.
    """

    def __init__(
        self, cache: PrefixCache, pool: BlockPool, tables: BlockTables, can: Parts,
        can_resume: Callable[[bytes], bool],
    ):  # fmt: skip
        self.cache, self._pool, self._tables = cache, pool, tables
        self._can, self._can_resume = can, can_resume
        num_slots = len(tables.blocks)
        self._published = np.zeros(num_slots, np.int64)  # published blocks of each slot
        self._keys = [b""] * num_slots  # key of each slot's published prefix
        self.pins = np.zeros(pool.num_blocks, np.int64)  # references of pins to each block
        self.num_pinned = 0
        self.num_references = 0

    def links(self, sequence: Sequence) -> list[tuple[bytes, bytes]]:
        """The `chain` of the full blocks to prefill. The last token is excluded: it must be
        computed, because the next token is sampled from its logits."""
        if sequence.block_keys is None:
            tokens = sequence.prefill_tokens(self._can.replays)[:-1]
            root = sequence.group.cache_root
            sequence.block_keys = list(chain(tokens, self._tables.page_size, root))
        return sequence.block_keys

    def find(self, sequence: Sequence) -> Found:
        """The longest cached prefix that the sequence can continue."""
        root, nothing = sequence.group.cache_root, np.zeros(0, np.int32)
        afresh = Found(nothing, root, nothing, 0, root, 0)
        # Log-probabilities of a prompt need all of its tokens computed.
        if sequence.group.misses_prompt_logprobs or not self._can.shares(
            sequence.num_prompt_tokens
        ):
            return afresh
        links, P = self.links(sequence), self._tables.page_size
        cached, _ = self.cache.find(links)
        blocks = np.array(cached, np.int32)
        tokens = sequence.prefill_tokens(self._can.replays)[:-1]
        for count in range(len(cached), -1, -1):
            key = links[count - 1][0] if count else root
            rest = tokens[count * P : (count + 1) * P]
            block, size = self.cache.find_tail(key, rest.tobytes()) or (NULL_BLOCK, 0)
            end = end_key(key, rest.tobytes()[:size])
            if size and self._can_resume(end):
                in_tail, tail = size // tokens.itemsize, np.array([block], np.int32)
                return Found(blocks[:count], key, tail, count * P + in_tail, end, len(cached))
            if count and self._can_resume(key):
                return Found(blocks[:count], key, nothing, count * P, key, len(cached))
        return Found(nothing, root, nothing, 0, root, len(cached))

    def adopt(self, slot: int, sequence: Sequence) -> int:
        """The empty `slot` shares the sequence's cached prefix. Returns the prefix's length."""
        found = self.find(sequence)
        self._published[slot], self._keys[slot] = len(found.blocks), found.key
        self._tables.adopt(slot, np.append(found.blocks, found.tail), found.num_tokens)
        sequence.block_keys = None
        return found.num_tokens

    def restart(self, slot: int, sequence: Sequence) -> None:
        """Reset `slot` to no published blocks. `confirm` skips blocks that others published."""
        self._published[slot], self._keys[slot] = 0, sequence.group.cache_root

    def fork(self, parent: int, child: int) -> None:
        self._published[child], self._keys[child] = self._published[parent], self._keys[parent]

    def confirm(self, slots, num_tokens, tokens) -> None:
        page_size = self._tables.page_size
        full, published = num_tokens // page_size, self._published[slots]
        rows = np.flatnonzero(full > published)
        work = zip(slots[rows].tolist(), published[rows].tolist(), full[rows].tolist())
        for slot, first, last in work:
            new = tokens[slot, first * page_size : last * page_size]
            blocks = self._tables.blocks[slot, first:last].tolist()
            for block, (key, content) in zip(blocks, chain(new, page_size, self._keys[slot])):
                self.cache.publish(block, key, content)
                self._keys[slot] = key
        self._published[slots[rows]] = full[rows]

    def pin(self, slot: int, tokens, root: bytes) -> bytes:
        """Keep the blocks of the prompt `tokens` of `slot` for good. Returns its `end_key`."""
        cache, page_size = self.cache, self._tables.page_size
        found, last = cache.find(chain(tokens, page_size, root))
        full, key = len(tokens) // page_size, last or root
        assert len(found) == full, f"only {len(found)} of {full} blocks are published"
        tail, blocks = tokens[full * page_size :].tobytes(), np.array(found, np.int32)
        _, pinned = cache.find_tail(key, tail) or (NULL_BLOCK, 0)
        if pinned < len(tail):
            block = self._tables.blocks[slot, full]
            cache.pin_tail(key, tail, int(block))
            blocks = np.append(blocks, block)
        owners = self._pool.refcounts[blocks] - np.isin(blocks, self._tables.blocks[slot])
        self.num_pinned += int((owners == 0).sum())
        self.num_references += len(blocks)
        self.pins[blocks] += 1
        self._pool.share(blocks)
        return end_key(key, tail)
