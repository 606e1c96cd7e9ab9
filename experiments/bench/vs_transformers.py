"""Race the engine against transformers on this machine: same weights, prompts and lengths.

python -m experiments.bench.vs_transformers

Three systems, in one process and in float32, extend the same prompts of ragged lengths by equally
many greedy tokens. They ignore the end-of-sequence token:

    ours        this engine, `Engine.generate`
    static      transformers' `generate` on one left-padded batch
    continuous  transformers' continuous batching, the manager behind `generate_batch`, kept running

Each system is warmed up on the same batch. Then systems take turns; reported times are medians.
Models: 'bundled', and '100m', a random Llama of 110 million parameters. The engine's decode steps
are compared with their floor, their least time (paged/simulator/roofline.py). Without torch (the
extra `parity`) `ours` runs alone, and the claim is not tested.
"""

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.bench import race
from experiments.bench.race import Contestant, RaceFlags, Row, System
from experiments.lib.typed_flags import flag
from experiments.study import Setting, Study, Values
from models import checkpoint
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator import roofline
from pallas_kernels.specs import Rates

PEERS, ENGINE = ("static", "continuous"), EngineConfig()


@dataclass(frozen=True)
class TransformersFlags(RaceFlags):
    batches: tuple[int, ...] = flag(
        (1, 8, 32), "batch sizes: prompts that are answered together", least=1
    )
    engine: EngineConfig = ENGINE

    @property
    def config(self) -> EngineConfig:
        return replace(self.engine, max_model_len=self.longest, seed=self.seed)


def check(flags: TransformersFlags) -> None:
    if max(flags.batches) > flags.config.max_num_seqs:
        raise ValueError(
            f"a batch of {max(flags.batches)} exceeds max_num_seqs ({flags.config.max_num_seqs})"
        )
    for name in flags.models:
        most = race.model_config(name).max_position_embeddings
        if flags.longest > most:
            raise ValueError(
                f"the longest prompt plus {flags.output_tokens} output tokens exceed {name}'s "
                f"context of {most} tokens"
            )


@contextmanager
def peers_of(folder: Path, flags: TransformersFlags) -> Iterator[dict[str, System]]:
    """transformers' systems by name; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        print("torch is missing (pip install 'paged-jax[parity]'): ours runs alone")
        yield {}
        return
    peer = race.load_torch(folder)
    continuous, stop = race.continuous(peer, max(flags.batches), flags.longest)
    try:
        yield dict(zip(PEERS, (race.static(peer), continuous), strict=True))
    finally:
        stop()


def race_model(name: str, folder: Path, flags: TransformersFlags) -> Iterator[Row]:
    model, params = checkpoint.load(folder)
    engine = Engine.from_model(params, model, flags.config)
    rates = Rates.best(roofline.measure(model, max(flags.batches)))
    with peers_of(folder, flags) as peers:
        for batch in sorted(set(flags.batches)):
            prompts = race.make_prompts(model.vocab_size, batch, flags.prompt_tokens, flags.seed)
            contexts = [len(prompt) + flags.output_tokens // 2 for prompt in prompts]
            cost = roofline.step_cost(model, contexts)
            floor = rates.floor_s(cost, dispatches=1 / flags.config.multi_step)
            systems = {"ours": Contestant(race.ours(engine), batch, engine, floor)}
            systems |= {peer: Contestant(of, batch, same_as="ours") for peer, of in peers.items()}
            yield from race.race(name, systems, prompts, flags.output_tokens, flags.repeats)


def measure(flags: TransformersFlags, _) -> Iterator[Row]:
    for name in flags.models:
        with tempfile.TemporaryDirectory() as scratch:
            yield from race_model(name, race.model_folder(name, Path(scratch), flags.seed), flags)


def values(_: TransformersFlags, rows: Sequence[Row]) -> Values:
    """The numbers of the race, by name.

    tokens_per_s_SYSTEM_MODEL_BATCH: median over the repeats.
    speedup_SYSTEM_MODEL: our tokens/s over the system's, at the largest batch.
    step_over_floor_MODEL: time of our decode steps over their floor, at the largest batch.
    host_share_MODEL: share of host time in our decode steps, at the largest batch.
    equal_SYSTEM_MODEL: share of tokens that equal ours, over all batches.
    """
    numbers: dict[str, float | None] = {}
    for (model, batch), systems in race.contests(rows).items():
        found = {s: race.median(rows, model, batch, s, "tokens_per_s") for s in systems}
        numbers |= {f"tokens_per_s_{s}_{model}_{batch}": rate for s, rate in found.items()}
        if batch < max(row.batch for row in rows if row.model == model):
            continue
        for system in PEERS:
            fast, slow = found.get("ours"), found.get(system)
            numbers[f"speedup_{system}_{model}"] = fast / slow if fast and slow else None
            equal = [r.equal for r in rows if (r.model, r.system) == (model, system)]
            numbers[f"equal_{system}_{model}"] = float(np.mean(equal)) if equal else None
        step, host, floor = (
            race.median(rows, model, batch, "ours", field)
            for field in ("step_s", "host_s", "floor_s")
        )
        if step and floor and host is not None:
            numbers[f"step_over_floor_{model}"] = step / floor
            numbers[f"host_share_{model}"] = host / step
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    ours = "step_over_floor_"
    models = [name.removeprefix(ours) for name in found if name.startswith(ours)]
    return all(found[f"speedup_{peer}_{model}"] > 1 for model in models for peer in PEERS)


STUDY = Study(
    __file__,
    title="Tokens a second of this engine and of transformers on this machine",
    kind="measured",
    claim="at the largest batch the engine generates more tokens a second than transformers' "
    "static batch and its continuous batching",
    rule="more tokens a second than both systems of transformers at each model's largest batch",
    holds=holds,
    setting=Setting(
        "the bundled model (1.5M) and a random Llama of 110M, float32, batches of 1 to 32", "",
        "paper",
    ),
    flags=TransformersFlags,
    measure=measure,
    values=values,
    check=check,
    draw=race.draw,
    table=race.table,
    quick={"models": ("bundled",), "batches": (1, 8), "output_tokens": 16, "repeats": 2},
    minutes=(0.7, 12),
    needs="torch for its claim (make test-parity)",
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
