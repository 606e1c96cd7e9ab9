"""Races of systems that take turns generating the same tokens: this engine, transformers, PEFT."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.typed_flags import Flags, flag
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.hub import BUNDLED
from paged.device import compilations
from paged.engine import Engine
from paged.metrics import StepRecord
from paged.requests.sampling_params import SamplingParams

MODELS = ("bundled", "100m")
RANDOM_100M = ModelConfig(
    model_type="llama", vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_layers=12,
    num_heads=12, num_kv_heads=12, head_dim=64, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip
Tokens = list[list[int]]
System = Callable[[Tokens, int], Tokens]  # (prompts, output tokens of each) -> outputs

# Options of transformers' continuous batching. Of pages of 16 to 256 tokens and steps of 32 to
# 2,048 tokens, these sizes are among the fastest for prefill and for decode. Blocks are not shared,
# because otherwise the prompts of later runs would hit the prefix cache.
CONTINUOUS: dict[str, Any] = {
    "page_size": 64,
    "max_batch_tokens": 512,
    "allow_block_sharing": False,
}


def ours(engine: Engine, adapters: Sequence[str] | None = None) -> System:
    """This engine as a system. adapters: each prompt's adapter, by name."""

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        how = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return [output.tokens for output in engine.generate(prompts, how, adapters)]

    return run


def load_torch(folder: Path):
    """transformers' model in float32 with SDPA attention, on all cores, without an EOS token."""
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


def static(model, adapters: Sequence[str] | None = None) -> System:
    """transformers' `generate` as a system. adapters: each prompt's PEFT adapter, by name."""
    import torch

    which = {"adapter_names": list(adapters)} if adapters else {}

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=output_tokens, **which
        )
        return out[:, longest:].tolist()

    return run


def with_peft(model, folders: Mapping[str, Path]):
    """The model with PEFT's LoRA adapters, by name. `static` may mix them in a batch."""
    from peft import PeftModel

    adapters = iter(folders.items())
    name, folder = next(adapters)
    peft = PeftModel.from_pretrained(model, folder, adapter_name=name)
    for name, folder in adapters:
        peft.load_adapter(folder, adapter_name=name)
    return peft.eval()


def continuous(model, max_batch: int, max_model_len: int) -> tuple[System, Callable[[], None]]:
    """(transformers' continuous batching as a system, a function that stops its background thread),
    for batches and sequences up to these sizes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = -(-max_model_len // CONTINUOUS["page_size"]) + 1
    config = ContinuousBatchingConfig(
        num_blocks=max_batch * pages,
        max_requests_per_batch=max_batch,
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


@dataclass(frozen=True)
class RaceFlags(Flags):
    models: tuple[str, ...] = flag(MODELS, "'100m' is a random Llama", choices=MODELS)
    prompt_tokens: tuple[int, ...] = flag((32, 128), "shortest and longest prompt", least=1)
    output_tokens: int = flag(64, "tokens of each output", least=4)
    repeats: int = flag(5, "timed runs of each system", least=1)
    seed: int = flag(0, "of prompts and random weights", least=0)

    def __post_init__(self):
        super().__post_init__()
        if len(self.prompt_tokens) != 2 or self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ValueError(
                f"--prompt_tokens are the shortest and the longest, not {self.prompt_tokens}"
            )

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt and output."""
        return self.prompt_tokens[1] + self.output_tokens


def model_config(name: str) -> ModelConfig:
    """The configuration of a model of `MODELS`."""
    return RANDOM_100M if name == "100m" else checkpoint.load_config(name)


def model_folder(name: str, scratch: Path, seed: int) -> Path:
    """The Hugging Face folder that all systems load; '100m' is written to `scratch`."""
    if name == "bundled":
        return BUNDLED
    folder = scratch / name
    params = parameters.init(llama.declare(RANDOM_100M), jax.random.key(seed))
    checkpoint.save(folder, RANDOM_100M, params)
    return folder


def make_prompts(vocab_size: int, batch: int, span: Sequence[int], seed: int) -> Tokens:
    """Random prompts of lengths uniform in span, both ends included."""
    rng = np.random.default_rng([seed, batch])
    lengths = rng.integers(span[0], span[1] + 1, batch)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def equal_share(outputs: Tokens, reference: Tokens) -> float:
    """Share of tokens that equal the reference's at the same position."""
    same = [a == b for x, y in zip(outputs, reference, strict=True) for a, b in zip(x, y)]
    return float(np.mean(same))


def decode_times(steps: Sequence[StepRecord], batch: int) -> tuple[list[float], list[float]]:
    """(step seconds, host seconds) of the steps that only decode `batch` sequences, each time per
    token of a sequence.

    A step is included only if the previous step also only decodes `batch` sequences, because the
    time between the ends of the two steps is then the time of one step. The time of a multi-token
    step is divided by its number of tokens per sequence.
    """
    times, host = [], []
    for before, step in itertools.pairwise(steps):
        decodes = [s.prefill_tokens == 0 and s.num_running == batch for s in (before, step)]
        if all(decodes) and step.decode_tokens >= batch:
            tokens = step.decode_tokens / batch
            times.append((step.time_s - before.time_s) / tokens)
            host.append(step.host_s / tokens)
    return times, host


@dataclass(frozen=True)
class Contestant:
    """A system in a race.

    sequences: sequences in each of its decode steps.
    engine: this engine; None for peers.
    floor_s: floor of a decode step in the middle of the generation, in seconds.
    same_as: name of the system whose tokens are the reference; empty if the reference is the
        contestant's own first output.
    """

    generate: System
    sequences: int
    engine: Engine | None = None
    floor_s: float | None = None
    same_as: str = ""


@dataclass(frozen=True)
class Row:
    """One timed run.

    seconds, cpu_s: wall and CPU time, prefill included.
    equal: share of the tokens that equal the reference's.
    sequences: sequences in a decode step.
    step_s: median time between the ends of decode steps, per token of a sequence; None for peers.
    host_s: median host time of decode steps, per token of a sequence; None for peers.
    floor_s: floor of a decode step.
    """

    model: str
    batch: int
    system: str
    repeat: int
    seconds: float
    cpu_s: float
    output_tokens: int
    equal: float
    sequences: int
    step_s: float | None
    host_s: float | None
    floor_s: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.sequences / self.step_s


def race(
    model: str, systems: Mapping[str, Contestant], prompts: Tokens, output_tokens: int,
    repeats: int,
) -> Iterator[Row]:  # fmt: skip
    """All timed runs: each system in turn, `repeats` times, after one round that compiles.

    Raises RuntimeError if an output does not have `output_tokens` tokens, or a timed run compiles.
    """
    batch = len(prompts)
    reference: dict[str, Tokens] = {}
    rounds = [(repeat, system) for repeat in range(-1, repeats) for system in systems]
    for repeat, system in tqdm(rounds, f"{model}, batch {batch}", unit=" runs", leave=False):
        one = systems[system]
        steps = one.engine.metrics.steps if one.engine else []
        first, compiled = len(steps), compilations.count()
        time.sleep(0.05)  # time for the previous system's threads to stop spinning
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = one.generate(prompts, output_tokens)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        lengths = [len(output) for output in outputs]
        if lengths != [output_tokens] * batch:
            raise RuntimeError(f"{system} gave outputs of {lengths} tokens")
        expected = reference.setdefault(one.same_as or system, outputs)
        if repeat < 0:
            continue
        if compilations.count() != compiled:
            raise RuntimeError(f"{model}: a timed run of {system} compiled a program")
        times, host = decode_times(steps[first:], one.sequences)
        yield Row(
            model, batch, system, repeat, seconds, cpu_s, batch * output_tokens,
            equal_share(outputs, expected), one.sequences,
            float(np.median(times)) if times else None, float(np.median(host)) if host else None,
            one.floor_s,
        )  # fmt: skip


def median(rows: Sequence[Row], model: str, batch: int, system: str, field: str) -> float | None:
    """Median of a field over the repeats; None if the system did not run, or a value is None."""
    key = model, batch, system
    found = [getattr(r, field) for r in rows if (r.model, r.batch, r.system) == key]
    return float(np.median(found)) if found and None not in found else None


def contests(rows: Sequence[Row]) -> dict[tuple[str, int], list[str]]:
    """The systems of each model and batch."""
    found: dict[tuple[str, int], dict[str, None]] = {}
    for row in rows:
        found.setdefault((row.model, row.batch), {})[row.system] = None
    return {key: list(systems) for key, systems in found.items()}


def table(_: object, rows: Sequence[Row]) -> str:
    """A line for each system, model and batch."""
    lines = [
        f"{'model':9}{'batch':>6}  {'':14}{'tokens/s':>10}{'seconds':>9}{'CPU s':>8}"
        f"{'decode/s':>10}{'step ms':>9}{'floor ms':>9}{'host':>6}{'tokens equal':>14}"
    ]
    for (model, batch), systems in contests(rows).items():
        for system in systems:
            fields = ("tokens_per_s", "seconds", "cpu_s", "decode_tokens_per_s", "step_s",
                      "floor_s", "host_s", "equal")  # fmt: skip
            rate, seconds, cpu_s, decode, step, floor, host, equal = (
                median(rows, model, batch, system, field) for field in fields
            )
            line = f"{model:9}{batch:6}  {system:14}{rate:10,.1f}{seconds:9.3f}{cpu_s:8.2f}"
            if decode and step and host is not None:
                line += f"{decode:10,.1f}{1e3 * step:9.2f}"
                line += f"{1e3 * floor:9.2f}" if floor else f"{'–':>9}"
                line += f"{host / step:6.1%}"
            else:
                line += f"{'–':>10}{'–':>9}{'–':>9}{'–':>6}"
            lines.append(f"{line}{equal:14.1%}")
    return "\n".join(lines)


def draw(_: object, figure: Figure, rows: Sequence[Row]) -> None:
    """Output tokens a second over the batch size, a panel for each model, a line for each system;
    bars if there is one batch size."""
    models = list(dict.fromkeys(row.model for row in rows))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        found = {batch: names for (name, batch), names in contests(rows).items() if name == model}
        rates = {
            system: {b: median(rows, model, b, system, "tokens_per_s") or 0 for b in found}
            for system in dict.fromkeys(name for names in found.values() for name in names)
        }
        if len(found) == 1:
            bars = axes.bar(list(rates), [max(each.values()) for each in rates.values()])
            axes.bar_label(bars, fmt="{:,.0f}", fontsize="small")
            axes.tick_params("x", labelrotation=20)
        else:
            for system, by_batch in rates.items():
                axes.plot(list(by_batch), list(by_batch.values()), marker="o", label=system)
            axes.set(xscale="log", yscale="log", xlabel="batch")
            axes.set_xticks(list(found), list(map(str, found)))
            axes.legend(frameon=False)
        axes.set(title=model, ylabel="output tokens/s")
