"""Swapping against recomputation over block sizes (vLLM §7.3, Fig. 19).

python -m experiments.figures.vllm.preemption

(a) The time to move a sequence's blocks to the host's memory and back, and for comparison the time
to prefill the same tokens. (b) The mean normalised latency of requests that do not fit the KV cache
together, with each preemption mode. All requests come at once, so that only the costs of the modes
differ, and each request must get the same tokens in both modes.

Times are medians over rounds that alternate between the cases, and the hardware is named beside
them. On a CPU 'the device' and 'the host' share one memory, so the effects of PCIe in the paper's
curves cannot appear. Writes to --output_dir: micro.csv, serving.csv, fig19.png, report.json and
summary.json.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.figures.vllm import sweep
from experiments.lib import run_record
from experiments.lib.flags import loading
from experiments.lib.program import Options, Program, refusals
from experiments.timing import medians_ms
from experiments.workloads.workloads import Request, Vocabulary
from models import checkpoint, load_tokenizer
from paged.device.executor import DeviceExecutor
from paged.engine import Engine
from paged.kv_cache.dense import BLOCKS
from paged.kv_cache.moves import Moves
from paged.requests.sampling_params import SamplingParams

MODES: tuple[Literal["recompute", "swap"], ...] = ("recompute", "swap")
DEFAULTS = {
    "kv_cache_tokens": 1024, "max_model_len": 640, "max_num_seqs": 4,
    "max_num_batched_tokens": 512, "num_requests": 8, "rounds": 7,
}  # fmt: skip
# Read off Fig. 19a (OPT-13B on an A100), in ms: swapping out and in with blocks of 1 and of 256
# tokens, and recomputation.
PAPER_SWAP_MS, PAPER_RECOMPUTE_MS = {1: 140.0, 256: 30.0}, 20.0
WHY = """\
On a CPU both memories are the same RAM: a transfer is a memcpy at its bandwidth, without PCIe's
latency for each block, so small blocks cost no more than their share of a gather's indices. Blocks
go in calls of a fixed size, the last one padded: where a sequence has few, large blocks, most of
what is copied can be padding."""


@dataclass(frozen=True)
class Micro:
    """Median times in ms for one sequence of --sequence_tokens tokens.

    blocks: how many blocks it has.  swap_ms: swapping out and then in.
    """

    block_size: int
    blocks: int
    swap_out_ms: float
    swap_in_ms: float
    swap_ms: float
    recompute_ms: float


@dataclass(frozen=True)
class Serving:
    """A workload in one preemption mode.

    swapped_blocks: swapped out and swapped in, together.  prefill_tokens: with recomputed ones.
    """

    block_size: int
    mode: str
    normalised_latency_ms: float
    preemptions: int
    swapped_blocks: int
    prefill_tokens: int


def swapper(engine: Engine, tokens: int, rng: np.random.Generator) -> dict[str, Callable[[], None]]:
    """The functions to time. Each moves the blocks of a sequence, and returns when that is done."""
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    count = -(-tokens // engine.config.page_size)
    blocks, on_host = (
        (1 + rng.permutation(engine.config.num_blocks - 1)[:count]).tolist() for _ in range(2)
    )

    def swap_out():
        executor.apply(Moves(exports={BLOCKS: list(zip(blocks, on_host))}))
        # The transfer continues during later steps. The next swap waits for it.
        executor.apply(Moves(exports={BLOCKS: []}))

    def swap_in():
        executor.apply(Moves(imports={BLOCKS: list(zip(on_host, blocks))}))
        jax.block_until_ready(executor._cache)

    def swap():
        swap_out()
        swap_in()

    return {"swap_out_ms": swap_out, "swap_in_ms": swap_in, "swap_ms": swap}


def micro(
    engines: Sequence[Engine], tokens: int, rounds: int, seed: int, progress: bool = True
) -> list[Micro]:
    """(a): each engine's times for a sequence of `tokens` tokens."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, engines[0].model.vocab_size, tokens).tolist()
    how = SamplingParams(max_tokens=1, ignore_eos=True)
    cases: list[dict[str, Callable[[], Any]]] = []
    for engine in engines:
        recompute = {"recompute_ms": lambda engine=engine: engine.generate([prompt], how)}
        cases.append(swapper(engine, tokens, rng) | recompute)
    works = {f"{i} {name}": work for i, case in enumerate(cases) for name, work in case.items()}
    ms = medians_ms(works, rounds, "moving blocks" if progress else "")
    return [
        Micro(
            engine.config.page_size, -(-tokens // engine.config.page_size),
            **{name: ms[f"{i} {name}"] for name in case},
        )
        for i, (engine, case) in enumerate(zip(engines, cases))
    ]  # fmt: skip


def serving(
    engines: Sequence[Engine], requests: Sequence[Request], progress: bool = True
) -> list[Serving]:
    """(b): a row for each engine and mode. Raises ValueError if the modes give other tokens."""
    rows = []
    with tqdm(total=len(engines) * len(MODES), desc="serving", disable=not progress) as bar:
        for engine in engines:
            outputs = []
            for mode in MODES:
                served = sweep.serve_requests(sweep.with_mode(engine, mode), requests)
                rows.append(
                    Serving(
                        block_size=engine.config.page_size,
                        mode=mode,
                        normalised_latency_ms=1e3 * served.normalised_latency_s,
                        preemptions=served.preemptions,
                        swapped_blocks=served.swapped_blocks,
                        prefill_tokens=served.prefill_tokens,
                    )
                )
                outputs.append(served.outputs)
                bar.update()
            sweep.check_same_tokens(engine, *outputs)
    return rows


def summary(moved: Sequence[Micro], served: Sequence[Serving]) -> dict[str, float]:
    """Numbers by name: every curve of the figure, and ratios."""
    numbers: dict[str, float] = {}
    for row in moved:
        for name in ("swap_out_ms", "swap_in_ms", "swap_ms", "recompute_ms"):
            numbers[f"{name}_{row.block_size}"] = getattr(row, name)
        numbers[f"swap_over_recompute_{row.block_size}"] = row.swap_ms / row.recompute_ms
    for entry in served:
        at = f"{entry.mode}_{entry.block_size}"
        numbers[f"normalised_latency_ms_{at}"] = entry.normalised_latency_ms
        numbers[f"preemptions_{at}"] = entry.preemptions
    recompute = [row.recompute_ms for row in moved]
    return numbers | {
        "recompute_spread": max(recompute) / min(recompute),
        "recompute_over_swap_most": max(row.recompute_ms / row.swap_ms for row in moved),
        "serving_recompute_over_swap_most": max(
            recompute / swap for recompute, swap in latencies(served).values()
        ),
    }


def latencies(served: Sequence[Serving]) -> dict[int, tuple[float, ...]]:
    """The normalised latency in each of MODES in ms per token, by block size."""
    found = {(row.block_size, row.mode): row.normalised_latency_ms for row in served}
    return {size: tuple(found[size, mode] for mode in MODES) for size, _ in found}


def table(
    moved: Sequence[Micro], served: Sequence[Serving], numbers: dict[str, float], tokens: int
) -> str:
    """A line for each block size, and the paper's claims beside what was measured."""
    first, last = moved[0], moved[-1]
    lines = [
        f"ms for a sequence of {tokens} tokens, and ms a token of requests that preempt each other",
        f"{'block':>7}{'swap out':>10}{'swap in':>10}{'both':>10}{'recompute':>11}"
        f"{'| serving:':>13}{'recompute':>11}{'swap':>8}{'preemptions':>13}",
    ]
    for row in moved:
        recompute, swap = latencies(served)[row.block_size]
        preempted = "/".join(str(s.preemptions) for s in served if s.block_size == row.block_size)
        lines.append(
            f"{row.block_size:7}{row.swap_out_ms:10.2f}{row.swap_in_ms:10.2f}{row.swap_ms:10.2f}"
            f"{row.recompute_ms:11.2f}{'|':>13}{recompute:11.1f}{swap:8.1f}{preempted:>13}"
        )
    paper = PAPER_SWAP_MS[1] / PAPER_RECOMPUTE_MS, PAPER_SWAP_MS[256] / PAPER_RECOMPUTE_MS
    ours = first.swap_ms / first.recompute_ms, last.swap_ms / last.recompute_ms
    return "\n".join(
        [
            *lines,
            "paper (OPT-13B, A100) | here",
            f"swapping is bad with small blocks: {paper[0]:.1f} times recomputation with blocks of "
            f"1, {paper[1]:.1f} with 256 | {ours[0]:.2f} with {first.block_size},"
            f" {ours[1]:.2f} with {last.block_size}",
            f"recomputation does not depend on the block size | slowest over fastest: "
            f"{numbers['recompute_spread']:.2f}",
            f"recomputation is never more than 1.2 times swapping | at most "
            f"{numbers['recompute_over_swap_most']:.2f} times, served "
            f"{numbers['serving_recompute_over_swap_most']:.2f} times",
            WHY,
        ]
    )


def plot(moved: Sequence[Micro], served: Sequence[Serving], path: Path, footer: str) -> None:
    """Fig. 19: (a) one sequence, (b) requests that preempt each other."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    alone, together = figure.subplots(1, 2)
    sizes = [row.block_size for row in moved]
    names = {
        "recompute": "recompute_ms", "swap in": "swap_in_ms", "swap out": "swap_out_ms",
        "swap in + out": "swap_ms",
    }  # fmt: skip
    curves = {label: [getattr(row, name) for row in moved] for label, name in names.items()}
    sweep.over_block_sizes(alone, sizes, curves)
    alone.set(title="(a) one sequence", ylabel="ms")
    by_mode: dict[str, list[float]] = {
        m: [r.normalised_latency_ms for r in served if r.mode == m] for m in MODES
    }
    sweep.over_block_sizes(together, sizes, by_mode)
    together.set(
        title="(b) requests that preempt each other", ylabel="normalised latency (ms/token)"
    )
    figure.suptitle("Recomputation and swapping")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def prepare(options: Options) -> tuple[list[Engine], list[Request]]:
    """What the flags ask for, warmed up. Raises ValueError for what cannot be."""
    longest = options.max_model_len
    if options.sequence_tokens >= longest:
        raise ValueError(
            f"sequence_tokens must be at most {longest - 1}, not {options.sequence_tokens}"
        )
    sizes = sweep.checked_sizes(options.block_sizes, options.kv_cache_tokens, longest)
    configs = [sweep.config_of(options, size) for size in sizes]
    tokenizer = load_tokenizer(options.model)
    vocabulary = Vocabulary(tokenizer, checkpoint.load_config(options.model).vocab_size, longest)
    requests = sweep.make_requests(
        "sharegpt", float("inf"), options.num_requests, options.seed, vocabulary
    )
    return sweep.make_engines(configs, tokenizer, **loading(options)), requests


def main(options: Options) -> None:
    with refusals():
        engines, requests = prepare(options)
        moved = micro(engines, options.sequence_tokens, options.rounds, options.seed)
        served = serving(engines, requests)
    numbers, environment = summary(moved, served), run_record.describe_environment()
    output_dir, footer = Path(options.output_dir), run_record.hardware_line(environment)
    facts = {
        "experiment": "bench_preemption",
        "flags": vars(options),
        "weights_sha256": checkpoint.weights_hash(options.model),
        "paper": {"swap_ms": PAPER_SWAP_MS, "recompute_ms": PAPER_RECOMPUTE_MS},
        "why_it_differs": WHY,
        "load_average": os.getloadavg(),
    }
    run_record.write_csv(output_dir, "micro.csv", moved)
    run_record.write_csv(output_dir, "serving.csv", served)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, numbers)
    plot(moved, served, output_dir / "fig19.png", footer)
    print(f"{table(moved, served, numbers, options.sequence_tokens)}\n({footer})")


def define_flags() -> None:
    sweep.define_flags(DEFAULTS)
    flags.DEFINE_integer(
        "sequence_tokens", 511, "of the sequence that is moved or recomputed", lower_bound=1
    )


PROGRAM = Program(
    main, define_flags, "results/bench_preemption", ("micro.csv", "serving.csv", "fig19.png")
)

if __name__ == "__main__":
    PROGRAM.run()
