"""Decode attention by format and length on a CPU, beside the dense op (DiffKV §7.3).

python -m experiments.papers.diffkv.kernels_on_cpu

One layer with Llama-3-8B's heads (32 query and 8 KV heads of 128) attends for --batch sequences.
All tokens are in one format, or half are in K8V4 and half in K4V2. All formats read the same pool
and decode its words differently; the dense op reads pages of float32. The cases take turns, and
times are medians. A floor is the time to read the bytes at the machine's measured rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots, run_record
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.papers.lserve.engine_on_cpu import MODEL
from experiments.study import Setting, Study, Values
from experiments.timing import medians_ms
from paged.simulator import roofline
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_attention import PageFormat, mixed_precision_attention, parse_format
from pallas_kernels.specs import HEADS, Cost, Heads, Rates

DENSE, MIXED = "dense", "K8V4+K4V2"
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", MIXED)
# With these bits no float16 scale or zero point is infinite.
FINITE = 0x3BFF3BFF


@dataclass(frozen=True)
class KernelFlags(Flags):
    tokens: tuple[int, ...] = flag((512, 1024, 2048, 4096), "of each sequence", least=1)
    formats: tuple[str, ...] = flag(FORMATS, "of the pages", choices=FORMATS)
    batch: int = flag(8, "sequences", least=1)
    rounds: int = flag(9, "timed runs of each kernel", least=1)
    seed: int = flag(0, "of the random keys, values and queries", least=0)


@dataclass(frozen=True)
class Row:
    """A format at a length.

    floor_ms: time to read the bytes.
    over_dense: time over the dense op's time.
    bytes: bytes of keys and values to read, scales included.
    times_fewer_bytes: the dense op's bytes over `bytes`, an upper bound of the speedup.
    """

    format: str
    tokens: int
    ms: float
    floor_ms: float
    over_dense: float
    bytes: int
    times_fewer_bytes: float


def formats_of(name: str, head_dim: int) -> tuple[PageFormat, PageFormat]:
    """Page formats of high and of low precision. A page is as large as PAGE_SIZE tokens in K8V8."""
    words = PageFormat.holding(PAGE_SIZE, *parse_format("K8V8", head_dim, "float16")).words
    names = name.split("+") if "+" in name else [name, name]
    first, second = (PageFormat(*parse_format(n, head_dim, "float16"), words) for n in names)
    return first, second


class Pool:
    """Random queries, and random pages for `batch` sequences of up to `longest` tokens in any of
    FORMATS."""

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
        """Number of pages, and words of a page."""
        return batch * heads.K * cls.width(longest), formats_of("K8V8", heads.D)[0].words

    def counts(self, name: str, tokens: int):
        """Tokens [S, K, 2] of high and of low precision, equal for all heads."""
        high = tokens // 2 if name == MIXED else tokens
        of_head = jnp.array([high, tokens - high], jnp.int32)
        return jnp.broadcast_to(of_head, (self.batch, self.heads.K, 2))

    def tables_of(self, name: str):
        """The block tables, cut to the width that an engine has for this format. The width matters,
        because attention computes scores for a whole table."""
        tokens = formats_of(name, self.heads.D)[0].tokens
        return self.tables[..., : -(-self.longest // tokens) + 1]

    def bytes(self, name: str, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in each sequence."""
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


def check(flags: KernelFlags, heads: Heads = HEADS["llama-3-8b"]) -> None:
    pages, words = Pool.shape(heads, flags.batch, max(flags.tokens))
    # Drawing random pages takes three times their size. Afterwards the pages, dense keys and dense
    # values are in memory.
    size = 4 * pages * max(3 * words, words + 2 * PAGE_SIZE * heads.D)
    run_record.check_memory("--tokens and --batch", size)


def measure(flags: KernelFlags, _, heads: Heads = HEADS["llama-3-8b"]) -> Iterator[Row]:
    lengths = sorted(set(flags.tokens))
    pool = Pool(heads, flags.batch, max(lengths), flags.seed)
    pages = len(pool.tables.reshape(-1))
    k_pages, v_pages = (
        jax.random.normal(key, (pages, PAGE_SIZE, heads.D))
        for key in jax.random.split(jax.random.key(flags.seed))
    )
    rates = Rates.best(roofline.measure(MODEL, 32))
    for tokens in lengths:
        whole = jnp.full((flags.batch, heads.K), tokens, jnp.int32)
        cases = {
            name: partial(
                attend, formats_of(name, heads.D), pool.q, pool.words, pool.tables_of(name),
                pool.counts(name, tokens),
            )
            for name in flags.formats
        }  # fmt: skip
        cases[DENSE] = partial(attend_dense, pool.q, k_pages, v_pages, pool.tables, whole)
        ms = medians_ms(cases, flags.rounds, f"decode {tokens}")
        for name in (DENSE, *flags.formats):
            dense_bytes = 2 * 4 * heads.D * heads.K * flags.batch * tokens
            read = dense_bytes if name == DENSE else pool.bytes(name, tokens)
            floor_ms = 1e3 * rates.floor_s(Cost(read), dispatches=0)
            over = ms[name] / ms[DENSE]
            yield Row(name, tokens, ms[name], floor_ms, over, read, dense_bytes / read)


def draw(_: KernelFlags, figure: Figure, rows: Sequence[Row]) -> None:
    times, speedups = figure.subplots(1, 2)
    plots.lines(times, rows, "tokens", "ms", "format", "tokens of a sequence", "ms")
    times.set(xscale="log", yscale="log")
    for name in dict.fromkeys(row.format for row in rows):
        mine = [row for row in rows if row.format == name]
        speedups.plot([r.tokens for r in mine], [1 / r.over_dense for r in mine], "o-", label=name)
    speedups.set(xlabel="tokens of a sequence", ylabel="× dense", xscale="log", ylim=(0, None))


def values(_: KernelFlags, rows: Sequence[Row]) -> Values:
    """decode_over_dense: K4V2's time over the dense op's, the largest over the lengths."""
    found = [row.over_dense for row in rows if row.format == "K4V2"]
    return {"decode_over_dense": max(found, default=None)}


STUDY = Study(
    __file__,
    title="Decode attention by format and length, on a CPU (DiffKV §7.3)",
    kind="measured",
    claim="on this machine too, smaller pages are read in less time than dense ones",
    rule="K4V2 takes at most 0.9 of the dense op's time at every length",
    holds=lambda v: v["decode_over_dense"] <= 0.9,
    setting=Setting(
        "a layer of Llama-3-8B's heads, 8 sequences, XLA on this machine",
        "the paper times its CUDA kernel on an L40 beside pages of 16 bits; dense is of 32 bits",
        "reduced",
    ),
    flags=KernelFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"tokens": (512, 1024), "rounds": 3},
    minutes=(1, 5),
)

if __name__ == "__main__":
    STUDY.run()
