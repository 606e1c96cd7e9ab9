"""Text generation for many LoRA tenants, beside systems that batch one at a time (Punica §7.2).

python -m experiments.figures.punica.text_generation

Fig. 11, one GPU, is measured; Fig. 12, a model of 70 billion parameters on eight GPUs
(--flagfile=configs/text_generation_70b.flags), is simulated: the engine's own scheduler over a cost
model's time on --gpus GPUs of a data sheet, not a measurement of any GPU. All requests
are there from the start, have the lengths of ShareGPT, divided by --length_divisor, and are served
first come, first served, in batches of up to --max_num_seqs. --lengths=punica has the output tokens
that the paper counts, 101 a request, in place of the mean of 338 that vLLM's paper gives:

    punica             LoRA; a batch has requests of any adapters
    one_adapter        the same engine with LoRA, but a batch has requests of one adapter only
    vllm               as one_adapter, without LoRA: the backbone alone
    fastertransformer  as vllm, and a batch goes on until its longest request has ended

A batch of one adapter holds only requests that follow each other in the queue. As in the paper,
switching costs such systems nothing: one_adapter has the weights of a single adapter on the device,
and takes them for all. Punica loads each adapter when a request needs it. All adapters hold the
same random values, under names of their own.

Claims: Punica's throughput is about the same for all popularities; the others have it only where
all requests are of one adapter ('identical'), and batches of one request where each has its own
('distinct'). Writes to --output_dir: throughput.csv, throughput.png, report.json, summary.json.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments import serve
from experiments.bench.vs_transformers import RANDOM_100M, model_folder
from experiments.lib import random_adapters, run_record
from experiments.lib.engines import check_implementation, engine_config, keep_compilations
from experiments.lib.flags import (
    define_engine_flags,
    define_executor_flag,
    define_float,
    define_simulated_flags,
    fields_of,
)
from experiments.lib.program import Options, Program, refusals
from experiments.workloads import popularity, synthetic_lengths
from experiments.workloads.popularity import POPULARITIES
from experiments.workloads.workloads import PAPER_CONTEXT, Request
from models import checkpoint
from models.config import ModelConfig
from paged.adapters.adapter import Adapter
from paged.config import EngineConfig
from paged.device.tensor_parallel import Shards
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost

SYSTEMS = ("punica", "one_adapter", "vllm", "fastertransformer")
WITH_LORA = ("punica", "one_adapter")
# Tokens a second (§7.2). 'identical' of vLLM is the backbone alone.
PAPER = {
    "Fig. 11, 7B on an A100": "Punica 1,044 for all popularities; vLLM 1,140 for identical",
    "Fig. 11, 13B on an A100": "Punica 693 for all popularities; vLLM 789 for identical",
    "Fig. 12, 70B on eight A100s": "Punica 441 to 446; vLLM 457 for identical, else 21 to 25",
}


@dataclass(frozen=True)
class Row:
    """A system under a popularity. batch: requests that run, mean over the steps. loads: of
    adapters."""

    system: str
    popularity: str
    tokens_per_s: float
    seconds: float
    output_tokens: int
    batch: float
    steps: int
    loads: int


def make_requests(
    names: Sequence[str], asked: str, vocab_size: int, longest: int, length_divisor: int, seed: int,
    dataset: str = "sharegpt", sigma: float = 1.0,
) -> list[Request]:  # fmt: skip
    """A request for each name; they choose among the names by the popularity that is `asked`."""
    count, rng = len(names), np.random.default_rng([seed, 5])
    lengths, _ = synthetic_lengths.draw_divided(
        count, dataset, sigma, longest, seed, length_divisor
    )
    chosen = popularity.assign(names, asked, count, seed)
    return [
        Request(0.0, rng.integers(vocab_size, size=prompt).tolist(), output, True, adapter=name)
        for (prompt, output), name in zip(lengths, chosen, strict=True)
    ]


def batches_of(system: str, requests: Sequence[Request], resident: str) -> list[list[Request]]:
    """What a system serves one after the other, each as it likes."""
    if system == "punica":
        return [list(requests)]
    runs = [list(run) for _, run in itertools.groupby(requests, lambda each: each.adapter)]
    name = resident if system in WITH_LORA else None
    return [[replace(request, adapter=name) for request in run] for run in runs]


def run(
    engines: dict[str, Engine], names: Sequence[str], asked: Sequence[str], length_divisor: int,
    seed: int, progress: bool = True, dataset: str = "sharegpt", sigma: float = 1.0,
) -> list[Row]:  # fmt: skip
    """All systems under all popularities. dataset, sigma: of the lengths."""
    rows = []
    total = len(engines) * len(asked) * len(names)
    bar = tqdm(total=total, unit=" requests", disable=not progress)
    for which, (system, engine) in itertools.product(asked, engines.items()):
        bar.set_description(f"{system}, {which}")
        requests = make_requests(
            names, which, engine.model.vocab_size, engine.config.max_model_len, length_divisor,
            seed, dataset, sigma,
        )  # fmt: skip
        engine.metrics.clear()
        clock, outputs = engine.executor.clock, []
        began = clock.now()
        for batch in batches_of(system, requests, names[0]):
            outputs += serve.run(engine, batch, seed=seed, progress=False, skip=True)
            bar.update(len(batch))
        seconds = clock.now() - began
        tokens = sum(len(output.tokens) for output in outputs)
        steps = engine.metrics.steps
        rows.append(
            Row(
                system, which, tokens / seconds, seconds, tokens,
                float(np.mean([step.num_running for step in steps])), len(steps),
                sum(event["event"] == "load" for event in engine.events),
            )
        )  # fmt: skip
    bar.close()
    return rows


def find(rows: Sequence[Row], system: str, asked: str) -> Row:
    return next(row for row in rows if (row.system, row.popularity) == (system, asked))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """tokens_per_s_<system>_<popularity>, punica_over_<system>_<popularity>, and the slowest of
    Punica's popularities over the fastest."""
    numbers = {f"tokens_per_s_{row.system}_{row.popularity}": row.tokens_per_s for row in rows}
    mine = {row.popularity: row.tokens_per_s for row in rows if row.system == "punica"}
    for row in rows:
        if mine and row.system != "punica":
            ratio = mine[row.popularity] / row.tokens_per_s
            numbers[f"punica_over_{row.system}_{row.popularity}"] = ratio
    if mine:
        numbers["punica_slowest_over_fastest"] = min(mine.values()) / max(mine.values())
    return numbers


def table(rows: Sequence[Row]) -> str:
    """Tokens a second, with the mean batch in brackets, and what the paper has."""
    asked = list(dict.fromkeys(row.popularity for row in rows))
    lines = [f"{'output tokens/s (batch)':24}" + "".join(f"{name:>18}" for name in asked)]
    for system in dict.fromkeys(row.system for row in rows):
        cells = [find(rows, system, name) for name in asked]
        texts = [f"{cell.tokens_per_s:,.1f} ({cell.batch:.1f})" for cell in cells]
        lines.append(f"{system:24}" + "".join(f"{text:>18}" for text in texts))
    return "\n".join(lines + [f"{where}: {numbers}" for where, numbers in PAPER.items()])


def plot(rows: Sequence[Row], path: Path, title: str, footer: str) -> None:
    """Bars of all systems, for each popularity."""
    asked = list(dict.fromkeys(row.popularity for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    figure = Figure(figsize=(2.4 * len(asked), 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        places = np.arange(len(asked)) - 0.4 + (i + 0.5) * width
        rates = [find(rows, system, name).tokens_per_s for name in asked]
        bars = axes.bar(places, rates, width, label=system)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize="x-small")
    axes.set_xticks(np.arange(len(asked)), asked)
    axes.set_ylabel("output tokens/s")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def make_engines(
    options: Options, model: ModelConfig, config: EngineConfig, folder: Path
) -> tuple[dict[str, Engine], list[str]]:
    """The engine of each system, warmed up, and the names of the adapters. folder: for these, and
    for a random model. Raises ValueError for what cannot be."""
    with_lora = replace(
        config, adapter_slots=config.adapter_slots or config.max_num_seqs,
        max_adapter_rank=options.rank,
    )  # fmt: skip
    names = [f"a{i}" for i in range(options.num_requests)]
    make: Callable[[EngineConfig], Engine]
    if options.executor == "simulated":
        shared = replace(config, tensor_parallel=options.gpus)
        cost = StepCost.declare(model, shared, options.gpu, options.dtype, options.host)
        adapters = [Adapter(name, "", "random", options.rank) for name in names]

        def make(config: EngineConfig) -> Engine:
            simulated = SimulatedExecutor(
                cost, vocab_size=model.vocab_size, dtype=options.dtype,
                adapter_page_s=cost.adapter_page_s,
            )  # fmt: skip
            return Engine(model, config, simulated)
    else:
        check_implementation(
            options.attention_implementation, with_lora, Shards(model, dtype=options.dtype)
        )
        keep_compilations(options.compilation_cache)
        where = model_folder("100m", folder, options.seed) if _is_random(options) else options.model
        _, params = checkpoint.load(where, options.dtype)
        random_adapters.write(folder / "adapter", model, options.seed, options.rank)

        def make(config: EngineConfig) -> Engine:
            implementation = options.attention_implementation or None
            return Engine.from_model(params, model, config, implementation=implementation)

    engines: dict[str, Engine] = {}
    lora = make(with_lora) if set(options.systems) & set(WITH_LORA) else None
    backbone = make(config) if set(options.systems) - set(WITH_LORA) else None
    if lora is not None:
        if options.executor != "simulated":
            read = lora.adapters.read(names[0], folder / "adapter")
            adapters = [replace(read, name=name) for name in names]
        for adapter in adapters:
            lora.add_known_adapter(adapter)
    for base in filter(None, (lora, backbone)):
        base.warm_up()
    for system in options.systems:
        engine = lora if system in WITH_LORA else backbone
        assert engine is not None
        if system == "fastertransformer":  # the same programs and memory of the device
            engine = Engine(model, static(engine.config), engine.executor)
        engines[system] = engine
    return engines, names


def static(config: EngineConfig) -> EngineConfig:
    """With static batches, and room for each sequence as long as any may be. Raises ValueError
    where the cache has too little."""
    return replace(config, policy="fastertransformer")


def _is_random(options: Options) -> bool:
    return options.model == "100m"


def prepare(options: Options) -> tuple[ModelConfig, EngineConfig]:
    """What the flags ask for, before any weights are read. ValueError for what cannot be."""
    for name, known in (("systems", SYSTEMS), ("popularities", POPULARITIES)):
        values = getattr(options, name)
        if not values or set(values) - set(known):
            raise ValueError(f"--{name} are some of {', '.join(known)}, not {values}")
    model = RANDOM_100M if _is_random(options) else checkpoint.load_config(options.model)
    fields = fields_of(EngineConfig, options)
    if fields["max_model_len"] is None:
        longest = PAPER_CONTEXT // options.length_divisor
        fields["max_model_len"] = min(longest, model.max_position_embeddings)
    config = engine_config(model, **fields)
    if "fastertransformer" in options.systems:
        static(config)
    return model, config


def main(options: Options) -> None:
    with refusals():
        model, config = prepare(options)
        scratch = tempfile.TemporaryDirectory()
        engines, names = make_engines(options, model, config, Path(scratch.name))
    with scratch:
        rows = run(
            engines, names, options.popularities, options.length_divisor, options.seed,
            dataset=options.lengths, sigma=options.sigma,
        )  # fmt: skip
    environment: dict[str, Any] = run_record.describe_environment()
    footer = run_record.hardware_line(environment)
    if options.executor == "simulated":
        footer = (
            f"simulated time: cost model of {options.gpus} × {options.gpu} "
            f"(experiments.fit_cost_model), host {options.host}"
        )
    title = f"{options.num_requests:,} requests, {options.model}, rank {options.rank}"
    facts = {
        "experiment": "text_generation",
        "flags": vars(options),
        "measured_on": footer,
        "model": model,
        "engine": config,
        "rows": rows,
        "paper": PAPER,
    }
    output_dir = Path(options.output_dir)
    run_record.write_csv(output_dir, "throughput.csv", rows)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(rows))
    plot(rows, output_dir / "throughput.png", title, footer)
    print(f"{table(rows)}\n({title}; {footer})")


def define_flags() -> None:
    flags.DEFINE_list("systems", list(SYSTEMS), f"some of {', '.join(SYSTEMS)}")
    flags.DEFINE_list("popularities", list(POPULARITIES), "of adapters (§7)")
    flags.DEFINE_integer("num_requests", 96, "the paper has 1,000", lower_bound=1)
    flags.DEFINE_integer("length_divisor", 8, "divides all lengths", lower_bound=1, upper_bound=64)
    flags.DEFINE_enum("lengths", "sharegpt", ["sharegpt", "punica"], "whose mean lengths count")
    define_float("sigma", 1.0, "of the lengths, which are log-normal", 0.0, 3.0)
    flags.DEFINE_integer("rank", 16, "of the adapters", lower_bound=1)
    flags.DEFINE_integer("gpus", 1, "simulated ones that share the model", lower_bound=1)
    define_simulated_flags("a100-80")
    define_executor_flag()
    define_engine_flags()


PROGRAM = Program(
    main, define_flags, "results/text_generation", ("throughput.csv", "throughput.png")
)

if __name__ == "__main__":
    PROGRAM.run()
