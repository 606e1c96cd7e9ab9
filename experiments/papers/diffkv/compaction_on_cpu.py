"""Page management on the device against threaded host code, on a CPU (DiffKV §5.3).

python -m experiments.papers.diffkv.compaction_on_cpu

Llama-3-8B's 256 heads of a sequence; sequences of 1,024 tokens, with random shares in each
precision. Prompts: all get pages for the worst case, plan, and give the surplus back. Generation: a
step in which each head adds a token, to either precision. The device's page manager is that of the
policy; the host's (threads over sequences, numpy) begins with the counts on the device, as
compression leaves them there, and ends with what the device must know of pages back on it. Both
must equal a third one, page by page in lists.

On a CPU, device and host are the same cores and share their memory: the paper's factor is a GPU's.
Beside the times: one layer's decode attention over the same sequences, of which a step has 32.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib import run_record
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.diffkv import kernels_on_cpu as kernel_speed
from experiments.papers.diffkv.host_managers import ThreadedManager, Twin
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.study import Setting, Study, Values
from experiments.timing import Case as Timed
from experiments.timing import medians_ms
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.page_manager import Pages
from pallas_kernels.specs import HEADS

TOKENS, MORE = 1024, 256  # of each prompt; and room for what is generated
PROMPTS, GENERATION = "prompts", "generation"
LLAMA, LAYERS_8B = HEADS["llama-3-8b"], 32
HEADS_8B = LAYERS_8B * LLAMA.K
CHECKED_STEPS = 20


@dataclass(frozen=True)
class CompactionFlags(Flags):
    sequences: tuple[int, ...] = flag((2, 8, 32), "of 256 heads each", least=1)
    rounds: int = flag(9, "timed runs of all that is compared", least=1)
    seed: int = flag(0, "of all that is drawn", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("sequences")


@dataclass(frozen=True)
class Row:
    """attention_ms: of one layer's decode, in generation. exact: whether device and host equal the
    twin after prompts and steps of generation."""

    phase: str
    sequences: int
    heads: int
    device_ms: float
    host_ms: float
    attention_ms: float
    exact: bool


class Case:
    """Numbers of sequences in the state that compression leaves: tokens by precision [S, H, 2]."""

    def __init__(self, sequences: int, seed: int):
        self.sequences, rng = sequences, np.random.default_rng(seed)
        self.formats = kernel_speed.formats_of(kernel_speed.MIXED, LLAMA.D)
        self.allocated = -(-TOKENS // PAGE_SIZE) + 1
        self.width = -(-(TOKENS + MORE) // PAGE_SIZE) + 1
        self.num_pages = sequences * HEADS_8B * self.allocated * 9 // 8
        shape = sequences, HEADS_8B
        high = rng.integers(64, TOKENS // 2, shape)
        self.tokens = np.stack([high, rng.integers(0, TOKENS - high)], -1).astype(np.int32)
        # A token more for each head, of high precision in a quarter of them.
        self.to_high = rng.random(shape) < 0.25

    @property
    def sizes(self) -> tuple[int, int]:
        return self.formats[0].tokens, self.formats[1].tokens

    def device(self) -> Pages:
        return page_manager.init(self.num_pages, self.sequences, HEADS_8B, self.width)

    def host(self, threads: int) -> ThreadedManager:
        return ThreadedManager(self.num_pages, self.sequences, HEADS_8B, self.width, threads)


def _planned(tokens, sizes):
    """Pages [S, H, 2] of high and of low precision for as many tokens."""
    return -(-tokens // np.array(sizes, np.int32))


def _growing(tokens, to_high, sizes):
    """Which heads need a page of high or of low precision for a token more: [S, H, 2]."""
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


def is_exact(case: Case, threads: int, steps: int = CHECKED_STEPS) -> bool:
    """Whether all three managers hold the same after prompts and these steps."""
    sizes, tokens = case.sizes, case.tokens
    twin = Twin(case.num_pages, case.sequences, HEADS_8B)
    host, pages = case.host(threads), case.device()
    twin.prompts(case.allocated, *np.moveaxis(_planned(tokens, sizes), -1, 0))
    prompts_on_host(host, case.allocated, tokens, sizes)
    pages = prompts_on_device(pages, case.allocated, jnp.asarray(tokens), sizes)
    for _ in range(steps):
        twin.grow(*np.moveaxis(_growing(tokens, case.to_high, sizes), -1, 0))
        step_on_host(host, tokens, case.to_high, sizes)
        pages = step_on_device(pages, jnp.asarray(tokens), jnp.asarray(case.to_high), sizes)
        # A new array: the step may still read the former one, in place.
        tokens = tokens + np.stack([case.to_high, ~case.to_high], -1)
    free_list, start, free, tables, held = map(
        np.asarray, (pages.free_list, pages.start, pages.free, pages.tables, pages.held)
    )
    of_device = free_list, int(start[0]), int(free[0]), tables, *np.moveaxis(held, -1, 0)
    return twin.equals(*of_device) and twin.equals(
        host.free_list, host.start, host.free, host.tables, host.high, host.low
    )


def check(flags: CompactionFlags) -> None:
    pages, words = kernel_speed.Pool.shape(LLAMA, max(flags.sequences), TOKENS)
    # The words, and while they are drawn twice them.
    run_record.check_memory("--sequences", 12 * pages * words)


def measure(flags: CompactionFlags, _) -> Iterator[Row]:
    batches = sorted(set(flags.sequences))
    pool = kernel_speed.Pool(LLAMA, max(batches), TOKENS, flags.seed)
    for sequences in batches:
        yield from _of_sequences(Case(sequences, flags.seed), pool, flags.rounds)


def _of_sequences(case: Case, pool: kernel_speed.Pool, rounds: int) -> list[Row]:
    threads, sequences, sizes = os.cpu_count() or 1, case.sequences, case.sizes
    tokens, to_high = jnp.asarray(case.tokens), jnp.asarray(case.to_high)
    pages = prompts_on_device(case.device(), case.allocated, tokens, sizes)

    def with_prompts() -> ThreadedManager:
        host = case.host(threads)
        prompts_on_host(host, case.allocated, tokens, sizes)
        return host

    q, tables = pool.q[:sequences], pool.tables[:sequences]
    counts = pool.counts(kernel_speed.MIXED, TOKENS)[:sequences]
    attend = partial(kernel_speed.attend, case.formats, q, pool.words, tables, counts)
    cases = {
        "device prompts": Timed(
            lambda p: prompts_on_device(p, case.allocated, tokens, sizes), case.device
        ),
        "host prompts": Timed(
            lambda h: prompts_on_host(h, case.allocated, tokens, sizes), partial(case.host, threads)
        ),
        "device generation": Timed(
            lambda p: step_on_device(p, tokens, to_high, sizes),
            lambda: jax.tree.map(jnp.copy, pages),
        ),
        "host generation": Timed(lambda h: step_on_host(h, tokens, to_high, sizes), with_prompts),
        "attention": Timed(attend),
    }
    ms = medians_ms(cases, rounds, f"{sequences} sequences")
    exact, heads = is_exact(case, threads), sequences * HEADS_8B
    return [
        Row(
            phase, sequences, heads, ms[f"device {phase}"], ms[f"host {phase}"], ms["attention"],
            exact,
        )
        for phase in (PROMPTS, GENERATION)
    ]  # fmt: skip


def share(row: Row) -> float:
    """Of the attention of all layers."""
    return row.device_ms / (LAYERS_8B * row.attention_ms)


def draw(_: CompactionFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, phase in zip(figure.subplots(1, 2), (PROMPTS, GENERATION)):
        mine = [row for row in rows if row.phase == phase]
        for name in ("device_ms", "host_ms"):
            label = name.removesuffix("_ms")
            values = [getattr(row, name) for row in mine]
            axes.plot([row.sequences for row in mine], values, "o-", label=label)
        axes.set(title=phase, xlabel="sequences", ylabel="ms", xscale="log", yscale="log")
        axes.legend(frameon=False)


def values(_: CompactionFlags, rows: Sequence[Row]) -> Values:
    """Of a step of generation with the most heads. exact_heads: the most heads, if all that were
    tried were exact. share: of the attention of all layers."""
    last = max((r for r in rows if r.phase == GENERATION), key=lambda r: r.heads, default=None)
    if last is None:
        return {"compaction_exact_heads": None, "compaction_share_8b": None, "over_host": None}
    return {
        "compaction_exact_heads": last.heads * all(row.exact for row in rows),
        "compaction_share_8b": share(last),
        "over_host": last.host_ms / last.device_ms,
    }


STUDY = Study(
    __file__,
    title="Page management in the step and in threaded host code, on a CPU (DiffKV §5.3)",
    kind="measured",
    claim="up to three orders of magnitude faster than multi-threaded host code; and exact",
    rule="exact with all heads, and at least 100 times as fast in generation",
    holds=lambda v: v["compaction_exact_heads"] > 0 and v["over_host"] >= 100,
    setting=Setting(
        "Llama-3-8B's 256 heads a sequence, 1,024 tokens, 2 to 32 sequences",
        "device and host are the same CPU; the paper's device is an L40",
        "wrong",
    ),
    flags=CompactionFlags,
    row=Row,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"sequences": (2,), "rounds": 3},
    minutes=(1, 5),
)

if __name__ == "__main__":
    STUDY.run()
