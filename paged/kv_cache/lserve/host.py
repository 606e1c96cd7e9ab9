"""Host half of LServe's policy: the two-way paged KV cache (§3.2), a pool for each kind of head.

The vllm policy's host half manages the dense pool; a block is a page in each dense head. The
streaming pool holds windows. Sequences also have slot state on the device: their selected pages.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from paged.kv_cache.host import HostPolicy, Sizes
from paged.kv_cache.lserve.layout import DENSE, STREAMING, LServeLayout, layout_of
from paged.kv_cache.lserve.streaming_heads import StreamingHost
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.usage import Usage
from paged.kv_cache.vllm.host import VLLMHost, block_pool, blocks_suffice
from paged.kv_cache.vllm.prefix import Prefixes
from paged.requests.sequence import Sequence


class Swapped(NamedTuple):
    """Sequences in the host's memory.

    parts: results of each manager's `swap_out`.
    keys: keys of the sequences' slot states.
    """

    parts: list[Any]
    keys: list[int]


def pools_of(config: CacheConfig, layout: LServeLayout) -> tuple[Pool, ...]:
    """The pools of both kinds of heads. The host's memory has room for a longest sequence in every
    slot, because policies that replay output swap by default."""
    longest = layout.max_pages, layout.sink + layout.local + 1
    each = zip((DENSE, STREAMING), layout.num_blocks, longest, layout.unit_bytes)
    return tuple(
        block_pool(config, name, num_blocks, config.max_num_seqs * most + 1, unit_bytes)
        for name, num_blocks, most, unit_bytes in each
        if num_blocks
    )


def sizes(config: CacheConfig, model: ShardedModel) -> Sizes:
    layout = layout_of(config, model)
    blocks = layout.num_blocks[0] - 1

    def fits(num_tokens: int, num_sequences: int) -> bool:
        dense = blocks_suffice(blocks, layout.page_size, num_tokens, num_sequences)
        windows = num_sequences * layout.blocks_in_window(num_tokens)
        return dense and (not layout.streams or windows <= layout.window_blocks(layout.quota))

    return Sizes(pools_of(config, layout), layout.table_width, fits)


class LServeHost(HostPolicy):
    """Coordinates the managers of the two pools, and moves slot states with their sequences.

    dense, streaming: managers of the two pools; `streaming` is None if no head streams.
    managers: both, without None.
    """

    def __init__(self, config: CacheConfig, model: ShardedModel):
        self.layout = layout_of(config, model)
        self.pools = pools_of(config, self.layout)
        self.streaming = None
        if self.layout.streams:
            self.streaming = StreamingHost(self.pools[1], self.layout, config.prefix_caching)
        self.dense = VLLMHost(self.pools[0], config, self._can_resume)
        self.managers = [part for part in (self.dense, self.streaming) if part is not None]
        self._can = config.parts
        self._prompt_length = np.zeros(config.max_num_seqs, np.int32)
        self.moves, self._keys = Moves(), itertools.count()

    @property
    def table_width(self) -> int:
        return self.layout.table_width

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        return all(part.fits(num_tokens, num_sequences) for part in self.managers)

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        return all(part.can_admit(sequences, keep_watermark) for part in self.managers)

    def admit(self, slot: int, sequence: Sequence) -> int:
        self._prompt_length[slot] = sequence.num_prompt_tokens
        if self.streaming:
            self.streaming.admit(slot, sequence)
            if self.dense.prefixes and not sequence.parent:
                self._resume(slot, sequence, self.dense.prefixes, self.streaming)
        return self.dense.admit(slot, sequence)

    def _can_resume(self, end: bytes) -> bool:
        """See `Prefixes`. Only streaming heads need a checkpoint."""
        return self.streaming is None or self.streaming.checkpoints.has(end)

    def _resume(
        self, slot: int, sequence: Sequence, prefixes: Prefixes, streaming: StreamingHost
    ) -> None:
        """Share the window at the end of the cached prefix. Plan checkpoints after the prompt's
        last full block and after its last cached block, unless they exist."""
        found = prefixes.find(sequence)
        if found.num_tokens:
            streaming.adopt(slot, found.num_tokens, found.end)
        if self._can.shares(sequence.num_prompt_tokens):
            links = prefixes.links(sequence)
            ends = {found.num_cached, len(links)}
            full = [end for end in sorted(ends) if end > len(found.blocks)]
            streaming.checkpoints.begin(slot, [(end, links[end - 1][0]) for end in full])

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """Other sequences may share prefilled tokens, and tokens decoded without page selection,
        but no tokens of sparsely prefilled prompts."""
        prompts, layout = self._prompt_length[slots], self.layout
        if layout.selects:
            all_read = np.maximum(prompts, layout.all_below * layout.page_size)
            num_tokens = np.minimum(num_tokens, all_read)
        if self._can.unshared_from:
            num_tokens = np.where(prompts < self._can.unshared_from, num_tokens, 0)
        self.dense.confirm(slots, num_tokens, tokens)
        if self.streaming:
            self.streaming.checkpoints.confirm(slots)

    def pin(self, slot: int, tokens: np.ndarray, root: bytes) -> None:
        end = self.dense.pin(slot, tokens, root)
        if self.streaming:
            self.streaming.pin_window(slot, len(tokens), end)

    def can_append(self, slots, num_tokens) -> bool:
        return all(part.can_append(slots, num_tokens) for part in self.managers)

    def append(self, slots, num_tokens) -> None:
        for part in self.managers:
            part.append(slots, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        for part in self.managers:
            part.fork(parent, child)
        self._prompt_length[child] = self._prompt_length[parent]
        self.moves.copy_slot(parent, child)

    def advance(self, number: int, slots, starts, ends) -> None:
        for part in self.managers:
            part.advance(number, slots, starts, ends)

    def decode_steps(self, number: int, slots, num_tokens, most: int) -> list[Usage]:
        """See `paged.decode_runs.SteadyHost`. A page freed by a window makes no room for requests:
        admission reserves whole windows."""
        if self.streaming is None:
            return self.dense.decode_steps(number, slots, num_tokens, most)
        usages = []
        if self.streaming.can_append(slots, num_tokens):
            for usage in self.dense.decode_steps(number, slots, num_tokens, most):
                self.streaming.advance(number, slots, num_tokens - 1, num_tokens)
                usages.append(usage + self.streaming.usage())
                num_tokens = num_tokens + 1
        return usages

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        for part in self.managers:
            part.computed(parent, child, num_tokens)
        self.moves.after.append((parent, child))

    def free(self, slot: int) -> None:
        for part in self.managers:
            part.free(slot)
        self.moves.release(slot)

    def can_swap_out(self, slots: list[int]) -> bool:
        return all(part.can_swap_out(slots) for part in self.managers)

    def swap_out(self, slots: list[int]) -> Swapped:
        keys = [next(self._keys) for _ in slots]
        for slot, key in zip(slots, keys):
            self.moves.export_slot(slot, key)
        swapped = [part.swap_out(slots) for part in self.managers]
        for slot in slots:
            self.moves.release(slot)
        return Swapped(swapped, keys)

    def can_swap_in(self, swapped: Swapped, keep_watermark: bool) -> bool:
        each = zip(self.managers, swapped.parts)
        return all(part.can_swap_in(of_part, keep_watermark) for part, of_part in each)

    def swap_in(self, swapped: Swapped, sequences: list[Sequence]) -> None:
        for part, of_part in zip(self.managers, swapped.parts):
            part.swap_in(of_part, sequences)
        slots = [sequence.slot for sequence in sequences]
        self._prompt_length[slots] = [sequence.num_prompt_tokens for sequence in sequences]
        self.moves.slot_imports += zip(swapped.keys, slots)

    def drop_swapped(self, swapped: Swapped) -> None:
        for part, of_part in zip(self.managers, swapped.parts):
            part.drop_swapped(of_part)
        self.moves.dropped += swapped.keys

    def take_moves(self) -> Moves:
        moves = super().take_moves()
        for part in self.managers:  # each part has its own pools
            of_part = part.take_moves()
            moves.exports |= of_part.exports
            moves.imports |= of_part.imports
            moves.copies |= of_part.copies
        return moves

    def tables(self, slots, out: np.ndarray) -> None:
        most = self.layout.max_pages
        out[:, :most] = self.dense.block_tables.blocks[slots]
        if self.streaming:
            out[:, most:-1] = self.streaming.windows(slots)
        out[:, -1] = self._prompt_length[slots]

    def usage(self) -> Usage:
        usage = self.dense.usage()
        return usage + self.streaming.usage() if self.streaming else usage

    def free_tokens(self) -> int:
        """Of the dense heads. The pool of the streaming heads has room for the windows of
        max_num_seqs sequences."""
        return self.dense.free_tokens()

    def used_units(self) -> dict[str, np.ndarray]:
        return {name: units for part in self.managers for name, units in part.used_units().items()}

    def owners(self) -> dict[str, np.ndarray]:
        return {name: owners for part in self.managers for name, owners in part.owners().items()}

    def gauges(self, report, slots, contexts) -> dict[str, float]:
        """selected_tokens: tokens that a query of a dense head reads in a layer with page
        selection, summed over slots (§3.5)."""
        P, newest = self.layout.page_size, contexts - 1
        selected = (self.layout.selected - 1) * P + newest % P + 1
        read = np.where(newest // P >= self.layout.all_below, selected, contexts)
        return {"selected_tokens": int(read.sum())}

    def check(self) -> None:
        for part in self.managers:
            part.check()

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        return [operation for part in self.managers for operation in part.drain_operations()]
