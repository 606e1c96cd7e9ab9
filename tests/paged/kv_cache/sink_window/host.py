"""Host half of the toy policy: two block pools, and which blocks of them a sequence holds."""

from dataclasses import dataclass

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.usage import Usage

SINK, WINDOW = POOLS = "sink", "window"
UNITS_PER_CALL = 8


@dataclass(frozen=True)
class Options:
    """sink_tokens, window_tokens: that a token attends to. host_sequences: whose worst case the
    host's memory holds; None: max_num_seqs."""

    sink_tokens: int = 4
    window_tokens: int = 10
    host_sequences: int | None = None

    def on_host(self, config: CacheConfig) -> int:
        return config.max_num_seqs if self.host_sequences is None else self.host_sequences


@dataclass(frozen=True)
class Layout:
    """Blocks of a sequence at most, `of_sequence`, and of each pool, `num_blocks` with the null
    block; in the order of POOLS. A table is [tokens at admission, first window block, blocks]."""

    page_size: int
    sink_tokens: int
    window_tokens: int
    of_sequence: tuple[int, int]
    num_blocks: tuple[int, int]

    @classmethod
    def of(cls, config: CacheConfig, model: ShardedModel) -> "Layout":
        P, options = config.page_size, config.policy_options
        in_step = max(config.max_num_batched_tokens, config.multi_step)
        longest = -(-(config.max_model_len - options.sink_tokens) // P)
        window = min(-(-(options.window_tokens - 1 + in_step) // P) + 1, longest)
        of_sequence = options.sink_tokens // P, window
        token = model.kv_token_bytes(config.kv_dtype)
        shard = model.shard
        slot_values = shard.num_kv_heads * (shard.num_layers * shard.head_dim + 1)
        state = 4 * config.max_num_seqs * slot_values * model.num_shards
        blocks = max(0, config.kv_cache_tokens * token - state) // (P * token)
        sinks = blocks * of_sequence[0] // sum(of_sequence)
        num_blocks = sinks + 1, blocks - sinks + 1
        return cls(P, options.sink_tokens, options.window_tokens, of_sequence, num_blocks)

    def needed(self, num_tokens, first):
        """Blocks [2, n] of sequences that will have `num_tokens` [n], the windows from logical
        block `first` [n] on."""
        sinks = -(-np.minimum(num_tokens, self.sink_tokens) // self.page_size)
        ends = -(-np.maximum(num_tokens - self.sink_tokens, 0) // self.page_size)
        return np.stack([sinks, np.clip(ends - first, 0, self.of_sequence[1])])


@dataclass
class Held:
    """Blocks of a sequence by pool; the window's begin with logical block `first`. room: tokens
    that it was promised.  computed: tokens that are written.  prompt_length: of its tokens."""

    blocks: dict[str, list[int]]
    first: int = 0
    room: int = 0
    computed: int = 0
    prompt_length: int = 0
    key: int = -1  # of its slot's state, if it was swapped out

    def copy(self, blocks: dict[str, list[int]]) -> "Held":
        return Held(blocks, self.first, self.room, self.computed, self.prompt_length)


class SinkWindowHost:
    """Blocks are promised by `admit` and `append`, and taken and given back by `advance`."""

    def __init__(self, config: CacheConfig, model: ShardedModel):
        self.layout, self._watermark = Layout.of(config, model), config.watermark
        on_host = config.policy_options.on_host(config)
        unit_bytes = config.page_size * model.kv_token_bytes(config.kv_dtype)
        self.pools = tuple(
            Pool(
                name, num_blocks, on_host * most + 1, NULL_BLOCK, UNITS_PER_CALL,
                config.max_num_seqs, unit_bytes,
            )
            for name, num_blocks, most in zip(
                POOLS, self.layout.num_blocks, self.layout.of_sequence
            )
        )  # fmt: skip
        self._pools = {pool.name: BlockPool(pool.num_units) for pool in self.pools}
        self._host = {pool.name: BlockPool(max(2, pool.num_host_units)) for pool in self.pools}
        self._capacity = np.array([pool.capacity for pool in self._pools.values()])
        self._slots = [Held({SINK: [], WINDOW: []}) for _ in range(config.max_num_seqs)]
        self._moves, self._num_keys = Moves(), 0

    @property
    def table_width(self) -> int:
        return 2 + sum(self.layout.of_sequence)

    def observe(self, number: int, report) -> None:
        raise AssertionError("the device half reports nothing")

    def _promised(self, room: dict[int, int] | None = None) -> np.ndarray:
        """Blocks of each pool, once some slots have `room` for more tokens."""
        grown = [max(held.room, (room or {}).get(i, 0)) for i, held in enumerate(self._slots)]
        first = np.array([held.first for held in self._slots])
        return self.layout.needed(np.array(grown), first).sum(axis=1)

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        needed = self.layout.needed(np.array([num_tokens]), 0)[:, 0]
        return bool((num_sequences * needed <= self._capacity).all())

    def can_admit(self, sequences, keep_watermark: bool) -> bool:
        lengths = np.array([len(sequence.tokens) for sequence in sequences])
        needed = self.layout.needed(lengths, 0).sum(axis=1) + self._promised()
        kept = (self._watermark * self._capacity).astype(int) if keep_watermark else 0
        return bool((needed + kept <= self._capacity).all())

    def admit(self, slot: int, sequence) -> int:
        length, held = len(sequence.tokens), self._slots[slot]
        held.room, held.prompt_length = length, sequence.num_prompt_tokens
        return sequence.shared if sequence.donor else 0

    def can_append(self, slots, num_tokens) -> bool:
        room = dict(zip(slots.tolist(), num_tokens.tolist()))
        return bool((self._promised(room) <= self._capacity).all())

    def append(self, slots, num_tokens) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist()):
            self._slots[slot].room = max(self._slots[slot].room, count)

    def fork(self, parent: int, child: int) -> None:
        self._share(parent, child)
        self._moves.slot_copies.append((parent, child))

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        assert self._slots[parent].computed == num_tokens, "only what is computed can be shared"
        self._share(parent, child)
        self._moves.after.append((parent, child))

    def _share(self, parent: int, child: int) -> None:
        held = self._slots[parent]
        assert not any(self._slots[child].blocks.values()), f"slot {child} is not empty"
        for name, blocks in held.blocks.items():
            self._pools[name].share(np.array(blocks, np.int32))
        self._slots[child] = held.copy({name: [*blocks] for name, blocks in held.blocks.items()})

    def advance(self, number: int, slots, starts, ends) -> None:
        layout = self.layout
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist()):
            held = self._slots[slot]
            if start == end:
                continue  # it computes nothing, and its blocks may be still to come
            assert start == held.computed and end <= held.room, "a step beyond what was promised"
            unread = max(0, start - layout.window_tokens + 1 - layout.sink_tokens)
            gone = unread // layout.page_size - held.first
            self._release(WINDOW, held.blocks[WINDOW][:gone])
            del held.blocks[WINDOW][:gone]
            held.first += gone
            if start % layout.page_size:
                self._unshare(held, SINK if start < layout.sink_tokens else WINDOW)
            needed = layout.needed(np.array([end]), held.first)[:, 0]
            for name, count in zip(POOLS, needed.tolist()):
                blocks = held.blocks[name]
                blocks += self._pools[name].allocate(count - len(blocks)).tolist()
            held.computed = end

    def _unshare(self, held: Held, name: str) -> None:
        """Copy-on-write of the last block."""
        last, pool = held.blocks[name][-1], self._pools[name]
        if pool.refcounts[last] > 1:
            held.blocks[name][-1] = int(pool.allocate(1)[0])
            self._release(name, [last])
            self._moves.copy(name, [(last, held.blocks[name][-1])])

    def _release(self, name: str, blocks: list[int]) -> None:
        self._pools[name].release(np.array(blocks, np.int32))

    def free(self, slot: int) -> None:
        for name, blocks in self._slots[slot].blocks.items():
            self._release(name, blocks)
        self._slots[slot] = Held({SINK: [], WINDOW: []})
        self._moves.release(slot)

    def _distinct(self, owners: list[Held], name: str) -> np.ndarray:
        return np.unique(np.array([b for held in owners for b in held.blocks[name]], np.int32))

    def can_swap_out(self, slots) -> bool:
        owners = [self._slots[slot] for slot in slots]
        return all(
            pool.can_allocate(len(self._distinct(owners, name)))
            for name, pool in self._host.items()
        )

    def swap_out(self, slots) -> list[Held]:
        owners = [self._slots[slot] for slot in slots]
        swapped = self._moved(owners, self._host, self._moves.export)
        for slot, held in zip(slots, swapped):
            held.key = self._num_keys
            self._num_keys += 1
            self._moves.export_slot(slot, held.key)
        for slot in slots:
            self.free(slot)
        return swapped

    def _moved(self, owners: list[Held], to: dict[str, BlockPool], move) -> list[Held]:
        """The same sequences in blocks of other pools, shared as they were."""
        moved = [held.copy({}) for held in owners]
        for name, pool in to.items():
            blocks = self._distinct(owners, name)
            taken = pool.allocate(len(blocks))
            move(name, zip(blocks.tolist(), taken.tolist()))
            for old, new in zip(owners, moved):
                at = np.searchsorted(blocks, old.blocks[name])
                new.blocks[name] = taken[at].tolist()
                pool.share(taken[at])
            pool.release(taken)  # of the reference with which it was taken
        return moved

    def can_swap_in(self, swapped: list[Held], keep_watermark: bool) -> bool:
        room, first = np.array([(held.room + 1, held.first) for held in swapped]).T
        needed = self.layout.needed(room, first).sum(axis=1) + self._promised()
        return bool((needed <= self._capacity).all())

    def swap_in(self, swapped: list[Held], sequences) -> None:
        moved = self._moved(swapped, self._pools, self._moves.bring)
        for sequence, old, new in zip(sequences, swapped, moved):
            self._slots[sequence.slot] = new
            self._moves.slot_imports.append((old.key, sequence.slot))
        self._release_on_host(swapped)

    def drop_swapped(self, swapped: list[Held]) -> None:
        self._moves.dropped += [held.key for held in swapped]
        self._release_on_host(swapped)

    def _release_on_host(self, swapped: list[Held]) -> None:
        for held in swapped:
            for name, blocks in held.blocks.items():
                self._host[name].release(np.array(blocks, np.int32))

    def take_moves(self) -> Moves:
        moves, self._moves = self._moves, Moves()
        return moves

    def tables(self, slots, out: np.ndarray) -> None:
        out[:] = NULL_BLOCK
        window = 2 + self.layout.of_sequence[0]
        for row, slot in enumerate(slots.tolist()):
            held = self._slots[slot]
            out[row, :2] = held.prompt_length, held.first
            out[row, 2 : 2 + len(held.blocks[SINK])] = held.blocks[SINK]
            out[row, window : window + len(held.blocks[WINDOW])] = held.blocks[WINDOW]

    def usage(self) -> Usage:
        layout, P = self.layout, self.layout.page_size
        held = P * sum(len(blocks) for h in self._slots for blocks in h.blocks.values())
        used = P * sum(pool.num_used for pool in self._pools.values())
        tokens = sum(
            min(h.computed, layout.sink_tokens)
            + max(0, h.computed - layout.sink_tokens - h.first * P)
            for h in self._slots
            if any(h.blocks.values())
        )
        return Usage(
            token_states=min(tokens, used), reserved=0, internal=used - min(tokens, used),
            external=0, free=P * sum(pool.num_free for pool in self._pools.values()),
            shared=held - used,
            bytes={p.name: self._pools[p.name].num_used * p.unit_bytes for p in self.pools},
        )  # fmt: skip

    def held(self) -> dict[str, np.ndarray]:
        on_device = {name: np.flatnonzero(p.refcounts) for name, p in self._pools.items()}
        on_host = {f"host {name}": np.flatnonzero(p.refcounts) for name, p in self._host.items()}
        return on_device | on_host

    def owners(self) -> dict[str, np.ndarray]:
        return {}

    def gauges(self, report, slots, contexts) -> dict[str, float]:
        return {}

    def check(self) -> None:
        for name, pool in self._pools.items():
            blocks = [block for held in self._slots for block in held.blocks[name]]
            owners = np.bincount(np.array(blocks, int), minlength=pool.num_blocks)
            assert (owners == pool.refcounts).all(), f"{name} has other owners than are counted"
            pool.check()
            self._host[name].check()
        for held in self._slots:
            promised = self.layout.needed(np.array([held.room]), held.first)[:, 0].tolist()
            counts = [len(blocks) for blocks in held.blocks.values()]
            assert counts[0] <= promised[0] and counts[1] <= promised[1], "more than was promised"

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        return [(name, *op) for name, p in self._pools.items() for op in p.drain_operations()]
