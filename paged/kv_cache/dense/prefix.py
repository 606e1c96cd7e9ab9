"""The prefix cache of the dense policy's host half: which blocks of a sequence others may find."""

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.blocks.block_table import BlockTables
from paged.blocks.prefix_cache import PrefixCache, chain
from paged.requests.sequence import Sequence


class Prefixes:
    """Publishes and finds full blocks, and keeps pinned ones.

    num_pinned: blocks that only pins keep from being free. num_references: of all pins.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, tables: BlockTables):
        self._cache, self._pool, self._tables = cache, pool, tables
        num_slots = len(tables.blocks)
        self._published = np.zeros(num_slots, np.int64)  # blocks of each slot
        self._keys = [b""] * num_slots  # of each slot's published prefix
        self.pins = np.zeros(pool.num_blocks, np.int64)  # references of pins to each block
        self.num_pinned = 0
        self.num_references = 0

    def find(self, sequence: Sequence) -> tuple[np.ndarray, bytes]:
        """Full blocks that hold a prefix of the sequence, and its key. They leave out the last
        token: it must be computed, for what comes after it."""
        root = sequence.group.cache_root
        # A prompt whose log-probabilities are asked for must be computed in full.
        if sequence.group.misses_prompt_logprobs:
            return np.zeros(0, np.int32), root
        if sequence.block_keys is None:
            page_size = self._tables.page_size
            sequence.block_keys = list(chain(sequence.tokens[:-1], page_size, root))
        blocks, key = self._cache.find(sequence.block_keys)
        return np.array(blocks, np.int32), key or root

    def adopt(self, slot: int, sequence: Sequence) -> int:
        """The empty `slot` becomes one more owner of what is known of a sequence: its tokens."""
        blocks, key = self.find(sequence)
        self._published[slot], self._keys[slot] = len(blocks), key
        num_tokens = len(blocks) * self._tables.page_size
        tail, in_tail = self._find_tail(sequence, key, num_tokens)
        self._tables.adopt(slot, np.append(blocks, tail), num_tokens + in_tail)
        sequence.block_keys = None
        return num_tokens + in_tail

    def _find_tail(self, sequence: Sequence, key: bytes, start: int) -> tuple[np.ndarray, int]:
        """The pinned block, if any, that holds the tokens from `start` on, and how many."""
        if not sequence.group.misses_prompt_logprobs:
            tokens = sequence.tokens[start:-1]
            if found := self._cache.find_tail(key, tokens.tobytes()):
                return np.array(found[:1], np.int32), found[1] // tokens.itemsize
        return np.zeros(0, np.int32), 0

    def restart(self, slot: int, sequence: Sequence) -> None:
        """Nothing of it is published: what others have published already is found so."""
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
                self._cache.publish(block, key, content)
                self._keys[slot] = key
        self._published[slots[rows]] = full[rows]

    def pin(self, slot: int, tokens, root: bytes) -> None:
        cache, page_size = self._cache, self._tables.page_size
        found, key = cache.find(chain(tokens, page_size, root))
        full = len(tokens) // page_size
        assert len(found) == full, f"only {len(found)} of {full} blocks are published"
        tail, held = tokens[full * page_size :].tobytes(), np.array(found, np.int32)
        _, pinned = cache.find_tail(key or root, tail) or (NULL_BLOCK, 0)
        if pinned < len(tail):
            block = self._tables.blocks[slot, full]
            cache.pin_tail(key or root, tail, int(block))
            held = np.append(held, block)
        owners = self._pool.refcounts[held] - np.isin(held, self._tables.blocks[slot])
        self.num_pinned += int((owners == 0).sum())
        self.num_references += len(held)
        self.pins[held] += 1
        self._pool.share(held)
