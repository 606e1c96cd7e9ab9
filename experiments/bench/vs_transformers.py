"""Races the engine against transformers on this machine: same weights, prompts and lengths.

    python -m experiments.bench.vs_transformers

Three systems, in one process and in float32, generate equally many greedy tokens from the same
prompts of ragged lengths, end of sequence ignored:

    ours        this engine, `Engine.generate`
    static      transformers' `generate` on one left-padded batch
    continuous  transformers' continuous batching, the manager behind `generate_batch`, kept running

Each is warmed up on the same batch; then they take turns, and medians of their times count. Models:
'bundled', and '100m', a random Llama of 110 million parameters. At the largest batch the engine's
decode steps are also compared with their floor (paged/simulator/roofline.py).

Needs torch (the extra `parity`). Writes to --output_dir: runs.csv, report.json, summary.json and
throughput.png.
"""

import importlib.metadata
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.bench.race_report import Run, StepTimes, write
from experiments.bench.race_systems import (
    CONTINUOUS,
    System,
    Tokens,
    continuous,
    load_torch,
    ours,
    static,
)
from experiments.lib.flags import define_fields, fields_of
from experiments.lib.program import Options, Program, refusals
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.hub import BUNDLED
from paged.engine import Engine, EngineConfig
from paged.metrics import StepRecord
from paged.simulator import roofline
from pallas_kernels.specs import Rates

MODELS = ("bundled", "100m")
MODELS_HELP = f"some of {', '.join(MODELS)}"
SYSTEMS = ("ours", "static", "continuous")
RANDOM_100M = ModelConfig(
    model_type="llama", vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_layers=12,
    num_heads=12, num_kv_heads=12, head_dim=64, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is run; raises ValueError for what cannot be. prompt_tokens: shortest and longest."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, int]
    output_tokens: int
    repeats: int

    def __post_init__(self):
        unknown = [name for name in self.models if name not in MODELS]
        if unknown or not self.models:
            raise ValueError(f"--models are some of {', '.join(MODELS)}, not {self.models}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"--batches are one or more whole numbers from 1, not {self.batches}")
        low, high = self.prompt_tokens
        if not 1 <= low <= high:
            raise ValueError(f"--prompt_tokens are the shortest and the longest, not {low},{high}")
        if self.output_tokens < 4:
            raise ValueError(f"--output_tokens must be at least 4, not {self.output_tokens}")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, not {self.repeats}")

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens[1] + self.output_tokens


def integers(name: str, values: Sequence[str]) -> tuple[int, ...]:
    """The flag's values as whole numbers; ValueError names what is none."""
    for value in values:
        if not value.isdecimal():
            raise ValueError(f"--{name} takes whole numbers, not {value!r}")
    return tuple(int(value) for value in values)


def read_settings(options: Options) -> Settings:
    """The flags, checked; raises ValueError."""
    span = integers("prompt_tokens", options.prompt_tokens)
    if len(span) != 2:
        raise ValueError(f"--prompt_tokens are two numbers, shortest and longest, not {span}")
    return Settings(
        tuple(options.models),
        tuple(sorted(set(integers("batches", options.batches)))),
        (span[0], span[1]),
        options.output_tokens,
        options.repeats,
    )


def make_prompts(vocab_size: int, batch: int, span: tuple[int, int], seed: int) -> Tokens:
    """Random prompts of lengths uniform in span, both ends included."""
    rng = np.random.default_rng([seed, batch])
    lengths = rng.integers(span[0], span[1] + 1, batch)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def equal_share(outputs: Tokens, reference: Tokens) -> float:
    """Share of tokens that are the reference's at the same place."""
    same = [a == b for x, y in zip(outputs, reference, strict=True) for a, b in zip(x, y)]
    return float(np.mean(same))


def race(
    name: str,
    systems: dict[str, System],
    vocab_size: int,
    settings: Settings,
    seed: int,
    progress: bool = True,
) -> list[Run]:
    """All timed runs of a model: each system in turn, `repeats` times, after one warm-up each.

    Raises RuntimeError if a system's output has not the length that was asked for.
    """
    runs = []
    rounds = len(settings.batches) * (settings.repeats + 1)
    bar = tqdm(total=rounds * len(systems), desc=name, unit=" runs", disable=not progress)
    for batch in settings.batches:
        prompts = make_prompts(vocab_size, batch, settings.prompt_tokens, seed)
        reference: Tokens = []
        for repeat in range(-1, settings.repeats):
            for system, generate in systems.items():
                time.sleep(0.05)  # worker threads of the one before stop spinning
                began = time.perf_counter()
                outputs = generate(prompts, settings.output_tokens)
                seconds = time.perf_counter() - began
                lengths = [len(output) for output in outputs]
                if lengths != [settings.output_tokens] * batch:
                    raise RuntimeError(f"{system} gave outputs of {lengths} tokens")
                reference = reference or outputs
                if repeat >= 0:
                    tokens = batch * settings.output_tokens
                    equal = equal_share(outputs, reference)
                    runs.append(Run(name, batch, system, repeat, seconds, tokens, equal))
                bar.set_postfix_str(f"batch {batch}, {system}: {seconds:.2f} s")
                bar.update()
    bar.close()
    return runs


def decode_times(steps: Sequence[StepRecord], batch: int) -> tuple[list[float], list[float]]:
    """Step and host seconds per token, of the steps that only decode `batch` sequences.

    Only those that follow another such step: the time between is then a step's. A step that
    computes several tokens of each sequence counts by the token.
    """
    times, host = [], []
    for before, step in itertools.pairwise(steps):
        decodes = [s.prefill_tokens == 0 and s.num_running == batch for s in (before, step)]
        if all(decodes) and step.decode_tokens >= batch:
            tokens = step.decode_tokens / batch
            times.append((step.time_s - before.time_s) / tokens)
            host.append(step.host_s / tokens)
    return times, host


def model_config(name: str) -> ModelConfig:
    """The shape of one of `MODELS`."""
    return RANDOM_100M if name == "100m" else checkpoint.load_config(name)


def model_folder(name: str, scratch: Path, seed: int) -> Path:
    """The Hugging Face folder that all systems load; '100m' is written to `scratch`."""
    if name == "bundled":
        return BUNDLED
    folder = scratch / name
    params = parameters.init(llama.declare(RANDOM_100M), jax.random.key(seed))
    checkpoint.save(folder, RANDOM_100M, params)
    return folder


def run_model(
    name: str, folder: Path, settings: Settings, config: EngineConfig, progress: bool = True
) -> tuple[list[Run], StepTimes, dict[str, float]]:
    """Race the three systems on one model; at the largest batch, the engine's step times, and the
    machine's measured rates."""
    model, params = checkpoint.load(folder)
    engine = Engine.from_model(params, model, config)
    engine.warm_up(progress)
    torch_model = load_torch(folder)
    run_continuous, stop = continuous(torch_model, max(settings.batches), settings.max_model_len)
    systems = {"ours": ours(engine), "static": static(torch_model), "continuous": run_continuous}
    try:
        runs = race(name, systems, model.vocab_size, settings, config.seed, progress)
    finally:
        stop()
    batch = settings.batches[-1]
    times, host = decode_times(engine.metrics.steps, batch)
    if not times:
        raise RuntimeError(f"{name}: no two steps in a row only decoded {batch} sequences")
    prompts = make_prompts(model.vocab_size, batch, settings.prompt_tokens, config.seed)
    contexts = [len(prompt) + settings.output_tokens // 2 for prompt in prompts]
    measured = roofline.measure(model, batch)
    cost = roofline.step_cost(model, contexts)
    floor = Rates.best(measured).floor_s(cost, dispatches=1 / config.multi_step)
    step = StepTimes(
        name, batch, len(times), float(np.median(times)), float(np.median(host)), floor
    )
    return runs, step, measured


def prepare(options: Options) -> tuple[Settings, EngineConfig]:
    """What the flags ask for, checked before any work; raises ValueError."""
    settings = read_settings(options)
    fields = fields_of(EngineConfig, options) | {"max_model_len": settings.max_model_len}
    config = EngineConfig(**fields)
    if settings.batches[-1] > config.max_num_seqs:
        raise ValueError(
            f"a batch of {settings.batches[-1]} exceeds max_num_seqs ({config.max_num_seqs})"
        )
    for name in settings.models:
        longest = model_config(name).max_position_embeddings
        if settings.max_model_len > longest:
            raise ValueError(
                f"the longest prompt and {settings.output_tokens} tokens exceed the context of "
                f"{name}, {longest} tokens"
            )
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "this race needs torch: pip install 'paged-jax[parity]' brings it, and in a checkout "
            "make test-parity installs it into .venv-parity"
        )
    return settings, config


def main(options: Options) -> None:
    with refusals():
        settings, config = prepare(options)
    runs: list[Run] = []
    steps: list[StepTimes] = []
    rates = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in settings.models:
            folder = model_folder(name, Path(scratch), options.seed)
            more, step, rates[name] = run_model(name, folder, settings, config)
            runs += more
            steps.append(step)
    facts = {
        "experiment": "bench_vs_transformers",
        "flags": vars(options),
        "seed": options.seed,
        "continuous": CONTINUOUS,
        "random_100m": asdict(RANDOM_100M),
        "rates": rates,
    }
    print(write(Path(options.output_dir), runs, steps, facts))
    print(f"runs.csv, report.json, summary.json and throughput.png are in {options.output_dir}/")


def define_flags() -> None:
    flags.DEFINE_list("models", list(MODELS), MODELS_HELP)
    flags.DEFINE_list("batches", ["1", "8", "32"], "requests that are generated together")
    flags.DEFINE_list("prompt_tokens", ["32", "128"], "shortest and longest prompt")
    flags.DEFINE_integer("output_tokens", 64, "tokens of each output")
    flags.DEFINE_integer("repeats", 5, "timed runs of each system, model and batch")
    flags.DEFINE_integer("seed", 0, "of prompts and random weights", lower_bound=0)
    define_fields(EngineConfig, leave_out=("max_model_len", "seed"))


PROGRAM = Program(
    main, define_flags, "results/bench_vs_transformers", ("runs.csv", "throughput.png")
)

if __name__ == "__main__":
    PROGRAM.run()
