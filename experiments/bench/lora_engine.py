"""Whole engines that serve LoRA adapters, and what they are compared with (Punica §7.2).

In one process, with the same weights, prompts and lengths, take turns:

    base           an engine without adapters
    idle           an engine with adapters configured, of which the batch uses none
    identical      the same engine; all requests of the batch use one adapter
    distinct       each request has an adapter of its own
    one_at_a_time  the same requests, each alone: what the paper lets systems do that cannot batch
                   different adapters; all of them are on the device, so switching costs nothing
    peft           transformers and PEFT with `adapter_names`: the same mixed batch
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.bench.race_systems import System, Tokens, load_torch, ours, static, with_peft
from experiments.bench.vs_transformers import decode_times, equal_share, make_prompts
from experiments.lib import random_adapters
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.device import compilations
from paged.engine import Engine
from paged.simulator import roofline
from pallas_kernels.specs import Cost, Rates

PEFT = "peft"
SYSTEMS = ("base", "idle", "identical", "distinct", "one_at_a_time", PEFT)
# Whose tokens a system must give, near ties apart.
SAME_AS = {"idle": "base", "one_at_a_time": "distinct", PEFT: "distinct"}


@dataclass(frozen=True)
class Settings:
    """What is run. prompt_tokens: shortest and longest. multi_step: of the engines. Raises
    ValueError for what cannot be."""

    batch: int
    rank: int
    prompt_tokens: tuple[int, int]
    output_tokens: int
    repeats: int
    multi_step: int
    seed: int = 0

    def __post_init__(self):
        low, high = self.prompt_tokens
        if not 1 <= low <= high:
            raise ValueError(f"--prompt_tokens are the shortest and the longest, not {low},{high}")
        if self.output_tokens < 2 * self.multi_step + 2:
            raise ValueError(
                f"--output_tokens ({self.output_tokens}) must be at least 2 more than two steps of "
                f"--multi_step ({self.multi_step}): the time between steps is what counts"
            )
        assert self.lora_config  # which refuses what cannot work

    @property
    def config(self) -> EngineConfig:
        """Of the engine without adapters. Raises ValueError for what cannot work."""
        longest = self.prompt_tokens[1] + self.output_tokens
        return EngineConfig(
            max_num_seqs=self.batch, max_prefills_per_step=self.batch, max_model_len=longest,
            max_num_batched_tokens=max(512, self.batch), multi_step=self.multi_step,
            kv_cache_tokens=self.batch * (longest + EngineConfig.page_size), watermark=0.0,
            seed=self.seed,
        )  # fmt: skip

    @property
    def lora_config(self) -> EngineConfig:
        """Of the engine with adapters, all of which it holds."""
        return replace(self.config, adapter_slots=self.batch, max_adapter_rank=self.rank)


@dataclass(frozen=True)
class Contestant:
    """How a system generates. engine: None for peers. sequences: of its decode steps. adapters: how
    many different ones such a step reads. with_adapter: tokens of it that have one."""

    generate: System
    engine: Engine | None
    sequences: int
    adapters: int
    with_adapter: int


@dataclass(frozen=True)
class Run:
    """One timed run. seconds, cpu_s: wall and CPU time, prompts included. step_s: the median time
    from one decode step's end to the next one's, for each token of a sequence; None for peers.
    sequences: of these steps. equal: share of the tokens that are those of `SAME_AS`."""

    model: str
    system: str
    repeat: int
    seconds: float
    cpu_s: float
    output_tokens: int
    sequences: int
    step_s: float | None
    equal: float

    @property
    def decode_tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.sequences / self.step_s


@dataclass(frozen=True)
class Floor:
    """What a decode step of a system cannot do without, in the middle of the generation, and the
    seconds of that at the machine's measured rates. adapter_bytes: of the adapters that it reads;
    adapter_flops: of their products."""

    model: str
    system: str
    bytes: int
    flops: int
    adapter_bytes: int
    adapter_flops: int
    floor_s: float


def contestants(
    params, model: ModelConfig, settings: Settings, scratch: Path
) -> tuple[dict[str, Contestant], dict[str, Path]]:
    """The systems that are engines, and the folders of their adapters by name, in scratch."""
    base = Engine.from_model(params, model, settings.config)
    lora = Engine.from_model(params, model, settings.lora_config)
    folders = {
        name: random_adapters.write(scratch / name, model, settings.seed + i, settings.rank)
        for i, name in enumerate(f"a{i}" for i in range(settings.batch))
    }
    for name, folder in folders.items():
        lora.add_adapter(name, folder)
    names, n = list(folders), settings.batch

    def alone(prompts: Tokens, output_tokens: int) -> Tokens:
        return [
            ours(lora, [name])([prompt], output_tokens)[0]
            for prompt, name in zip(prompts, names, strict=True)
        ]

    return {
        "base": Contestant(ours(base), base, n, 0, 0),
        "idle": Contestant(ours(lora), lora, n, 0, 0),
        "identical": Contestant(ours(lora, names[:1] * n), lora, n, 1, n),
        "distinct": Contestant(ours(lora, names), lora, n, n, n),
        "one_at_a_time": Contestant(alone, lora, 1, 1, 1),
    }, folders


def race(
    name: str, systems: dict[str, Contestant], prompts: Tokens, settings: Settings,
    progress: bool = True,
) -> list[Run]:  # fmt: skip
    """All timed runs of a model: each system in turn, `repeats` times, after one round that
    compiles and loads.

    Raises RuntimeError for outputs that have not the length asked for, and where a timed run
    compiles.
    """
    runs = []
    rounds = [(r, s) for r in range(-1, settings.repeats) for s in systems]
    reference: dict[str, Tokens] = {}
    bar = tqdm(rounds, name, unit=" runs", disable=not progress)
    for repeat, system in bar:
        bar.set_postfix_str(system)
        contestant = systems[system]
        steps = contestant.engine.metrics.steps if contestant.engine else []
        first, compiled = len(steps), compilations.count()
        time.sleep(0.05)  # worker threads of the one before stop spinning
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = contestant.generate(prompts, settings.output_tokens)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        lengths = {len(output) for output in outputs}
        if len(outputs) != len(prompts) or lengths != {settings.output_tokens}:
            raise RuntimeError(f"{system} gave {len(outputs)} outputs of {lengths} tokens")
        expected = reference.setdefault(SAME_AS.get(system, system), outputs)
        if repeat < 0:
            continue
        if compilations.count() != compiled:
            raise RuntimeError(f"{name}: a timed run of {system} compiled a program")
        times = decode_times(steps[first:], contestant.sequences)[0]
        runs.append(
            Run(
                name, system, repeat, seconds, cpu_s, len(prompts) * settings.output_tokens,
                contestant.sequences, float(np.median(times)) if times else None,
                equal_share(outputs, expected),
            )
        )  # fmt: skip
    return runs


def floors(
    name: str, model: ModelConfig, systems: dict[str, Contestant], prompts: Tokens,
    settings: Settings, rates: Rates,
) -> list[Floor]:  # fmt: skip
    """Of the systems that are engines."""
    contexts = [len(prompt) + settings.output_tokens // 2 for prompt in prompts]
    found = []
    for system, contestant in systems.items():
        if contestant.engine is None:
            continue
        step = roofline.step_cost(model, contexts[: contestant.sequences])
        lora = roofline.lora_cost(
            model, settings.rank, contestant.adapters, contestant.with_adapter
        )
        cost = Cost(step.bytes + lora.bytes, step.flops + lora.flops)
        floor_s = rates.floor_s(cost, dispatches=1 / settings.multi_step)
        found.append(Floor(name, system, cost.bytes, cost.flops, lora.bytes, lora.flops, floor_s))
    return found


def run_model(
    name: str, folder: Path, settings: Settings, scratch: Path, peft: bool, progress: bool = True
) -> tuple[list[Run], list[Floor], dict[str, float]]:
    """One model's runs and floors, and the machine's measured rates. peft: whether it takes
    part."""
    model, params = checkpoint.load(folder)
    systems, folders = contestants(params, model, settings, scratch)
    if peft:
        generate = static(with_peft(load_torch(folder), folders), list(folders))
        systems[PEFT] = Contestant(generate, None, settings.batch, settings.batch, settings.batch)
    prompts = make_prompts(model.vocab_size, settings.batch, settings.prompt_tokens, settings.seed)
    runs = race(name, systems, prompts, settings, progress)
    measured = roofline.measure(model, settings.batch)
    rates = Rates.best(measured)
    return runs, floors(name, model, systems, prompts, settings, rates), measured
