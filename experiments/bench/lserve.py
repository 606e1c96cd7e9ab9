"""LServe's attention and engine over long contexts, beside the dense policy (LServe §4.3 to 5.5).

    python -m experiments.bench.lserve
    python -m experiments.bench.lserve --sections=decode,prefill

On a layer of Llama-3-8B's shape (32 query heads, 8 KV heads of 128, of which half stream; a budget
of 4,096 tokens in pages of 64, statistics of 16, reused by 4 tokens; sink 128, window 256), float32
on a CPU, each policy's own device half over a cache of random numbers:

decode     a token's attention, selection included, by context: dense heads alone, static sparsity,
           dynamic sparsity, both (Fig. 15); and the layer's matrix products (Fig. 2)
prefill    the attention of whole prompts by length, the layer's products (Fig. 2), and what writing
           key statistics costs (§5.3)
kernel     the prefill's speedup beside 1/(1 - r), for streaming heads and for the tables of
           MInference (Fig. 12)
selector   one selection beside the attention over what it gives (Fig. 14)
page_size  the dense policy's decode attention by page size (Table 1)
memory     KV bytes of a decoding sequence
engine     whole engines on a small random model: prefill and decode beside the dense policy and the
           presets DuoAttention and Quest (Figs. 10, 11, 16, Table 5)

All that is compared takes turns, and medians count. Claims: decode attention at least 5 times as
fast as dense at 16k tokens and 15 times at 64k, at most 1.3 times as slow at 64k as at 16k; prefill
attention at 8k at least 0.80 of 1/(1 - r).

summary.json holds these ratios, null where one was not measured. Also written to --output_dir:
report.json, and a CSV and a plot for each section.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments.bench import lserve_engine, lserve_report, lserve_sections
from experiments.bench.lserve_layer import LAYER
from experiments.bench.lserve_sections import DEFAULTS, Times
from experiments.bench.vs_transformers import integers
from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from models.config import ModelConfig
from paged.simulator import roofline
from pallas_kernels.specs import Rates

SECTIONS = tuple(lserve_report.PAPER)
PAGE_SIZES = (16, 32, 64, 128)


def measured_sections(
    options: Options, times: Times, model: ModelConfig = LAYER
) -> dict[str, Callable[[list[int]], Sequence[Any]]]:
    """What measures each section at given contexts."""
    chunk, seed = options.chunk, options.seed
    return {
        "decode": lambda at: lserve_sections.decode(at, times, model, seed),
        "prefill": lambda at: lserve_sections.prefill(at, chunk, times, model, seed),
        "kernel": lambda at: lserve_sections.kernel(max(at), chunk, times, model, seed),
        "selector": lambda at: lserve_sections.selector(at, times, model, seed),
        "page_size": lambda at: lserve_sections.page_size(
            at, PAGE_SIZES, options.batch, times, model, seed
        ),
        "memory": lambda at: lserve_sections.memory(at, model),
        "engine": lambda at: lserve_engine.run(
            options.systems, at, chunk, options.turns, seed, times.rates, progress=times.progress
        ),
    }


def checked(options: Options) -> dict[str, list[int]]:
    """The contexts of each section. ValueError for what cannot be."""
    for name, known in (("sections", SECTIONS), ("systems", lserve_engine.SYSTEMS)):
        chosen = getattr(options, name)
        if not chosen or set(chosen) - set(known):
            raise ValueError(f"--{name} are some of {', '.join(known)}, not {chosen}")
    asked = sorted(set(integers("contexts", options.contexts)))
    contexts = {name: asked or DEFAULTS[name] for name in options.sections}
    for name, at in contexts.items():
        step = options.chunk if name in ("prefill", "kernel", "engine") else 64
        if any(context < step or context % step for context in at):
            raise ValueError(f"--contexts of section {name} are multiples of {step}, not {at}")
        longest = lserve_engine.MODEL.max_position_embeddings
        longest -= lserve_engine.answer_tokens(options.turns) if name == "engine" else 0
        if max(at) > longest:
            raise ValueError(f"--contexts of section {name} are at most {longest}, not {at}")
    return contexts


def main(options: Options) -> None:
    with refusals():
        contexts = checked(options)
    began, environment = time.perf_counter(), run_record.describe_environment()
    folder, footer = Path(options.output_dir), run_record.hardware_line(environment)
    rates = roofline.measure(lserve_engine.MODEL, 32)
    measure = measured_sections(options, Times(options.rounds, Rates.best(rates)))
    found: dict[str, Sequence[Any]] = {}
    printed = []
    for name, at in contexts.items():
        found[name] = measure[name](at)
        printed.append(lserve_report.write(folder, name, found[name], footer))
    numbers = lserve_report.summary(found)
    facts = {
        "experiment": "bench_lserve", "flags": vars(options), "contexts": contexts,
        "sections": found, "summary": numbers, "rates": rates, "layer": LAYER,
        "engine_model": lserve_engine.MODEL, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    run_record.write_json(folder, "report.json", facts | environment)
    run_record.write_json(folder, "summary.json", numbers)
    print(lserve_report.printed(printed, numbers, footer))


def define_flags() -> None:
    flags.DEFINE_list("sections", list(SECTIONS), f"some of {', '.join(SECTIONS)}")
    flags.DEFINE_list("contexts", [], "tokens; by default those of each section's figure")
    flags.DEFINE_integer("chunk", 1024, "tokens of a chunk of a prompt", lower_bound=64)
    flags.DEFINE_integer("rounds", 5, "timed runs of all that is compared", lower_bound=1)
    flags.DEFINE_integer("batch", 8, "page_size: sequences of a step", lower_bound=1)
    flags.DEFINE_list("systems", list(lserve_engine.SYSTEMS), "engine: what is compared")
    flags.DEFINE_integer("turns", 5, "engine: of 8 timed decode steps each", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "of weights, caches and prompts", lower_bound=0, upper_bound=2**32 - 1
    )


PROGRAM = Program(main, define_flags, "results/bench_lserve", lserve_report.FILES)

if __name__ == "__main__":
    PROGRAM.run()
