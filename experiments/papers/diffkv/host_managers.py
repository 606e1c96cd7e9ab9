"""Page management on the device and, for comparison, on the host (DiffKV §5.3, Fig. 13).

A `Case` is the state of sequences with Llama-3-8B's heads after compression. In the prompt phase
all heads get pages for the worst case, plan the pages that they keep, and return the surplus. In a
step of the generation phase each head adds a token of high or low precision. The device runs the
policy's page manager, which tests compare with lists of pages.

`ThreadedManager` is fast host code and must hold the same pages. Its threads divide the sequences
and work on whole arrays. One thread computes the numbers of pages and their prefix sums over the
sequences. The host's time includes the copy of token counts from the device, and the copy of tables
or new pages to the device.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.diffkv.systems import PAGE_SIZE
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.page_manager import Pages
from pallas_kernels.quantized_attention import PageFormat, parse_format
from pallas_kernels.specs import HEADS

TOKENS, MORE = 1024, 256  # tokens of a prompt; most generated tokens
HEADS_8B = 32 * HEADS["llama-3-8b"].K
CHECKED_STEPS = 20


class ThreadedManager:
    """Page management on the host, in arrays like those of `page_manager.Pages`.

    high, low: numbers of pages [S, H] in each precision.
    """

    def __init__(self, num_pages: int, num_slots: int, num_heads: int, width: int, threads: int):
        self.free_list = np.arange(num_pages, dtype=np.int32)
        self.start, self.free = 0, num_pages
        self.tables = np.zeros((num_slots, num_heads, width), np.int32)
        self.high, self.low = np.zeros((2, num_slots, num_heads), np.int32)
        self._threads = ThreadPoolExecutor(threads)

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(work, range(len(self.tables))))

    def _take(self, counts) -> np.ndarray:
        """Removes `counts` pages for each sequence from the free list. Returns the index of each
        sequence's first page in the free list."""
        ends = np.cumsum(counts)
        first = self.start + ends - counts
        self.start = int(self.start + ends[-1]) % len(self.free_list)
        self.free -= int(ends[-1])
        return first

    def _run(self, first: int, count: int) -> np.ndarray:
        return self.free_list[(first + np.arange(count)) % len(self.free_list)]

    def prompts(self, allocated: int, high_SxH, low_SxH) -> np.ndarray:
        """Allocates, plans and recycles the pages of all prompts; returns the tables."""
        S, H, M = self.tables.shape
        first, column = self._take(np.full(S, H * allocated)), np.arange(allocated)

        def plan(slot: int) -> np.ndarray:
            pages = self._run(first[slot], H * allocated).reshape(H, allocated)
            high, low = high_SxH[slot, :, None], low_SxH[slot, :, None]
            table = self.tables[slot]
            table[:, :allocated] = pages
            # Low precision starts with the last page, at the right end of the table.
            mirrored = M - allocated + column
            table[:, mirrored] = np.where(column >= allocated - low, pages, table[:, mirrored])
            self.high[slot], self.low[slot] = high_SxH[slot], low_SxH[slot]
            return pages[(column >= high) & (column < allocated - low)]

        surplus = self._each(plan)
        ends = np.cumsum([len(each) for each in surplus])
        end, N = self.start + self.free, len(self.free_list)

        def recycle(slot: int) -> None:
            each = surplus[slot]
            self.free_list[(end + ends[slot] - len(each) + np.arange(len(each))) % N] = each

        self._each(recycle)
        self.free += int(ends[-1])
        return self.tables

    def grow(self, high_SxH, low_SxH) -> np.ndarray:
        """The new pages of all heads [S, H]; entries of heads without a new page are undefined."""
        either, M = high_SxH | low_SxH, self.tables.shape[2]
        counts = either.sum(1)
        first, pages = self._take(counts), np.zeros(either.shape, np.int32)

        def plan(slot: int) -> None:
            (heads,) = np.nonzero(either[slot])
            pages[slot, heads] = self._run(first[slot], counts[slot])
            column = np.where(
                high_SxH[slot, heads], self.high[slot, heads], M - 1 - self.low[slot, heads]
            )
            self.tables[slot, heads, column] = pages[slot, heads]
            self.high[slot] += high_SxH[slot]
            self.low[slot] += low_SxH[slot]

        self._each(plan)
        return pages


class Case:
    """Sequences after compression. tokens: kept tokens [S, H, 2] in high and in low precision."""

    def __init__(self, sequences: int, seed: int):
        self.sequences, rng = sequences, np.random.default_rng(seed)
        D = HEADS["llama-3-8b"].D
        # A page is as large as PAGE_SIZE tokens in K8V8.
        words = PageFormat.holding(PAGE_SIZE, *parse_format("K8V8", D, "float16")).words
        formats = (parse_format(name, D, "float16") for name in ("K8V4", "K4V2"))
        self.sizes = tuple(PageFormat(*each, words).tokens for each in formats)
        self.allocated = -(-TOKENS // PAGE_SIZE) + 1
        self.width = -(-(TOKENS + MORE) // PAGE_SIZE) + 1
        self.num_pages = sequences * HEADS_8B * self.allocated * 9 // 8
        shape = sequences, HEADS_8B
        high = rng.integers(64, TOKENS // 2, shape)
        self.tokens = np.stack([high, rng.integers(0, TOKENS - high)], -1).astype(np.int32)
        # A quarter of the heads add tokens of high precision.
        self.to_high = rng.random(shape) < 0.25

    def device(self) -> Pages:
        return page_manager.init(self.num_pages, self.sequences, HEADS_8B, self.width)

    def host(self, threads: int) -> ThreadedManager:
        return ThreadedManager(self.num_pages, self.sequences, HEADS_8B, self.width, threads)


def _planned(tokens, sizes):
    """Pages [S, H, 2] of high and of low precision for tokens [S, H, 2]."""
    return -(-tokens // np.array(sizes, np.int32))


def _growing(tokens, to_high, sizes):
    """Whether a head needs a page of high or of low precision for one more token, [S, H, 2]."""
    full = tokens % np.array(sizes, np.int32) == 0
    return full & (to_high[..., None] == np.array([True, False]))


@partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def prompts_on_device(pages: Pages, allocated: int, tokens, sizes) -> Pages:
    slots = jnp.arange(len(tokens), dtype=jnp.int32)
    pages = page_manager.allocate_prompts(pages, slots, jnp.full(len(tokens), allocated, jnp.int32))
    return page_manager.plan_prompts(pages, slots, _planned(tokens, sizes))


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def step_on_device(pages: Pages, tokens, to_high, sizes) -> Pages:
    slots = jnp.arange(len(tokens), dtype=jnp.int32)
    return page_manager.grow(pages, slots, _growing(tokens, to_high, sizes))


def prompts_on_host(manager: ThreadedManager, allocated: int, tokens, sizes):
    planned = np.moveaxis(_planned(np.asarray(tokens), sizes), -1, 0)
    return jax.device_put(manager.prompts(allocated, *planned))


def step_on_host(manager: ThreadedManager, tokens, to_high, sizes):
    needs = _growing(np.asarray(tokens), np.asarray(to_high), sizes)
    return jax.device_put(manager.grow(*np.moveaxis(needs, -1, 0)))


def same_pages(pages: Pages, host: ThreadedManager) -> bool:
    """Whether device and host have equal free lists, and equal pages in all heads."""
    num_pages, width = len(host.free_list), host.tables.shape[2]
    column = np.arange(width)
    held = (column < host.high[..., None]) | (column >= width - host.low[..., None])
    free = (host.start + np.arange(host.free)) % num_pages
    free_on_device = (int(pages.start[0]) + np.arange(int(pages.free[0]))) % num_pages
    pairs = (
        (np.asarray(pages.free_list)[free_on_device], host.free_list[free]),
        (pages.held, np.stack([host.high, host.low], -1)),
        (np.asarray(pages.tables)[held], host.tables[held]),
    )
    return all(np.array_equal(*pair) for pair in pairs)


def is_exact(case: Case, threads: int, steps: int = CHECKED_STEPS) -> bool:
    """Whether device and host hold the same pages after prompts and `steps` steps of generation."""
    sizes, tokens = case.sizes, case.tokens
    host, pages = case.host(threads), case.device()
    prompts_on_host(host, case.allocated, tokens, sizes)
    pages = prompts_on_device(pages, case.allocated, jnp.asarray(tokens), sizes)
    for _ in range(steps):
        step_on_host(host, tokens, case.to_high, sizes)
        pages = step_on_device(pages, jnp.asarray(tokens), jnp.asarray(case.to_high), sizes)
        # A new array, because the step may still read the old array.
        tokens = tokens + np.stack([case.to_high, ~case.to_high], -1)
    return same_pages(pages, host)
