"""An hour of sixteen GPUs while the load rises and falls (Punica Fig. 13), in simulated time.

    python -m experiments.papers.punica.fig13_cluster

The rate of the Poisson arrivals rises from 0 to --peak_rate and falls again. Popularities of
adapters follow the paper's Zipf-1.5. The paper gives no lengths of prompts and outputs. With
ShareGPT's lengths 32 sequences would fill half of a GPU's KV memory. Here requests are the ends of
conversations, as in vLLM's chatbot (§6.5), and 32 sequences take 72 % of the KV memory. With 11 %
less KV memory 7 of 68,244 requests migrated for lack of memory. --lengths=sharegpt shows the
difference.

A row is one sample of the cluster. Samples are --period_s seconds apart; none is discarded.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import knobs, shipped
from experiments.lib.runners import simulated
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.vllm.opt import calibrated
from experiments.study import Run, Setting, Study, Values, jobs_flag
from experiments.workloads import popularity, ramp, synthetic_lengths
from models import checkpoint
from paged.cluster.cluster import Arrival
from paged.config import EngineConfig
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.simulator.step_cost import HOSTS, StepCost

MODEL, GPU = "llama-2-7b", "a100-40"
GPUS, ADAPTERS, RANK = 16, 100, 16
# KV cache: 90 % of 40 GiB, less 13.5 GB of weights and 16 adapters of 80 MB; 0.5 MiB a token.
CONFIG = EngineConfig(
    max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=2048, max_prefills_per_step=1,
    kv_cache_tokens=45_536, adapter_slots=16, max_adapter_rank=RANK,
)  # fmt: skip
STAYS_S = 60.0  # an idle GPU stays idle if it is idle this many seconds later
FULL = 0.9  # a GPU is full from this share of the largest batch on
USUALLY, LIKELY, OCCASIONALLY = 0.75, 0.9, 0.05


@dataclass(frozen=True)
class ClusterFlags(Flags):
    duration_s: float = flag(3600.0, "from the first to the last request", least=1)
    peak_rate: float = flag(38.0, "requests a second after half of the duration", above=0)
    lengths: str = flag("chatbot", "of the requests", choices=("chatbot", "sharegpt"))
    rebalance_s: float = flag(10.0, "period of consolidation", above=0)
    period_s: float = flag(5.0, "of samples", above=0)
    host: str = flag("punica", "whose host time a step includes", choices=tuple(HOSTS))
    knobs: bool = knobs.knobs_flag()
    seed: int = flag(0, "of arrivals, lengths and popularities", least=0)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Row:
    """The cluster at one time.

    rate: requests/s that arrive.
    tokens, ended, evictions, consolidations, adapter_loads: counts since the start.
    batches: running sequences of each GPU.
    kv_used: used share of each GPU's KV memory.
    change: the changed constant of the clock (`knobs.CHANGES`); empty for no change.
    """

    time_s: float
    rate: float
    tokens: int
    queued: int
    ended: int
    evictions: int
    consolidations: int
    adapter_loads: int
    batches: tuple[int, ...]
    kv_used: tuple[float, ...]
    change: str = ""


@dataclass(frozen=True)
class Hour:
    """The samples of a whole run as one row, which `Run.once` stores.

    samples: the fields of each `Row`.
    """

    samples: list[dict[str, Any]]

    @property
    def rows(self) -> list[Row]:
        lists = ("batches", "kv_used")
        return [Row(**each | {name: tuple(each[name]) for name in lists}) for each in self.samples]


def arrivals(flags: ClusterFlags) -> list[Arrival]:
    rng, sigma = np.random.default_rng([flags.seed, 4]), calibrated("sharegpt")
    times = ramp.arrivals(flags.duration_s, flags.peak_rate, rng)
    longest = CONFIG.max_model_len
    if flags.lengths == "chatbot":
        lengths, _ = synthetic_lengths.draw_chats(
            len(times), sigma, longest, longest // 2, flags.seed, 1
        )
    else:
        lengths, _ = synthetic_lengths.draw(len(times), "sharegpt", sigma, longest, flags.seed)
    names = popularity.assign([f"a{i}" for i in range(ADAPTERS)], "skewed", len(times), flags.seed)
    prompts = {prompt: [5] * prompt for prompt, _ in lengths}
    return [
        Arrival(
            float(time), prompts[prompt],
            SamplingParams(max_tokens=output, ignore_eos=True, seed=i), name,
        )
        for i, (time, (prompt, output), name) in enumerate(zip(times, lengths, names, strict=True))
    ]  # fmt: skip


def serve(flags: ClusterFlags, change: str) -> list[Row]:
    """The samples of a whole run.

    change: the changed constant of the clock (`knobs.CHANGES`); empty for no change.
    """
    model = checkpoint.load_config(shipped.MODELS / MODEL)
    options: dict[str, Any] = {"host": flags.host} | knobs.CHANGES.get(change, {})
    cost = StepCost.declare(model, CONFIG, GPU, **options)
    serving = simulated(
        model, CONFIG, cost, GPUS, rebalance_s=flags.rebalance_s, keep_outputs=False
    )
    cluster, rows = serving.cluster, list[Row]()
    for i in range(ADAPTERS):
        cluster.add_known_adapter(Adapter(f"a{i}", "", "random", RANK))
    bar = tqdm(total=round(flags.duration_s), desc=change or "plain", unit=" s", leave=False)

    def observe(now: float) -> None:
        bar.update(min(now, flags.duration_s) - bar.n)
        gpus = cluster.state.gpus.values()
        rate = float(ramp.rate(min(now, flags.duration_s), flags.duration_s, flags.peak_rate))
        rows.append(
            Row(
                time_s=now,
                rate=rate,
                tokens=cluster.num_tokens,
                queued=len(cluster.state.queue),
                ended=len(cluster.records),
                evictions=cluster.num_evictions,
                consolidations=cluster.num_consolidations,
                adapter_loads=cluster.num_adapter_loads,
                batches=tuple(gpu.batch for gpu in gpus),
                kv_used=tuple(1 - gpu.room / gpu.limits.kv_tokens for gpu in gpus),
                change=change,
            )
        )

    with bar:
        serving.serve(arrivals(flags), observe, flags.period_s)
    return rows


def hour(flags: ClusterFlags, change: str) -> Hour:
    return Hour([vars(row) for row in serve(flags, change)])


def measure(flags: ClusterFlags, run: Run) -> Iterator[Row]:
    changes = ["", *(knobs.CHANGES if flags.knobs else ())]
    same = replace(flags, knobs=False, jobs=0)  # A run depends on neither flag.
    for found in run.at_once(hour, changes, flags.jobs, same):
        yield from found.rows


def hour_values(flags: ClusterFlags, rows: Sequence[Row]) -> Values:
    """Numbers of a whole run.

    busy_full: share of a busy GPU's samples with a full batch.
    idle_stays_idle: share of an idle GPU's samples with the GPU idle STAYS_S seconds later.
    gpus_over_needed: time of busy GPUs over the time that the same sequences need in full batches.
    evictions: migrations for lack of memory.
    moved: evictions over ended requests.
    """
    batches, most = np.array([row.batches for row in rows]), CONFIG.max_num_seqs
    busy, times = batches > 0, np.array([row.time_s for row in rows])
    later = np.searchsorted(times, times + STAYS_S)
    known = later < len(times)
    idle_now, idle_later = ~busy[known], ~busy[later[known]]
    last, used = rows[-1], np.array([row.kv_used for row in rows])
    return {
        "requests": last.ended,
        "tokens_per_s_peak": float(max(tokens_per_s(rows))),
        "busy_full": float((batches[busy] >= FULL * most).mean()),
        "mean_batch_busy": float(batches[busy].mean()),
        "idle_stays_idle": float(idle_later[idle_now].mean()) if idle_now.any() else None,
        "mean_busy_gpus": float(busy.sum(1).mean()),
        "most_busy_gpus": float(busy.sum(1).max()),
        "gpus_over_needed": float(busy.sum() * most / batches.sum()),
        "kv_used_by_full_gpus": float(used[batches >= FULL * most].mean()),
        "most_queued": max(row.queued for row in rows),
        "evictions": last.evictions,
        "moved": last.evictions / max(1, last.ended),
        "consolidations": last.consolidations,
        "adapter_loads": last.adapter_loads,
    }


def tokens_per_s(rows: Sequence[Row]) -> list[float]:
    """Tokens a second between each sample and the previous one; 0 for the first."""
    pairs = itertools.pairwise(rows)
    return [0.0, *((b.tokens - a.tokens) / (b.time_s - a.time_s) for a, b in pairs)]


def values(flags: ClusterFlags, rows: Sequence[Row]) -> Values:
    return knobs.values(rows, lambda of: hour_values(flags, of), holds)


def holds(found: Mapping[str, float]) -> bool:
    packed = found["busy_full"] >= USUALLY and found["idle_stays_idle"] >= LIKELY
    return packed and 0 < found["moved"] <= OCCASIONALLY


def table(flags: ClusterFlags, rows: Sequence[Row]) -> str:
    lines = [f"{'time, s':>8}{'req/s':>8}{'tokens/s':>10}{'queued':>8}{'evicted':>9}  batches"]
    mine = [(row, rate) for row, rate in zip(rows, tokens_per_s(rows)) if not row.change]
    for row, rate in mine[:: max(1, len(mine) // 10)]:
        lines.append(
            f"{row.time_s:8.0f}{row.rate:8.1f}{rate:10,.0f}{row.queued:8}{row.evictions:9}  "
            + " ".join(map(str, row.batches))
        )
    return "\n".join(lines)


def draw(_: ClusterFlags, figure: Figure, rows: Sequence[Row]) -> None:
    mine = [row for row in rows if not row.change]
    times = [row.time_s for row in mine]
    rate, throughput, sets = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1, 2])
    rate.plot(times, [row.rate for row in mine], color="#2f6b9a")
    rate.set(ylabel="requests/s", ylim=(0, None))
    throughput.plot(times, tokens_per_s(mine), color="#2f6b9a", lw=0.8)
    throughput.set(ylabel="tokens/s", ylim=(0, None))
    batches = np.array([row.batches for row in mine]).T
    mesh = sets.pcolormesh(
        np.append(times, times[-1] + 1), np.arange(len(batches) + 1),
        np.ma.masked_equal(batches, 0), vmin=0, vmax=CONFIG.max_num_seqs,
    )  # fmt: skip
    sets.set(xlabel="time, s", ylabel="GPU")
    figure.colorbar(mesh, ax=sets, label="batch (white: idle)")


STUDY = Study(
    __file__,
    title="An hour of sixteen GPUs (Punica Fig. 13)",
    kind="simulated",
    claim="GPUs usually run the largest batch when they are not idle, an idle GPU is likely to "
    "stay idle, and now and then one runs out of KV memory and migrates requests",
    rule=f"{USUALLY:.0%} of busy GPUs' samples have {FULL:.0%} of the largest batch, {LIKELY:.0%} "
    f"of idle GPUs are idle {STAYS_S:.0f} s later, and some requests migrate for lack of memory, "
    f"{OCCASIONALLY:.0%} at most",
    holds=holds,
    setting=Setting(
        "Llama-2-7B on 16 A100-40 by data sheet (experiments.fit_cost_model), batches of 32, one "
        "prefill a step, 100 adapters of rank 16 by Zipf-1.5, host punica",
        "the paper gives neither rate nor lengths: ours rises to 38 requests/s, and lengths are "
        "those of conversations' ends, with ShareGPT's sigma as vLLM's Fig. 13 calibrates it",
        "paper",
    ),
    flags=ClusterFlags,
    measure=measure,
    values=values,
    draw=draw,
    table=table,
    quick={"duration_s": 600.0, "knobs": False},
    minutes=(1, 15),
    size=(9, 7.5),
)

if __name__ == "__main__":
    STUDY.run()
