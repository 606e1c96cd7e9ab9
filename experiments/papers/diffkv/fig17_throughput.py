"""Throughput and batch of long generations by system (DiffKV Fig. 17), in simulated time.

python -m experiments.papers.diffkv.fig17_throughput --models=qwq-32b

All problems arrive at once. All answers have as many tokens as the authors' commands allow: 16K for
QwQ-32B and 8K for Qwen2.5-32B on two L40 GPUs, 4K for Llama3-8B on one. The batch is the mean
number of running sequences while others wait. Throughput is over the whole run. DiffKV's batch has
the limit of the authors' command (16 for QwQ-32B). Other batches are limited by memory, and to 256.

With 26.8 % of the memory (Table 3) DiffKV's batch can be at most 3.7 times vLLM's in the same
bytes. The paper's batches, 15.9 and 2.7, differ by 5.9 times. Its systems must have had different
memory, or sequences of different lengths. No setting here gives both batches.

    atom unfused, kivi unfused
        Each step also writes keys and values in 16 bits and reads them again, as a framework must
        without a kernel that fuses dequantisation with attention (§7.3). The framework's host time
        is not simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.lib.knobs import FACTORS
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import gpu
from experiments.papers.diffkv.gpu import DIFFKV, SERVERS, SYSTEMS, VLLM, SimulatedFlags
from experiments.papers.drawing import grouped_bars
from experiments.study import Run, Setting, Study, Values, jobs_flag
from paged.kv_cache.work import kv_bytes_of_token

UNFUSED = ("atom", "kivi")
MODELS = ("qwq-32b", "qwen2.5-32b", "llama-3-8b")


@dataclass(frozen=True)
class ThroughputFlags(SimulatedFlags):
    models: tuple[str, ...] = flag(MODELS, "that serve", choices=tuple(SERVERS))
    systems: tuple[str, ...] = flag(SYSTEMS, "that are compared", choices=SYSTEMS)
    most_output: int = flag(0, "tokens of an output; 0: the paper's limit", least=0)
    batches: int = flag(3, "batches of requests; a batch just fits in memory", least=1)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Case(gpu.Case):
    batches: int


@dataclass(frozen=True)
class Row(Case):
    """The results of a case.

    batch: mean running sequences while others wait.
    tokens_per_s: output tokens a second, over the whole run.
    step_s: mean duration of a step while others wait.
    unfused_s: extra time of a step that writes and reads dequantised keys and values.
    steps: number of steps with waiting sequences.
    """

    batch: float = 0.0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    unfused_s: float = 0.0
    preemptions: int = 0
    steps: int = 0


def simulate(case: Case) -> Row:
    server = case.server
    # The largest batch is what fits if a sequence of half the limit takes a twelfth of its 16-bit
    # memory.
    fit = server.kv_tokens(case.gpu) / (server.limit / 2 + gpu.PROMPTS[1])
    most = server.most if case.system == DIFFKV else min(256, max(8, int(12 * fit)))
    config = gpu.config_of(case.system, server, case.gpu, most)
    engine = gpu.engine_of(case.flags, server, config)
    share = {VLLM: 1, "quest": 1, "snapkv": 2, "kivi": 7}.get(case.system, 4)
    count = min(256 * case.batches, max(8, round(case.batches * share * fit)))
    gpu.run(engine, gpu.requests_of(server, count, case.seed))
    steps = [step for step in engine.metrics.steps if step.num_waiting]
    batch = float(np.mean([step.num_running for step in steps]))
    step_s = float(np.mean([step.device_s for step in steps]))
    tokens = count * server.limit
    return Row(
        **vars(case), batch=batch, step_s=step_s,
        tokens_per_s=tokens / engine.metrics.steps[-1].time_s,
        unfused_s=_unfused_s(case, server, config, batch),
        preemptions=sum(step.preemptions for step in engine.metrics.steps), steps=len(steps),
    )  # fmt: skip


def _unfused_s(case: Case, server: gpu.Server, config, batch: float) -> float:
    """Seconds to write once and read once the 16-bit keys and values of `batch` sequences of mean
    length; 0 for systems not in UNFUSED."""
    if case.system not in UNFUSED:
        return 0.0
    costs = gpu.clock_of(SimulatedFlags(gpu=case.gpu), server, config).costs
    model = server.config
    tokens = batch * (server.limit / 2 + np.mean(gpu.PROMPTS))
    moved = 2 * tokens * model.num_layers * kv_bytes_of_token(model, "float16") / server.gpus
    return case.attention_knob * moved / (costs.machine.bandwidth * costs.assumed.attention)


def measure(flags: ThroughputFlags, run: Run) -> Iterator[Row]:
    cases = []
    for model in flags.models:
        for system in flags.systems:
            varied = model == flags.models[0] and system in (VLLM, DIFFKV)
            knobs = FACTORS if varied else {"": (1.0, 1.0)}
            for attention, host in knobs.values():
                cases.append(Case(
                    model, system, flags.gpu, flags.host, attention * flags.attention_knob,
                    host * flags.host_knob, flags.recorded, flags.seed, flags.most_output,
                    flags.batches,
                ))  # fmt: skip
    yield from run.at_once(simulate, cases, flags.jobs)


def values(flags: ThroughputFlags, rows: Sequence[Row]) -> Values:
    """batch_SYSTEM_MODEL: the batch.
    gain_SYSTEM_MODEL, gain_SYSTEM_unfused_MODEL: throughput over vLLM's; for the first model also
        for each changed constant.
    """
    numbers: dict[str, float | None] = {}
    for model in flags.models:
        for knob, factors in FACTORS.items():
            wanted = flags.attention_knob * factors[0], flags.host_knob * factors[1]
            mine = {
                row.system: row
                for row in rows
                if row.model == model and (row.attention_knob, row.host_knob) == wanted
            }
            suffix = f"_{model}" + (f"_{knob}" if knob else "")
            if not knob:
                numbers |= {f"batch_{name}{suffix}": row.batch for name, row in mine.items()}
            speeds = {name: row.tokens_per_s for name, row in mine.items()}
            for name, row in mine.items():
                if name != VLLM:
                    numbers[f"gain_{name}{suffix}"] = gpu.ratio(speeds, name, VLLM)
                if name in UNFUSED and VLLM in mine:
                    slower = row.step_s / (row.step_s + row.unfused_s)
                    numbers[f"gain_{name}_unfused{suffix}"] = slower * (
                        row.tokens_per_s / speeds[VLLM]
                    )
    return numbers


def draw(flags: ThroughputFlags, figure: Figure, rows: Sequence[Row]) -> None:
    plain = flags.attention_knob, flags.host_knob
    mine = [row for row in rows if (row.attention_knob, row.host_knob) == plain]
    by = {(row.system, row.model): row for row in mine}
    for axes, name in zip(figure.subplots(1, 2), ("batch", "tokens_per_s")):
        groups = {
            system: [getattr(by.get((system, model)), name, np.nan) for model in flags.models]
            for system in flags.systems
        }
        grouped_bars(axes, flags.models, groups, name.replace("_", " "))
        axes.set(yscale="log")


STUDY = Study(
    __file__,
    title="Throughput and batch of long generations (DiffKV Fig. 17)",
    kind="simulated",
    claim="on QwQ-32B DiffKV sustains a batch of 15.9 for vLLM's 2.7, and 5.4 times its "
    "throughput; Quest 1.6, SnapKV 1.8, Atom 2.1, KIVI 3.4",
    rule="DiffKV at least 1.9 times vLLM (the paper's least gain) on every model, and 5.4 times on "
    "QwQ-32B",
    holds=lambda v: v["gain_diffkv_qwq-32b"] >= 5.4
    and all(v[f"gain_diffkv_{model}"] >= 1.9 for model in MODELS),
    setting=Setting(
        "QwQ-32B and Qwen2.5-32B on two GPUs, Llama-3-8B on one; " + gpu.SETTING,
        "outputs all reach the limit; Atom's and KIVI's framework takes vLLM's host time; "
        "DiffKV's batch is limited as in the authors' command, others' by memory alone; "
        "Llama-3-70B and Qwen2.5-7B only with --models; three batches of requests for the paper's "
        "1,000; assumed constants are changed for the first model alone",
        "paper",
    ),
    flags=ThroughputFlags,
    check=lambda flags: gpu.check(flags, flags.models, flags.systems, flags.most_output),
    measure=measure,
    values=values,
    paper={
        "batch_vllm_qwq-32b": 2.7, "batch_diffkv_qwq-32b": 15.9, "gain_diffkv_qwq-32b": 5.4,
        "gain_quest_qwq-32b": 1.6, "gain_snapkv_qwq-32b": 1.8, "gain_atom_qwq-32b": 2.1,
        "gain_kivi_qwq-32b": 3.4, "gain_atom_unfused_qwq-32b": 2.1,
        "gain_kivi_unfused_qwq-32b": 3.4,
    } | {f"gain_diffkv_{model}": (1.9, 5.4) for model in MODELS[1:]},
    draw=draw,
    tolerance=0.15,
    quick={"models": ("qwq-32b",), "most_output": 2048, "batches": 1},
    minutes=(1.5, 10),
    size=(11, 4.4),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
