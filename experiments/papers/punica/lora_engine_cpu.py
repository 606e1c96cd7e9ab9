"""Whole engines that serve LoRA adapters, beside baselines, on this machine.

python -m experiments.papers.punica.lora_engine_cpu

The experiment follows Punica's §7.2, with a random adapter of all projections for each request.
These systems take turns in one process, with the same weights, prompts and lengths:

    base           an engine without adapters
    idle           an engine with adapters on the device; the batch uses none
    identical      the same engine; all requests of the batch use one adapter
    distinct       each request has an adapter of its own
    one_at_a_time  the requests of `distinct`, each served alone, as the paper assumes for systems
                   that cannot batch different adapters; all adapters are on the device, so a
                   switch costs nothing
    peft           the batch of `distinct` with transformers and PEFT (`adapter_names`); only with
                   the bundled model, and if PEFT and torch are installed (the extra `parity`)

A step's floor is the least time for the bytes and operations of the base model and its adapters.
"""

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.bench import race
from experiments.bench.race import (
    Contestant,
    RaceFlags,
    Row,
    Tokens,
    median,
    model_config,
    model_folder,
    ours,
)
from experiments.lib import random_adapters
from experiments.lib.typed_flags import flag
from experiments.study import Setting, Study, Values
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator import roofline
from paged.validation import check_model
from pallas_kernels.specs import Cost, Rates

PEFT = "peft"
# Lower bounds of the values; the last is an upper bound.
GOALS = {
    "distinct_over_identical_100m": 0.85,
    "distinct_over_base_100m": 0.75,
    "speedup_over_one_at_a_time_100m": 4.5,
    "distinct_over_identical_bundled": 0.75,
    "speedup_over_peft_bundled": 3.0,
    "idle_lora_overhead": 1.10,
}


@dataclass(frozen=True)
class LoraFlags(RaceFlags):
    batch: int = flag(32, "requests, and adapters", least=1)
    rank: int = flag(16, "of the adapters", least=1)
    prompt_tokens: tuple[int, ...] = flag((4, 12), "shortest and longest prompt", least=1)
    output_tokens: int = flag(40, "tokens of each output", least=1)
    multi_step: int = flag(8, "tokens of a dispatch", least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.output_tokens < 2 * self.multi_step + 2:
            raise ValueError(
                f"--output_tokens ({self.output_tokens}) must be at least 2 * --multi_step + 2 "
                f"({2 * self.multi_step + 2}), so that two whole steps are measured"
            )
        assert self.lora_config  # raises ValueError for flags that do not fit

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=self.batch, max_prefills_per_step=self.batch, max_model_len=self.longest,
            max_num_batched_tokens=max(512, self.batch), multi_step=self.multi_step,
            kv_cache_tokens=self.batch * (self.longest + EngineConfig.page_size), watermark=0.0,
            seed=self.seed,
        )  # fmt: skip

    @property
    def lora_config(self) -> EngineConfig:
        """Configuration of the engine with adapters, with a slot for each adapter."""
        return replace(self.config, adapter_slots=self.batch, max_adapter_rank=self.rank)


def check(flags: LoraFlags) -> None:
    for name in flags.models:
        check_model(model_config(name), flags.lora_config)


def contestants(
    params, model: ModelConfig, flags: LoraFlags, scratch: Path, prompts: Tokens, rates: Rates
) -> tuple[dict[str, Contestant], dict[str, Path]]:
    """The engines by name, and the adapters' folders in `scratch` by adapter name."""
    base = Engine.from_model(params, model, flags.config)
    lora = Engine.from_model(params, model, flags.lora_config)
    folders = {
        name: random_adapters.write(scratch / name, model, flags.seed + i, flags.rank)
        for i, name in enumerate(f"a{i}" for i in range(flags.batch))
    }
    for name, folder in folders.items():
        lora.add_adapter(name, folder)
    names, n = list(folders), flags.batch
    contexts = [len(prompt) + flags.output_tokens // 2 for prompt in prompts]

    def floor_s(sequences: int, adapters: int) -> float:
        step = roofline.step_cost(model, contexts[:sequences])
        added = roofline.lora_cost(model, flags.rank, adapters, sequences * (adapters > 0))
        cost = Cost(step.bytes + added.bytes, step.flops + added.flops)
        return rates.floor_s(cost, dispatches=1 / flags.multi_step)

    def alone(prompts: Tokens, output_tokens: int) -> Tokens:
        return [
            ours(lora, [name])([prompt], output_tokens)[0]
            for prompt, name in zip(prompts, names, strict=True)
        ]

    return {
        "base": Contestant(ours(base), n, base, floor_s(n, 0)),
        "idle": Contestant(ours(lora), n, lora, floor_s(n, 0), "base"),
        "identical": Contestant(ours(lora, names[:1] * n), n, lora, floor_s(n, 1)),
        "distinct": Contestant(ours(lora, names), n, lora, floor_s(n, n)),
        "one_at_a_time": Contestant(alone, 1, lora, floor_s(1, 1), "distinct"),
    }, folders


def race_model(
    name: str, folder: Path, flags: LoraFlags, scratch: Path, peft: bool
) -> Iterator[Row]:
    """Time the systems with one model. peft: whether PEFT is one of the systems."""
    model, params = checkpoint.load(folder)
    prompts = race.make_prompts(model.vocab_size, flags.batch, flags.prompt_tokens, flags.seed)
    rates = Rates.best(roofline.measure(model, flags.batch))
    systems, folders = contestants(params, model, flags, scratch, prompts, rates)
    if peft:
        mixed = race.static(race.with_peft(race.load_torch(folder), folders), list(folders))
        systems[PEFT] = Contestant(mixed, flags.batch, same_as="distinct")
    yield from race.race(name, systems, prompts, flags.output_tokens, flags.repeats)


def measure(flags: LoraFlags, _) -> Iterator[Row]:
    installed = all(map(importlib.util.find_spec, ("torch", "peft")))
    for name in flags.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder, peft = model_folder(name, Path(scratch), flags.seed), name == "bundled"
            yield from race_model(
                name, folder, flags, Path(scratch) / "adapters", peft and installed
            )


def values(_: LoraFlags, rows: Sequence[Row]) -> Values:
    """The ratios of `GOALS`, and the decode rate of every system.

    distinct_over_*, speedup_over_one_at_a_time_*: ratios of decode tokens a second.
    speedup_over_peft_bundled: ratio of total seconds, prompts included.
    idle_lora_overhead: CPU time of `idle` over `base`, the largest ratio of the models.
    """

    def ratio(model: str, above: str, below: str, field: str = "decode_tokens_per_s"):
        batch = rows[0].batch
        a, b = (median(rows, model, batch, system, field) for system in (above, below))
        return None if a is None or b is None else a / b

    models = dict.fromkeys(row.model for row in rows)
    overheads = [ratio(model, "idle", "base", "cpu_s") for model in models]
    rates = {
        f"decode_tokens_per_s_{system}_{model}": median(
            rows, model, batch, system, "decode_tokens_per_s"
        )
        for (model, batch), systems in race.contests(rows).items()
        for system in systems
    }
    return {
        "distinct_over_identical_100m": ratio("100m", "distinct", "identical"),
        "distinct_over_base_100m": ratio("100m", "distinct", "base"),
        "speedup_over_one_at_a_time_100m": ratio("100m", "distinct", "one_at_a_time"),
        "distinct_over_identical_bundled": ratio("bundled", "distinct", "identical"),
        "speedup_over_peft_bundled": ratio("bundled", PEFT, "distinct", "seconds"),
        "idle_lora_overhead": max(filter(None, overheads), default=None),
    } | rates


def holds(v) -> bool:
    *at_least, at_most = GOALS
    return all(v[name] >= GOALS[name] for name in at_least) and v[at_most] <= GOALS[at_most]


STUDY = Study(
    __file__,
    title="Engines with LoRA adapters on this machine (the idea of Punica §7.2)",
    kind="measured",
    claim="on this machine too, requests of 32 adapters decode nearly as fast as of one or none",
    rule=", ".join(f"{name} {goal:g}" for name, goal in GOALS.items())
    + ": at least, the last at most",
    holds=holds,
    setting=Setting(
        "the bundled model (1.5M) and a random Llama of 110M, batch 32, rank 16, float32",
        "the paper has Llama-2 of 7B and more on A100s",
        "reduced",
    ),
    flags=LoraFlags,
    measure=measure,
    values=values,
    check=check,
    draw=race.draw,
    table=race.table,
    quick={"models": ("bundled",), "batch": 8, "repeats": 2},
    minutes=(1, 8),
    needs="PEFT and torch for one of six values (make test-parity)",
)

if __name__ == "__main__":
    STUDY.run()
