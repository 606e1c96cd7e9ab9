"""Page management on the device against threaded host code (DiffKV §5.3, Fig. 13).

python -m experiments.figures.diffkv.compaction

Llama-3-8B's 256 heads of a sequence; sequences of 1,024 tokens, with random shares in each
precision. Prompts: all get pages for the worst case, plan, and give the surplus back. Generation: a
step in which each head adds a token, to either precision. The device's page manager is that of the
policy; the host's (threads over sequences, numpy) begins with the counts on the device, as
compression leaves them there, and ends with what the device must know of pages back on it. Both
must equal a third one, page by page in lists.

On a CPU, device and host are the same cores and share their memory: the paper's factor is a GPU's.
Beside the times: one layer's decode attention over the same sequences, of which a step has 32.
Writes to --output_dir: compaction.csv, compaction.png, report.json and summary.json.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.figures.diffkv import kernel_speed, performance
from experiments.figures.diffkv.host_managers import ThreadedManager, Twin
from experiments.figures.diffkv.performance import LAYERS_8B, MODEL_8B, PAGE_SIZE, Section
from experiments.lib.program import Options
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.page_manager import Pages
from pallas_kernels.specs import HEADS

TOKENS, MORE = 1024, 256  # of each prompt; and room for what is generated
PROMPTS, GENERATION = "prompts", "generation"
HEADS_8B = LAYERS_8B * MODEL_8B.num_kv_heads
CHECKED_STEPS = 20


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
        self.formats = kernel_speed.formats_of(kernel_speed.MIXED, MODEL_8B.head_dim)
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


def measure(options: Options) -> list[Row]:
    batches = performance.positive(options, "compaction_sequences")
    pool = kernel_speed.Pool(HEADS["llama-3-8b"], max(batches), TOKENS, options.seed)
    rows: list[Row] = []
    for sequences in batches:
        rows += _of_sequences(Case(sequences, options.seed), pool, options.rounds)
    return rows


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
    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "device prompts": (
            case.device, lambda p: prompts_on_device(p, case.allocated, tokens, sizes)
        ),
        "host prompts": (
            partial(case.host, threads),
            lambda h: prompts_on_host(h, case.allocated, tokens, sizes),
        ),
        "device generation": (
            lambda: jax.tree.map(jnp.copy, pages),
            lambda p: step_on_device(p, tokens, to_high, sizes),
        ),
        "host generation": (with_prompts, lambda h: step_on_host(h, tokens, to_high, sizes)),
        "attention": (lambda: 0, lambda _: attend()),
    }  # fmt: skip
    ms = performance.turns_ms(f"{sequences} sequences", cases, rounds)
    exact, heads = is_exact(case, threads), sequences * HEADS_8B
    return [
        Row(
            phase, sequences, heads, ms[f"device {phase}"], ms[f"host {phase}"], ms["attention"],
            exact,
        )
        for phase in (PROMPTS, GENERATION)
    ]  # fmt: skip


def check(options: Options) -> None:
    most = max(performance.positive(options, "compaction_sequences"))
    pages, words = kernel_speed.Pool.shape(HEADS["llama-3-8b"], most, TOKENS)
    # The words, and while they are drawn twice them.
    performance.check_memory("--compaction_sequences", 12 * pages * words)


def share(row: Row) -> float:
    """Of the attention of all layers."""
    return row.device_ms / (LAYERS_8B * row.attention_ms)


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':12}{'sequences':>10}{'heads':>8}{'device ms':>11}{'host ms':>9}{'host / device':>15}"
        f"{'of attention':>14}  exact"
    ]
    lines += [
        f"{r.phase:12}{r.sequences:10}{r.heads:8,}{r.device_ms:11.2f}{r.host_ms:9.2f}"
        f"{r.host_ms / r.device_ms:15.2f}"
        f"{f'{share(r):.3%}' if r.phase == GENERATION else '':>14}  {'yes' if r.exact else 'NO'}"
        for r in rows
    ]
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    for axes, phase in zip(figure.subplots(1, 2), (PROMPTS, GENERATION)):
        mine = [row for row in rows if row.phase == phase]
        for name in ("device_ms", "host_ms"):
            label = name.removesuffix("_ms")
            values = [getattr(row, name) for row in mine]
            axes.plot([row.sequences for row in mine], values, "o-", label=label)
        axes.set(title=phase, xlabel="sequences", ylabel="ms", xscale="log", yscale="log")
        axes.legend(frameon=False)


def numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    """compaction_exact_heads: the most heads, if all that were tried were exact. share: of a step
    of generation with the most heads."""
    last = max(
        (row for row in rows if row.phase == GENERATION), key=lambda r: r.heads, default=None
    )
    if last is None:
        return {"compaction_exact_heads": None, "compaction_share_8b": None}
    exact = all(row.exact for row in rows)
    return {"compaction_exact_heads": last.heads * exact, "compaction_share_8b": share(last)}


def define_flags() -> None:
    flags.DEFINE_list("compaction_sequences", ["2", "8", "32"], "of 256 heads each")


SECTION = Section(
    "compaction", "Fig. 13",
    "up to three orders of magnitude faster than multi-threaded host code, at 1,024 tokens (L40); "
    "§7.3: below 0.2 % of a prompt step's time and 0.9 % of a generation step's.",
    define_flags, check, measure, table, draw, numbers,
)  # fmt: skip
PROGRAM = SECTION.program

if __name__ == "__main__":
    PROGRAM.run()
