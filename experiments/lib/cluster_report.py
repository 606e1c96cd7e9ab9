"""Report on a run of the cluster, beside the paper's claims (Punica §7.3, Fig. 13)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib import run_record
from experiments.lib.report import COMPLETE
from paged.cluster.cluster import Cluster

FULL = 0.9  # a batch is full if it has at least this share of the largest batch
STAYS_S = 10.0  # an idle GPU stays idle if it is idle STAYS_S later, too
WINDOW_S = 10.0  # throughput is averaged over this window


@dataclass(frozen=True)
class Sample:
    """The cluster at one time.

    batches: running sequences by GPU; 0 for a GPU that has died.
    queued: requests in the queue now.
    tokens, ended, evictions, consolidations: generated tokens, ended requests, evictions and
        consolidations since the start.
    """

    time_s: float
    batches: dict[str, int]
    queued: int
    tokens: int
    ended: int
    evictions: int
    consolidations: int

    @classmethod
    def of(cls, now: float, cluster: Cluster) -> "Sample":
        return cls(
            time_s=now,
            batches={uuid: gpu.batch for uuid, gpu in cluster.state.gpus.items()},
            queued=len(cluster.state.queue),
            tokens=cluster.num_tokens,
            ended=len(cluster.records),
            evictions=cluster.num_evictions,
            consolidations=cluster.num_consolidations,
        )

    def row(self) -> dict[str, Any]:
        """A line of working_sets.csv."""
        values = {name: value for name, value in vars(self).items() if name != "batches"}
        return values | self.batches


def _batches(samples: Sequence[Sample]) -> np.ndarray:
    """[GPUs, samples] batch sizes."""
    names = samples[0].batches
    return np.array([[sample.batches.get(name, 0) for sample in samples] for name in names])


def _tokens_per_s(samples: Sequence[Sample]) -> np.ndarray:
    """[samples] tokens/s, the mean over the `WINDOW_S` seconds before each sample."""
    times = np.array([sample.time_s for sample in samples])
    tokens = np.array([sample.tokens for sample in samples])
    before = np.interp(times - WINDOW_S, times, tokens)
    return (tokens - before) / WINDOW_S


def summary(cluster: Cluster, samples: Sequence[Sample], max_batch: int) -> dict[str, float]:
    """Flat numbers. A GPU is busy if it has a sequence.

    busy_full: share of full batches among the batches of busy GPUs, over samples with two or more
        busy GPUs.
    idle_stays_idle: share of idle GPUs, over all samples, that are idle `STAYS_S` s later, too.
    gpus_over_needed: busy GPU time over the GPU time of the same sequences in full batches.
    adapter_hit_rate: 1 - adapter loads / placements of requests with an adapter.
    """
    batches = _batches(samples)
    busy = batches > 0
    packed = batches[busy & (busy.sum(0) > 1)]
    times = np.array([sample.time_s for sample in samples])
    later = np.searchsorted(times, times + STAYS_S)
    known = later < len(times)
    idle_now, idle_later = ~busy[:, known], ~busy[:, later[known]]
    ended = [record for record in cluster.records if record.finish_reason in COMPLETE]
    named = [record for record in cluster.records if record.adapter is not None]
    latency = [(r.finish_s - r.arrival_s) / max(1, r.output_tokens) for r in ended]
    first = [r.first_token_s - r.arrival_s for r in ended if r.first_token_s is not None]
    moved = [r.placements > 1 for r in cluster.records]
    numbers = {
        "requests": len(cluster.records),
        "failed": sum(record.finish_reason == "error" for record in cluster.records),
        "tokens": cluster.num_tokens,
        "seconds": samples[-1].time_s,
        "tokens_per_s": cluster.num_tokens / max(samples[-1].time_s, 1e-9),
        "tokens_per_s_peak": float(_tokens_per_s(samples).max()),
        "mean_busy_gpus": float(busy.sum(0).mean()),
        "max_busy_gpus": int(busy.sum(0).max()),
        "max_queued": max(sample.queued for sample in samples),
        "evictions": cluster.num_evictions,
        "consolidations": cluster.num_consolidations,
        "moved_requests": float(sum(moved) / max(1, len(moved))),
    }
    shares = {
        "mean_batch_busy": batches[busy],
        "busy_full": packed >= FULL * max_batch,
        "idle_stays_idle": idle_later[idle_now],
        "normalised_latency_s_mean": np.array(latency),
        "first_token_s_mean": np.array(first),
    }
    numbers |= {name: float(values.mean()) for name, values in shares.items() if values.size}
    if named:
        placed = sum(record.placements for record in named)
        numbers |= {
            "adapters_used": len({record.adapter for record in named}),
            "adapter_loads": cluster.num_adapter_loads,
            "adapter_hit_rate": max(0.0, 1 - cluster.num_adapter_loads / max(1, placed)),
        }
    if latency:
        numbers["normalised_latency_s_p99"] = float(np.percentile(latency, 99))
    if busy.any():
        numbers["gpus_over_needed"] = float(busy.sum() * max_batch / batches.sum())
    return numbers


def table(numbers: Mapping[str, float], max_batch: int) -> str:
    """The paper's claims beside our numbers. Fig. 13 has no numbers, so the claims are in words."""
    full, stays = "none", "none"  # without such samples
    if "busy_full" in numbers:
        full = f"{numbers['busy_full']:.0%}"
    if "idle_stays_idle" in numbers:
        stays = f"{numbers['idle_stays_idle']:.1%}"
    lines = [
        ("Punica §7.3", "here"),
        (
            f"GPUs usually run with the maximum batch ({max_batch}) when not idle",
            f"{full} of busy GPU time at {FULL * max_batch:.1f} or more; mean "
            f"{numbers.get('mean_batch_busy', 0):.1f}",
        ),
        (
            "an idle GPU is likely to stay idle",
            f"{stays} are idle {STAYS_S:.0f} s later",
        ),
        (
            "occasionally a GPU runs out of KvCache and migrates requests",
            f"{numbers['evictions']:.0f} evictions, {numbers['moved_requests']:.2%} of "
            f"{numbers['requests']:,.0f} requests moved",
        ),
        (
            "consolidates GPU usage while delivering high throughput",
            f"{numbers['mean_busy_gpus']:.1f} GPUs busy on average, "
            f"{numbers.get('gpus_over_needed', 0):.2f} of what full batches need; "
            f"{numbers['consolidations']:.0f} moves to that end; "
            f"{numbers['tokens_per_s_peak']:,.0f} tokens/s at the peak",
        ),
    ]
    if "adapter_loads" in numbers:
        lines.append((
            "adapters are loaded when requests need them (§5.2)",
            f"{numbers['adapters_used']:.0f} adapters, {numbers['adapter_loads']:,.0f} loads; hit "
            f"rate {numbers['adapter_hit_rate']:.3f}",
        ))  # fmt: skip
    return "\n".join(f"{theirs:68}{ours}" for theirs, ours in lines)


def plot(
    samples: Sequence[Sample], offered: Callable[[np.ndarray], np.ndarray], max_batch: int,
    path: Path, title: str, footer: str,
) -> None:  # fmt: skip
    """Fig. 13: request rate, throughput, and the batch of each GPU over time.

    offered: times [n] in seconds -> rate of the arrival process, in requests/s.
    """
    times = np.array([sample.time_s for sample in samples])
    figure = run_record.new_figure(9, 8)
    rate, throughput, sets = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1, 2])
    rate.plot(times, np.maximum(0, offered(times)), color="#2f6b9a")
    rate.set_ylabel("requests/s")
    throughput.plot(times, _tokens_per_s(samples), color="#2f6b9a")
    throughput.set_ylabel("tokens/s")
    waiting = throughput.twinx()
    waiting.plot(times, [sample.queued for sample in samples], color="#c8553d", linewidth=0.8)
    waiting.set_ylabel("queued", color="#c8553d")
    batches = _batches(samples)
    edges = np.append(times, times[-1] + 1)
    mesh = sets.pcolormesh(
        edges, np.arange(len(batches) + 1), np.ma.masked_equal(batches, 0), vmin=0, vmax=max_batch
    )
    sets.set(xlabel="time (s)", ylabel="GPU", yticks=np.arange(len(batches)) + 0.5)
    sets.set_yticklabels(samples[0].batches, fontsize="x-small")
    figure.colorbar(mesh, ax=sets, label="batch (white: idle)")
    for axes in (rate, throughput, waiting):
        axes.set_ylim(bottom=0)
    for axes in (rate, throughput, sets):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=110)
