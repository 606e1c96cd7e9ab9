"""Decode attention by format and length, beside the dense op (DiffKV Fig. 15a).

python -m experiments.figures.diffkv.kernel_speed

A layer of Llama-3-8B's heads (32 query and 8 KV heads of 128), --kernel_batch sequences, all
tokens in one format, and half of them in each of K8V4 and K4V2. All formats read the same pool,
whose words each parses in its way; the dense op reads pages of float32. The cases take turns, and
medians count. Floors are of the bytes alone, at the machine's measured rate. Writes to
--output_dir: kernel_speed.csv, kernel_speed.png, report.json and summary.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.bench.lserve_engine import MODEL
from experiments.figures.diffkv import performance
from experiments.figures.diffkv.performance import PAGE_SIZE, Section
from experiments.lib.program import Options
from paged.simulator import roofline
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_attention import PageFormat, mixed_precision_attention, parse_format
from pallas_kernels.specs import HEADS, Cost, Heads, Rates

DENSE, MIXED = "dense", "K8V4+K4V2"
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", MIXED)
# In float16 of these bits no scale and no zero point is infinite.
FINITE = 0x3BFF3BFF


@dataclass(frozen=True)
class Row:
    """bytes: of keys and values, their scales among them, that cannot be left unread."""

    format: str
    tokens: int
    ms: float
    floor_ms: float
    over_dense: float
    bytes: int


def formats_of(name: str, head_dim: int) -> tuple[PageFormat, PageFormat]:
    """Of high and of low precision, in pages that hold PAGE_SIZE tokens of 8 bits."""
    words = PageFormat.holding(PAGE_SIZE, *parse_format("K8V8", head_dim, "float16")).words
    names = name.split("+") if "+" in name else [name, name]
    first, second = (PageFormat(*parse_format(n, head_dim, "float16"), words) for n in names)
    return first, second


class Pool:
    """Random pages for sequences of up to so many tokens in any of FORMATS, and queries."""

    def __init__(self, heads: Heads, batch: int, longest: int, seed: int):
        self.heads, self.batch, self.longest = heads, batch, longest
        rng = np.random.default_rng(seed)
        shape, width = self.shape(heads, batch, longest), self.width(longest)
        words = rng.integers(0, 2**32, shape, np.uint32, endpoint=False)
        self.words = jnp.asarray(words & FINITE)
        tables = rng.permutation(shape[0]).reshape(batch, heads.K, width)
        self.tables = jnp.asarray(tables, jnp.int32)
        self.q = jnp.asarray(rng.standard_normal((batch, heads.H, heads.D)), jnp.float32)

    @staticmethod
    def width(longest: int) -> int:
        return -(-longest // PAGE_SIZE) + 1

    @classmethod
    def shape(cls, heads: Heads, batch: int, longest: int) -> tuple[int, int]:
        """Pages, and words of each."""
        return batch * heads.K * cls.width(longest), formats_of("K8V8", heads.D)[0].words

    def counts(self, name: str, tokens: int):
        """[S, K, 2], of high and of low precision, all heads alike."""
        high = tokens // 2 if name == MIXED else tokens
        of_head = jnp.array([high, tokens - high], jnp.int32)
        return jnp.broadcast_to(of_head, (self.batch, self.heads.K, 2))

    def tables_of(self, name: str):
        """As wide as an engine's for such formats: what attention returns is as wide."""
        tokens = formats_of(name, self.heads.D)[0].tokens
        return self.tables[..., : -(-self.longest // tokens) + 1]

    def bytes(self, name: str, tokens: int) -> int:
        """Of the keys and values of so many tokens."""
        counts = (tokens // 2, tokens - tokens // 2) if name == MIXED else (tokens, 0)
        of_formats = [
            format.keys.token_bytes + format.values.token_bytes
            for format in formats_of(name, self.heads.D)
        ]
        each = sum(count * size for count, size in zip(counts, of_formats))
        return self.batch * self.heads.K * each


@partial(jax.jit, static_argnums=0)
def attend(formats, q, words, tables, counts):
    return mixed_precision_attention(q, words, tables, counts, formats)


@jax.jit
def attend_dense(q, k_pages, v_pages, tables, lengths):
    return paged_attention(q, k_pages, v_pages, tables, lengths)


def check(options: Options, heads: Heads = HEADS["llama-3-8b"]) -> None:
    longest = max(performance.positive(options, "kernel_tokens"))
    pages, words = Pool.shape(heads, options.kernel_batch, longest)
    # The words, and while they are drawn twice them; then the dense op's keys and values.
    size = 4 * pages * max(3 * words, words + 2 * PAGE_SIZE * heads.D)
    performance.check_memory("--kernel_tokens and --kernel_batch", size)
    unknown = set(options.kernel_formats) - set(FORMATS)
    if unknown or not options.kernel_formats:
        raise ValueError(f"--kernel_formats are some of {', '.join(FORMATS)}, not {unknown}")


def measure(options: Options, heads: Heads = HEADS["llama-3-8b"]) -> list[Row]:
    lengths = performance.positive(options, "kernel_tokens")
    pool = Pool(heads, options.kernel_batch, max(lengths), options.seed)
    pages = len(pool.tables.reshape(-1))
    k_pages, v_pages = (
        jax.random.normal(key, (pages, PAGE_SIZE, heads.D))
        for key in jax.random.split(jax.random.key(options.seed))
    )
    rates = Rates.best(roofline.measure(MODEL, 32))
    rows = []
    for tokens in lengths:
        whole = jnp.full((options.kernel_batch, heads.K), tokens, jnp.int32)
        cases = {
            name: partial(
                attend, formats_of(name, heads.D), pool.q, pool.words, pool.tables_of(name),
                pool.counts(name, tokens),
            )
            for name in options.kernel_formats
        }  # fmt: skip
        cases[DENSE] = partial(attend_dense, pool.q, k_pages, v_pages, pool.tables, whole)
        timed = {name: (lambda: 0, lambda _, work=work: work()) for name, work in cases.items()}
        ms = performance.turns_ms(f"decode {tokens}", timed, options.rounds)
        for name in (DENSE, *options.kernel_formats):
            dense_bytes = 2 * 4 * heads.D * heads.K * options.kernel_batch * tokens
            read = dense_bytes if name == DENSE else pool.bytes(name, tokens)
            floor_ms = 1e3 * rates.floor_s(Cost(read), dispatches=0)
            rows.append(Row(name, tokens, ms[name], floor_ms, ms[name] / ms[DENSE], read))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'tokens':>8}  {'':10}{'ms':>9}{'floor':>9}{'MB':>9}{'speedup':>9}{'by bytes':>9}"]
    dense = {row.tokens: row.bytes for row in rows if row.format == DENSE}
    lines += [
        f"{r.tokens:8,}  {r.format:10}{r.ms:9.2f}{r.floor_ms:9.2f}{r.bytes / 1e6:9.1f}"
        f"{1 / r.over_dense:9.2f}{dense[r.tokens] / r.bytes:9.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    times, speedups = figure.subplots(1, 2)
    performance.lines(times, rows, "tokens", "ms", "format", "tokens of a sequence", "ms")
    times.set(xscale="log", yscale="log")
    for name in dict.fromkeys(row.format for row in rows):
        mine = [row for row in rows if row.format == name]
        speedups.plot([r.tokens for r in mine], [1 / r.over_dense for r in mine], "o-", label=name)
    speedups.set(xlabel="tokens of a sequence", ylabel="× dense", xscale="log", ylim=(0, None))


def numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    """decode_over_dense: of K4V2, at the length where it is worst."""
    found = [row.over_dense for row in rows if row.format == "K4V2"]
    return {"decode_over_dense": max(found, default=None)}


def define_flags() -> None:
    flags.DEFINE_list("kernel_tokens", ["512", "1024", "2048", "4096"], "of each sequence")
    flags.DEFINE_list("kernel_formats", list(FORMATS), f"some of {', '.join(FORMATS)}")
    flags.DEFINE_integer("kernel_batch", 8, "sequences", lower_bound=1)


SECTION = Section(
    "kernel_speed", "Fig. 15a",
    "nearly as much faster than vLLM's kernel as pages are smaller; K8V8 1.7 of 2 possible; more "
    "at longer sequences (L40, 16 bits; here dense is of 32 bits).",
    define_flags, check, measure, table, draw, numbers,
)  # fmt: skip
PROGRAM = SECTION.program

if __name__ == "__main__":
    PROGRAM.run()
