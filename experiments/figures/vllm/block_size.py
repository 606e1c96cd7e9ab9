"""How paging slows attention, and how the block size affects latency (vLLM §7.1, §7.2, Fig. 18).

python -m experiments.figures.vllm.block_size

(a) The time of decode attention through block tables, whose blocks lie anywhere, and of the same
attention over contiguous keys and values: `jax.nn.dot_product_attention`, and a plain
softmax(q·kᵀ)·v. (b) The mean normalised latency of requests with the lengths of ShareGPT and of
Alpaca, at fixed rates, for each block size.

Times of (a) are medians over rounds that alternate between the cases. Writes to --output_dir:
kernels.csv, serving.csv, fig18.png, report.json and summary.json.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.figures.vllm import sweep
from experiments.lib import run_record
from experiments.lib.flags import loading
from experiments.lib.program import Options, Program, refusals
from experiments.timing import medians_s
from experiments.workloads.workloads import Request, Vocabulary
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from paged.engine import Engine
from pallas_kernels.paged_attention import paged_attention

BATCHES, CONTEXTS = (8, 32), (64, 128, 192, 256)  # of Fig. 18a
WAYS = ("paged_us", "dot_product_us", "plain_us", "gather_us")
DATASETS = ("sharegpt", "alpaca")
DEFAULTS = {
    "kv_cache_tokens": 2048, "max_model_len": 1024, "max_num_seqs": 16,
    "max_num_batched_tokens": 64, "num_requests": 12, "rounds": 50,
}  # fmt: skip
PAPER = {
    "overhead": "20 to 26 % more than FasterTransformer's kernels (A100)",
    "sharegpt": "best with blocks of 16 to 128",
    "alpaca": "best with blocks of 16 and 32; larger ones are much worse",
}

WHY = """\
The paper's kernel reads blocks where they lie. Here XLA gathers a chunk of them at a time: keys and
values are copied once more before they are used, which takes what 'gather' says. Blocks of one
token are gathered token by token."""


@dataclass(frozen=True)
class Kernel:
    """Median times in µs of one layer's attention.

    gather_us: the time to only copy its blocks into contiguous memory.
    overhead: the paged time, divided by the time of the faster contiguous attention.
    """

    batch: int
    context: int
    paged_us: float
    dot_product_us: float
    plain_us: float
    gather_us: float

    @property
    def overhead(self) -> float:
        return self.paged_us / min(self.dot_product_us, self.plain_us)


@dataclass(frozen=True)
class Serving:
    """A workload with one block size.

    internal_fraction: the unused part of last blocks, as a fraction of the allocated KV memory.
    """

    dataset: str
    block_size: int
    normalised_latency_ms: float
    internal_fraction: float
    preemptions: int


def dot_product(q_SxHxD, k_SxCxKxD, v_SxCxKxD):
    return jax.nn.dot_product_attention(q_SxHxD[:, None], k_SxCxKxD, v_SxCxKxD)[:, 0]


def plain(q_SxHxD, k_SxKxCxD, v_SxKxCxD):
    S, H, D = q_SxHxD.shape
    q = q_SxHxD.reshape(S, k_SxKxCxD.shape[1], -1, D) * D**-0.5
    probs = jax.nn.softmax(jnp.einsum("skgd,skcd->skgc", q, k_SxKxCxD))
    return jnp.einsum("skgc,skcd->skgd", probs, v_SxKxCxD).reshape(S, H, D)


def gather(k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM):
    pools = k_pages_NxPxD, v_pages_NxPxD
    return [pool.at[tables_SxKxM].get(mode="promise_in_bounds") for pool in pools]


def attention_cases(
    model: ModelConfig, batch: int, context: int, block_size: int, seed: int
) -> dict[str, Callable[[], Any]]:
    """WAYS as compiled functions with their inputs on the device.

    Three of them compute the same attention [S, H, D], and one gathers the keys and values.
    """
    rng = np.random.default_rng([seed, batch, context])
    S, H, K, D = batch, model.num_heads, model.num_kv_heads, model.head_dim
    M = -(-context // block_size)
    tables = rng.permutation(S * K * M).reshape(S, K, M).astype(np.int32)
    k_pages, v_pages = rng.standard_normal((2, S * K * M, block_size, D), np.float32)
    q = rng.standard_normal((S, H, D), np.float32)
    k, v = (pages[tables].reshape(S, K, -1, D)[:, :, :context] for pages in (k_pages, v_pages))
    lengths = np.full((S, K), context, np.int32)

    def compiled(function, *arrays):
        on_device = [jnp.array(array) for array in arrays]
        program = jax.jit(function).lower(*on_device).compile()
        return lambda: program(*on_device)

    ways = (
        compiled(paged_attention, q, k_pages, v_pages, tables, lengths),
        compiled(dot_product, q, k.swapaxes(1, 2), v.swapaxes(1, 2)),
        compiled(plain, q, k, v),
        compiled(gather, k_pages, v_pages, tables),
    )
    return dict(zip(WAYS, ways, strict=True))


def kernels(
    model: ModelConfig, block_size: int, rounds: int, seed: int, progress: bool = True
) -> list[Kernel]:
    """(a): a row for each batch and context of the figure."""
    cases = {
        (batch, context): attention_cases(model, batch, context, block_size, seed)
        for batch in BATCHES
        for context in CONTEXTS
    }
    for ways in cases.values():
        for name in ("dot_product_us", "plain_us"):
            np.testing.assert_allclose(ways["paged_us"](), ways[name](), rtol=1e-4, atol=1e-5)
    works = {f"{at} {name}": way for at, ways in cases.items() for name, way in ways.items()}
    seconds = medians_s(works, rounds, "attending" if progress else "")
    return [Kernel(*at, *(1e6 * seconds[f"{at} {name}"] for name in WAYS)) for at in cases]


def serving(
    engines: Sequence[Engine], workloads: dict[str, list[Request]], progress: bool = True
) -> list[Serving]:
    """(b): each workload on each engine. Raises ValueError if the block size changes a token."""
    rows = []
    total = len(engines) * len(workloads)
    with tqdm(total=total, desc="serving", disable=not progress) as bar:
        for dataset, requests in workloads.items():
            first = None
            for engine in engines:
                served = sweep.serve_requests(engine, requests)
                rows.append(
                    Serving(
                        dataset=dataset,
                        block_size=engine.config.page_size,
                        normalised_latency_ms=1e3 * served.normalised_latency_s,
                        internal_fraction=served.internal_fraction,
                        preemptions=served.preemptions,
                    )
                )
                first = first or served.outputs
                sweep.check_same_tokens(engine, first, served.outputs)
                bar.update()
    return rows


def best_sizes(rows: Sequence[Serving], dataset: str) -> list[int]:
    """Block sizes whose latency is within a tenth of the least."""
    mine = [row for row in rows if row.dataset == dataset]
    least = min(row.normalised_latency_ms for row in mine)
    return [row.block_size for row in mine if row.normalised_latency_ms <= 1.1 * least]


def summary(attended: Sequence[Kernel], served: Sequence[Serving]) -> dict[str, float]:
    """Numbers by name: both panels, and the range of the overheads in percent."""
    percent = [100 * (row.overhead - 1) for row in attended]
    numbers = {
        "overhead_percent_least": min(percent),
        "overhead_percent_median": float(np.median(percent)),
        "overhead_percent_most": max(percent),
    }
    for row in attended:
        at = f"batch_{row.batch}_context_{row.context}"
        numbers[f"paged_us_{at}"] = row.paged_us
        numbers[f"contiguous_us_{at}"] = min(row.dot_product_us, row.plain_us)
    for entry in served:
        at = f"{entry.dataset}_{entry.block_size}"
        numbers[f"normalised_latency_ms_{at}"] = entry.normalised_latency_ms
        numbers[f"internal_fraction_{at}"] = entry.internal_fraction
    return numbers


def table(attended: Sequence[Kernel], served: Sequence[Serving], numbers: dict[str, float]) -> str:
    """A line for each case, and the paper's claims beside what was measured."""
    lines = [
        "µs of one layer's decode attention",
        f"{'batch':>6}{'context':>9}{'paged':>10}{'dot product':>13}{'plain':>10}{'overhead':>10}"
        f"{'gather':>10}",
    ]
    for row in attended:
        lines.append(
            f"{row.batch:6}{row.context:9}{row.paged_us:10.1f}{row.dot_product_us:13.1f}"
            f"{row.plain_us:10.1f}{100 * (row.overhead - 1):9.0f}%{row.gather_us:10.1f}"
        )
    lines += ["", "ms a token (normalised latency), and unused ends of blocks"]
    lines.append(f"{'block':>6}" + "".join(f"{dataset:>20}" for dataset in DATASETS))
    for size in sorted({row.block_size for row in served}):
        cells = [row for row in served if row.block_size == size]
        lines.append(
            f"{size:6}"
            + "".join(
                f"{row.normalised_latency_ms:12.1f}{100 * row.internal_fraction:7.1f}%"
                for row in cells
            )
        )
    lines += [
        "paper | here",
        f"attention: {PAPER['overhead']} | {numbers['overhead_percent_least']:.0f} to "
        f"{numbers['overhead_percent_most']:.0f} %, median "
        f"{numbers['overhead_percent_median']:.0f} %, of the faster contiguous way",
    ]
    for dataset in DATASETS:
        found = ", ".join(map(str, best_sizes(served, dataset)))
        lines.append(f"{dataset}: {PAPER[dataset]} | within a tenth of the best: {found}")
    return "\n".join([*lines, WHY])


def plot(attended: Sequence[Kernel], served: Sequence[Serving], path: Path, footer: str) -> None:
    """Fig. 18: (a) kernels, (b) requests served."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    alone, together = figure.subplots(1, 2)
    for batch, style in zip(BATCHES, ("-", "--")):
        mine = [row for row in attended if row.batch == batch]
        contexts = [row.context for row in mine]
        ways = {
            "paged": [row.paged_us for row in mine],
            "contiguous": [min(row.dot_product_us, row.plain_us) for row in mine],
        }
        for (name, values), colour in zip(ways.items(), ("#2f6b9a", "#c8553d")):
            alone.plot(contexts, values, f"o{style}", color=colour, label=f"{name} (bs {batch})")
    alone.set(title="(a) attention kernels", xlabel="context (tokens)", ylabel="µs", ylim=(0, None))
    alone.set_xticks(CONTEXTS)
    alone.legend()
    sizes = sorted({row.block_size for row in served})
    curves = {d: [r.normalised_latency_ms for r in served if r.dataset == d] for d in DATASETS}
    sweep.over_block_sizes(together, sizes, curves)
    together.set(title="(b) requests served", ylabel="ms a token (normalised)")
    figure.suptitle("The block size")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def prepare(options: Options) -> tuple[list[Engine], dict[str, list[Request]]]:
    """What the flags ask for, warmed up. Raises ValueError for what cannot be."""
    longest = options.max_model_len
    sizes = sweep.checked_sizes(options.block_sizes, options.kv_cache_tokens, longest)
    configs = [sweep.config_of(options, size) for size in sizes]
    tokenizer = load_tokenizer(options.model)
    vocabulary = Vocabulary(tokenizer, checkpoint.load_config(options.model).vocab_size, longest)
    rates = {"sharegpt": options.sharegpt_rate, "alpaca": options.alpaca_rate}
    workloads = {
        name: sweep.make_requests(name, rate, options.num_requests, options.seed, vocabulary)
        for name, rate in rates.items()
    }
    return sweep.make_engines(configs, tokenizer, **loading(options)), workloads


def main(options: Options) -> None:
    with refusals():
        engines, workloads = prepare(options)
        attended = kernels(
            engines[0].model, options.kernel_block_size, options.rounds, options.seed
        )
        served = serving(engines, workloads)
    numbers, environment = summary(attended, served), run_record.describe_environment()
    output_dir, footer = Path(options.output_dir), run_record.hardware_line(environment)
    facts = {
        "experiment": "bench_block_size",
        "flags": vars(options),
        "weights_sha256": checkpoint.weights_hash(options.model),
        "paper": PAPER,
        "why_it_differs": WHY,
        "load_average": os.getloadavg(),
    }
    run_record.write_csv(output_dir, "kernels.csv", attended)
    run_record.write_csv(output_dir, "serving.csv", served)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, numbers)
    plot(attended, served, output_dir / "fig18.png", footer)
    print(f"{table(attended, served, numbers)}\n({footer})")


def define_flags() -> None:
    sweep.define_flags(DEFAULTS)
    flags.DEFINE_integer("kernel_block_size", 16, "tokens of a block in (a)", lower_bound=1)
    flags.DEFINE_float("sharegpt_rate", 4.0, "ShareGPT-like requests a second")
    flags.DEFINE_float("alpaca_rate", 16.0, "Alpaca-like requests a second")


PROGRAM = Program(
    main, define_flags, "results/bench_block_size", ("kernels.csv", "serving.csv", "fig18.png")
)

if __name__ == "__main__":
    PROGRAM.run()
