"""LoRA adapters of many tenants in one batch: the operator alone, and whole engines (Punica §7).

    python -m experiments.bench.lora

engine: an engine decodes a batch of requests that all have the same adapter or each its own, beside
an engine without adapters, the same requests one at a time, and transformers with PEFT, of which
experiments/bench/lora_engine.py says more. On the bundled model and a random Llama of 110 million
parameters, with random adapters of all projections.

operator: x·A·B alone, over popularities, batch sizes and ranks (§7.1, Figs. 7 to 9): SGMV, as this
machine runs it, beside what the paper compares it with, a loop over adapters, and gathering the
weights of every token for one batched product; and beside `jax.lax.ragged_dot`, and the projection
that LoRA adds to.

All take turns, and medians count. Claims, of float32 on a CPU, batch 32, rank 16: decoding with 32
adapters is at least 0.85 times as fast as with one and 0.75 times as fast as the base model at 110
million parameters, 0.75 times as fast as with one on the bundled model; 4.5 times as fast as one
request at a time, 3 times as fast as PEFT; adapters that no request uses cost at most a tenth of
CPU time. (A CPU has neither the paper's launches nor its tensor cores, so of the operator the shape
is to be compared, not microseconds.)

summary.json holds these six ratios, null where one was not measured, or, with --levels=operator,
those of the operator. PEFT takes part where it and torch are installed (the extra `parity`). Also
written to --output_dir: report.json, engine.csv and engine.png; operator.csv, implementations.png
(Fig. 8), ranks.png (Fig. 9) and roofline.png (Fig. 7).
"""

import importlib.metadata
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.bench import lora_engine, lora_engine_report, lora_operator_report
from experiments.bench.lora_operator import Case, cases
from experiments.bench.vs_transformers import (
    MODELS,
    MODELS_HELP,
    integers,
    model_config,
    model_folder,
)
from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from models.config import ModelConfig
from paged.requests.validation import check_model
from paged.simulator import roofline
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Rates

LEVELS = ("engine", "operator")
PEER_PACKAGES = ("torch", "peft")


def operator_cases(options: Options) -> list[Case]:
    """The cases of the flags. ValueError for what cannot be."""
    numbers = {}
    for name in ("batches", "ranks"):
        texts = getattr(options, name)
        if not texts or any(not text.isdecimal() or int(text) < 1 for text in texts):
            raise ValueError(f"--{name} must be whole numbers from 1, not {texts}")
        numbers[name] = sorted({int(text) for text in texts})
    unknown = set(options.popularities) - set(POPULARITIES)
    if unknown or not options.popularities:
        raise ValueError(
            f"--popularities are some of {', '.join(POPULARITIES)}, not {options.popularities}"
        )
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    like = Case("distinct", 1, 1, options.inputs, options.outputs, dtype)
    return cases(options.popularities, numbers["batches"], numbers["ranks"], like)


def engine_settings(options: Options) -> lora_engine.Settings:
    """What the flags ask for. ValueError for what cannot be."""
    unknown = set(options.models) - set(MODELS)
    if unknown or not options.models:
        raise ValueError(f"--models are {MODELS_HELP}, not {options.models}")
    span = integers("prompt_tokens", options.prompt_tokens)
    if len(span) != 2:
        raise ValueError(f"--prompt_tokens are two numbers, shortest and longest, not {span}")
    settings = lora_engine.Settings(
        options.batch, options.rank, (span[0], span[1]), options.output_tokens, options.repeats,
        options.multi_step, options.seed,
    )  # fmt: skip
    for name in options.models:
        check_model(model_config(name), settings.lora_config)
    return settings


def measure_operator(
    options: Options, listed: list[Case], folder: Path, footer: str
) -> tuple[dict[str, Any], str]:
    """The operator's part of report.json, and what is printed of it."""
    shape = ModelConfig(
        vocab_size=1, hidden_size=options.inputs, intermediate_size=options.outputs, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=2,
    )  # fmt: skip
    measured = roofline.measure(shape, max(case.batch for case in listed))
    rates = Rates.best(measured)
    rows = lora_operator_report.run(listed, options.rounds, options.seed, rates)
    footer = f"{options.inputs} × {options.outputs}, {listed[0].dtype}; {footer}"
    found = lora_operator_report.write(folder, rows, rates, footer)
    table = lora_operator_report.table(rows)
    return found | {"rates": measured}, f"{table}\n({footer})"


def measure_engines(
    options: Options, settings: lora_engine.Settings, folder: Path, footer: str
) -> tuple[dict[str, Any], dict[str, float | None], str]:
    """The engines' part of report.json, the numbers of summary.json, and what is printed."""
    missing = [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]
    runs: list[lora_engine.Run] = []
    floors: list[lora_engine.Floor] = []
    rates = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            model = model_folder(name, Path(scratch), options.seed)
            peft = name == "bundled" and not missing
            more, least, rates[name] = lora_engine.run_model(
                name, model, settings, Path(scratch) / "adapters", peft
            )
        runs += more
        floors += least
    found = lora_engine_report.write(folder, runs, floors, footer)
    versions = {p: importlib.metadata.version(p) for p in PEER_PACKAGES if p not in missing}
    lines = [
        f"batch {settings.batch}, rank {settings.rank}, float32; {footer}",
        lora_engine_report.table(runs, floors),
    ]
    if missing:
        lines.append(
            f"PEFT took no part, as {' and '.join(missing)} cannot be imported: pip install "
            "'paged-jax[parity]' brings both; `make test-parity` installs them into .venv-parity"
        )
    facts = found | {"rates": rates, "settings": settings, "peer_versions": versions}
    return facts, lora_engine_report.summary(runs), "\n".join(lines)


def main(options: Options) -> None:
    with refusals():
        unknown = set(options.levels) - set(LEVELS)
        if unknown or not options.levels:
            raise ValueError(f"--levels are some of {', '.join(LEVELS)}, not {options.levels}")
        listed, settings = operator_cases(options), engine_settings(options)
    began, environment = time.perf_counter(), run_record.describe_environment()
    folder, footer = Path(options.output_dir), run_record.hardware_line(environment)
    facts: dict[str, Any] = {"experiment": "bench_lora", "flags": vars(options)}
    ratios: dict[str, float | None] = {}
    printed = []
    if "engine" in options.levels:
        facts["engine"], ratios, text = measure_engines(options, settings, folder, footer)
        printed.append(text)
    if "operator" in options.levels:
        facts["operator"], text = measure_operator(options, listed, folder, footer)
        ratios = ratios or facts["operator"]["summary"]
        printed.append(text)
    facts |= {"summary": ratios, "seconds": time.perf_counter() - began}
    run_record.write_json(folder, "report.json", facts | environment)
    run_record.write_json(folder, "summary.json", ratios)
    print("\n\n".join(printed))


def define_flags() -> None:
    flags.DEFINE_list("levels", list(LEVELS), f"some of {', '.join(LEVELS)}")
    flags.DEFINE_list("models", list(MODELS), f"engine: {MODELS_HELP}")
    flags.DEFINE_integer("batch", 32, "engine: requests, and adapters", lower_bound=1)
    flags.DEFINE_integer("rank", 16, "engine: of the adapters", lower_bound=1)
    flags.DEFINE_list("prompt_tokens", ["4", "12"], "engine: shortest and longest prompt")
    flags.DEFINE_integer("output_tokens", 40, "engine: tokens of each output", lower_bound=1)
    flags.DEFINE_integer("multi_step", 8, "engine: tokens of a dispatch", lower_bound=1)
    flags.DEFINE_integer("repeats", 5, "engine: timed runs of each system", lower_bound=1)
    flags.DEFINE_list("popularities", list(POPULARITIES), "operator: of adapters (§7)")
    flags.DEFINE_list("batches", ["1", "4", "16", "32", "64"], "operator: tokens of a call")
    flags.DEFINE_list("ranks", ["8", "16", "32", "64"], "operator: of all adapters of a call")
    flags.DEFINE_integer("inputs", 4096, "operator: width of the input", lower_bound=1)
    flags.DEFINE_integer("outputs", 4096, "operator: width of the output", lower_bound=1)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16", "float16"],
        "operator: of all arrays; by default float32 on a CPU, where no other is fast, and else "
        "bfloat16",
    )  # fmt: skip
    flags.DEFINE_integer("rounds", 5, "operator: of all implementations, in turn", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of weights, adapters and prompts", lower_bound=0)


PROGRAM = Program(
    main,
    define_flags,
    "results/bench_lora",
    (*lora_engine_report.FILES, *lora_operator_report.FILES),
)

if __name__ == "__main__":
    PROGRAM.run()
