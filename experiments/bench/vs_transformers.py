"""Races the engine against transformers on this machine: same weights, prompts and lengths.

    python -m experiments.bench.vs_transformers

Three systems, in one process and in float32, generate equally many greedy tokens from the same
prompts of ragged lengths, end of sequence ignored:

    ours        this engine, `Engine.generate`
    static      transformers' `generate` on one left-padded batch
    continuous  transformers' continuous batching, the manager behind `generate_batch`, kept running

Each is warmed up on the same batch; then they take turns, and medians of their times count. Models:
'bundled', and '100m', a random Llama of 110 million parameters. At the largest batch the engine's
decode steps are also compared with their floor (experiments/bench/floors.py).

Needs torch (the extra `parity`). Writes to --output_dir: runs.csv, report.json, summary.json and
throughput.png.
"""

import importlib.metadata
import importlib.util
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench import floors
from experiments.lib import run_record
from experiments.lib.flags import define_fields, fields_of
from experiments.lib.program import Options, Program, refusals
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.hub import BUNDLED
from paged.engine import Engine, EngineConfig
from paged.metrics import StepRecord
from paged.requests.sampling_params import SamplingParams

MODELS = ("bundled", "100m")
MODELS_HELP = f"some of {', '.join(MODELS)}"
SYSTEMS = ("ours", "static", "continuous")
RANDOM_100M = ModelConfig(
    model_type="llama", vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_layers=12,
    num_heads=12, num_kv_heads=12, head_dim=64, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip
# transformers' continuous batching. Of pages of 16 to 256 tokens and steps of 32 to 2,048, these
# are among the fastest here, for prompts and decoding alike. Blocks are not shared, lest a
# repetition find its prompts cached.
CONTINUOUS: dict[str, Any] = {
    "page_size": 64,
    "max_batch_tokens": 512,
    "allow_block_sharing": False,
}

Tokens = list[list[int]]
System = Callable[[Tokens, int], Tokens]  # (prompts, output tokens of each) -> outputs


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


@dataclass(frozen=True)
class Run:
    """One timed run. equal: share of its tokens that are those of our first run."""

    model: str
    batch: int
    system: str
    repeat: int
    seconds: float
    output_tokens: int
    equal: float


@dataclass(frozen=True)
class StepTimes:
    """The engine's steps that only decode a full batch; medians over them, in seconds.

    step_s: from the end of one to the end of the next, per token of each sequence. host_s: what
    the host worked in it. floor_s: of the step in the middle of the generation.
    """

    model: str
    batch: int
    steps: int
    step_s: float
    host_s: float
    floor_s: float


def integers(name: str, values: Sequence[str]) -> tuple[int, ...]:
    """The flag's values as whole numbers; ValueError names what is none."""
    for value in values:
        if not value.isdigit():
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


def ours(engine: Engine) -> System:
    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        how = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return [output.tokens for output in engine.generate(prompts, how)]

    return run


def load_torch(folder: Path):
    """transformers' model in float32 with SDPA attention, on all cores, never ending a sequence."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    torch.set_num_threads(run_record.describe_environment()["hardware"]["cpu_cores"])
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=None
    )
    return model


def static(model) -> System:
    import torch

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=output_tokens)
        return out[:, longest:].tolist()

    return run


def continuous(model, settings: Settings) -> tuple[System, Callable[[], None]]:
    """The system, and what stops its background thread."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = -(-settings.max_model_len // CONTINUOUS["page_size"]) + 1
    config = ContinuousBatchingConfig(
        num_blocks=max(settings.batches) * pages,
        max_requests_per_batch=max(settings.batches),
        **CONTINUOUS,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation, config)
    manager.start()

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        ids = manager.add_requests(prompts, max_new_tokens=output_tokens)
        results: dict[str, list[int]] = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended in the middle of a run")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                results[result.request_id] = result.generated_tokens
        return [results[i] for i in ids]

    return run, lambda: manager.stop(block=True)


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


def summarise(runs: Sequence[Run], steps: Sequence[StepTimes]) -> dict[str, float]:
    """The numbers of summary.json.

    tokens_per_s_<system>_<model>_<batch>: median over the repeats. speedup_<system>_<model>: ours
    over that system's at the largest batch. equal_<system>_<model>: share of tokens that are ours,
    over all batches. step_over_floor_<model>, host_share_<model>: of `StepTimes`.
    """
    numbers: dict[str, float] = {}
    for model in dict.fromkeys(run.model for run in runs):
        mine = [run for run in runs if run.model == model]
        largest = max(run.batch for run in mine)
        for batch in sorted({run.batch for run in mine}):
            for system in dict.fromkeys(run.system for run in mine):
                rates = [
                    run.output_tokens / run.seconds
                    for run in mine
                    if (run.batch, run.system) == (batch, system)
                ]
                numbers[f"tokens_per_s_{system}_{model}_{batch}"] = float(np.median(rates))
        for system in dict.fromkeys(run.system for run in mine if run.system != "ours"):
            fast, slow = (numbers[f"tokens_per_s_{s}_{model}_{largest}"] for s in ("ours", system))
            numbers[f"speedup_{system}_{model}"] = fast / slow
            shares = [run.equal for run in mine if run.system == system]
            numbers[f"equal_{system}_{model}"] = float(np.mean(shares))
    for step in steps:
        numbers[f"step_over_floor_{step.model}"] = step.step_s / step.floor_s
        numbers[f"host_share_{step.model}"] = step.host_s / step.step_s
    return numbers


def table(runs: Sequence[Run], steps: Sequence[StepTimes], hardware: str) -> str:
    """The race on one screen: output tokens per second."""
    numbers = summarise(runs, steps)
    lines = [f"output tokens/s on {hardware}", f"{'model':9}{'batch':>6}"]
    lines[1] += "".join(f"{system:>12}" for system in SYSTEMS) + "   ours is"
    for model, batch in dict.fromkeys((run.model, run.batch) for run in runs):
        rates = [numbers[f"tokens_per_s_{system}_{model}_{batch}"] for system in SYSTEMS]
        times = " and ".join(f"{rates[0] / rate:.1f}×" for rate in rates[1:])
        cells = "".join(f"{rate:12,.1f}" for rate in rates)
        lines.append(f"{model:9}{batch:6}{cells}   {times}")
    for step in steps:
        lines.append(
            f"{step.model} at batch {step.batch}: a decode step takes {1e3 * step.step_s:.2f} ms, "
            f"{step.step_s / step.floor_s:.2f}× its floor; the host's share is "
            f"{step.host_s / step.step_s:.1%}"
        )
    for name, share in numbers.items():
        if name.startswith("equal_"):
            lines.append(f"tokens of {name[6:].replace('_', ' on ')} that are ours: {share:.2%}")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path, footer: str) -> None:
    """Output tokens per second over the batch, a line a system, a panel a model."""
    numbers = summarise(runs, [])
    models = list(dict.fromkeys(run.model for run in runs))
    figure = Figure(figsize=(4.5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        batches = sorted({run.batch for run in runs if run.model == model})
        for system in SYSTEMS:
            rates = [numbers[f"tokens_per_s_{system}_{model}_{batch}"] for batch in batches]
            axes.plot(batches, rates, marker="o", label=system)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_title(model, loc="left", fontsize="medium")
        axes.set(xlabel="batch", ylabel="output tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=150)


def write(
    output_dir: Path, runs: Sequence[Run], steps: Sequence[StepTimes], facts: dict[str, Any]
) -> str:
    """All files of a race; returns the table."""
    environment = run_record.describe_environment()
    environment["versions"]["torch"] = importlib.metadata.version("torch")
    hardware = run_record.hardware_line(environment)
    run_record.write_csv(output_dir, "runs.csv", runs)
    numbers = summarise(runs, steps)
    content = facts | {"measured_on": hardware, "summary": numbers, "steps": steps, **environment}
    run_record.write_json(output_dir, "report.json", content)
    run_record.write_summary(output_dir, numbers)
    plot(runs, output_dir / "throughput.png", hardware)
    return table(runs, steps, hardware)


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
) -> tuple[list[Run], StepTimes, floors.Rates]:
    """Race the three systems on one model; at the largest batch, the engine's step times."""
    model, params = checkpoint.load(folder)
    engine = Engine.from_model(params, model, config)
    engine.warm_up(progress)
    torch_model = load_torch(folder)
    run_continuous, stop = continuous(torch_model, settings)
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
    rates = floors.measure(model, batch)
    dispatches = 1 / config.multi_step
    floor = floors.floor_s(floors.step_work(model, contexts), rates, dispatches)
    step = StepTimes(
        name, batch, len(times), float(np.median(times)), float(np.median(host)), floor
    )
    return runs, step, rates


def prepare(options: Options) -> tuple[Settings, EngineConfig]:
    """What the flags ask for, checked before any work; raises ValueError."""
    settings = read_settings(options)
    fields = fields_of(EngineConfig, options) | {"max_model_len": settings.max_model_len}
    config = EngineConfig(**fields)
    if settings.batches[-1] > config.max_num_seqs:
        raise ValueError(
            f"a batch of {settings.batches[-1]} exceeds max_num_seqs ({config.max_num_seqs})"
        )
    limits = {
        name: RANDOM_100M if name == "100m" else checkpoint.load_config(name)
        for name in settings.models
    }
    for name, model in limits.items():
        if settings.max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"the longest prompt and {settings.output_tokens} tokens exceed the context of "
                f"{name}, {model.max_position_embeddings} tokens"
            )
    if importlib.util.find_spec("torch") is None:
        raise ValueError("this race needs torch: make test-parity installs it into .venv-parity")
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
