"""How Punica works (Punica Figs. 2 to 6), drawn from runs of the cluster, an engine and SGMV.

    python -m experiments.papers.punica.fig02_mechanisms

Clusters and engines run in simulated time with made-up tokens; SGMV is computed. Notebook
2_lora_tenants shows the tenants of one batch in detail.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import FigureBase

from experiments.papers import mechanisms
from experiments.papers.mechanisms import COLOURS, FREE, GREY, Mechanism, arrow, box, tile
from experiments.papers.vllm import snapshots
from experiments.papers.vllm.snapshots import engine_of, sampling
from models import checkpoint
from models.config import ModelConfig
from paged.cluster.cluster import Arrival, ClusterRecord
from paged.cluster.simulated import SimulatedCluster
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.adapter import Adapter
from paged.simulator.executor import SimulatedExecutor
from pallas_kernels.lora import PAGE_RANKS, Segments, sgmv
from pallas_kernels.lora.work_items import ROWS, padded, work_items

STEP_S = 1.0  # duration of a simulated step
GPUS = ("GPU 1", "GPU 2")
LENGTHS = (4, 3, 1)  # tokens of the segments of Fig. 3
RANK_WIDTH = 32


@functools.cache
def model() -> ModelConfig:
    return checkpoint.load_config("bundled")


@dataclass(frozen=True)
class Sample:
    """A cluster at one time: the requests of each GPU, and each request's tokens so far."""

    time_s: float
    working_sets: dict[str, list[str]]
    tokens: dict[str, int]


@dataclass(frozen=True)
class Cluster:
    samples: list[Sample]
    records: list[ClusterRecord]
    evictions: int
    loads: int
    outputs: list[list[int]]


def serve(arrivals: list[Arrival], **fields: Any) -> Cluster:
    """Serve on two simulated GPUs with steps of a second."""
    config = EngineConfig(**{
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "page_size": 4,
        "kv_cache_tokens": 64, "adapter_slots": 4, "max_adapter_rank": PAGE_RANKS,
        "max_prefills_per_step": 1, "watermark": 0.0,
    } | fields)  # fmt: skip
    engines = {
        name: Engine(
            model(), config,
            SimulatedExecutor(lambda _: STEP_S, vocab_size=model().vocab_size, dtype="float32"),
        )
        for name in GPUS
    }  # fmt: skip
    simulated = SimulatedCluster(engines, model(), config, skip=False)
    cluster, samples = simulated.cluster, list[Sample]()
    for name in sorted({each.adapter for each in arrivals if each.adapter}):
        cluster.add_known_adapter(Adapter(name, "", "random", PAGE_RANKS))

    def observe(now: float) -> None:
        sets = {name: list(gpu.working_set) for name, gpu in cluster.state.gpus.items()}
        tokens = {name: len(job.known[0].tokens) for name, job in cluster.jobs.items()}
        samples.append(Sample(now, sets, tokens))

    outputs = simulated.serve(arrivals, observe, STEP_S / 2)
    return Cluster(
        samples, cluster.records, cluster.num_evictions, cluster.num_adapter_loads,
        [output.tokens for output in outputs],
    )  # fmt: skip


def request(at: float, prompt: int, tokens: int, adapter: str, seed: int = 0) -> Arrival:
    return Arrival(at, [5 + seed] * prompt, sampling(tokens, seed=seed), adapter)


def draw_cluster(figure: FigureBase, found: Cluster) -> None:
    names = list(dict.fromkeys(
        name for sample in found.samples for of in sample.working_sets.values() for name in of
    ))  # fmt: skip
    for axes, gpu in zip(figure.subplots(1, len(GPUS), sharey=True), GPUS):
        for row, name in enumerate(names):
            for sample in found.samples:
                if name in sample.working_sets[gpu]:
                    shade = COLOURS[row % len(COLOURS)]
                    axes.barh(row, STEP_S / 2, left=sample.time_s, color=shade)
        axes.set_yticks(range(len(names)), [f"R{i + 1}" for i in range(len(names))])
        axes.set(xlabel="time (steps)", xlim=(0, max(sample.time_s for sample in found.samples)))
        axes.set_title(gpu, loc="left", fontsize="small")
    axes.invert_yaxis()


def fig02() -> Mechanism:
    """Requests go to the GPU with the largest working set among those with room. An adapter is
    loaded when its first request arrives."""
    arrivals = [request(0.2 + 4 * i, 4, 12, f"lora {i % 3}", i) for i in range(6)]
    found = serve(arrivals, kv_cache_tokens=192)
    busiest = max(found.samples, key=lambda sample: sum(map(len, sample.working_sets.values())))
    lasting = [sample.working_sets for sample in found.samples]
    used = {gpu: any(sets[gpu] for sets in lasting) for gpu in GPUS}
    placed = [name for sets in busiest.working_sets.values() for name in sets]

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        box(axes, 0, 1.3, f"Requests of {len({a.adapter for a in arrivals})} LoRA models", GREY, 4)
        box(axes, 5, 1.3, "Scheduler:\nlargest working set with room", COLOURS[0], 4.4)
        for row, gpu in enumerate(GPUS):
            of = busiest.working_sets[gpu]
            box(axes, 10.6, 2.2 - 1.8 * row, f"{gpu}, runner and KV cache\nrunning: {len(of)}",
                COLOURS[1 + row], 4.4)  # fmt: skip
            arrow(axes, (9.6, 1.8), (10.45, 2.7 - 1.8 * row))
        arrow(axes, (4.15, 1.8), (4.85, 1.8))
        axes.text(7.2, 0.6, f"{found.loads} loads of adapters, when first used", ha="center",
                  fontsize="small")  # fmt: skip
        axes.set(xlim=(-0.3, 15.4), ylim=(0, 3.6))
        axes.set_axis_off()

    return Mechanism(
        "Fig. 2: scheduler, runners, adapters on demand",
        {
            "gpus_used_while_one_has_room": (sum(used.values()), 1),
            "adapters_loaded": (found.loads, 3),
            "requests_served": (len(found.records), len(arrivals)),
            "requests_on_two_gpus": (len(placed) - len(set(placed)), 0),
        },
        draw,
    )  # fmt: skip


def segments_of(lengths: tuple[int, ...]) -> Segments:
    ends = jnp.cumsum(jnp.array(lengths, jnp.int32))
    slots, count = jnp.arange(len(lengths)), jnp.array([len(lengths)], jnp.int32)
    return Segments(slots, ends - jnp.array(lengths, jnp.int32), ends, count)


def fig03() -> Mechanism:
    """y[s_i : s_(i+1)] += x[s_i : s_(i+1)] A_i B_i: each segment of rows has its own weights."""
    rng, n, T = np.random.default_rng(0), len(LENGTHS), sum(LENGTHS)
    a, b = rng.standard_normal((2, n, PAGE_RANKS, RANK_WIDTH), np.float32)
    x = rng.standard_normal((T, RANK_WIDTH), np.float32)
    of = np.repeat(np.arange(n), LENGTHS)
    one_by_one = np.stack([x[t] @ a[i].T @ b[i] for t, i in enumerate(of)])
    pages = jnp.arange(n, dtype=jnp.int32)[:, None]
    batched = sgmv(x, a[None], b[None], 0, segments_of(LENGTHS), pages, jnp.ones(n, jnp.int32))
    apart = float(np.abs(np.asarray(batched) - one_by_one).max() / np.abs(one_by_one).max())

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for token, adapter in enumerate(of.tolist()):
            for left in (0, 11):
                tile(axes, left, T - 1 - token, COLOURS[adapter], width=5, height=0.92)
        at = T
        for adapter, length in enumerate(LENGTHS):
            at -= length
            weights = f"A$_{adapter + 1}$ B$_{adapter + 1}$"
            tile(axes, 6.4, at + length / 2 - 0.5, COLOURS[adapter], weights, width=3, height=1,
                 size="medium")  # fmt: skip
        for x, name in ((2.5, "x"), (7.9, "weights of each segment"), (13.5, "y")):
            axes.text(x, T + 0.4, name, ha="center")
        axes.set(xlim=(-0.2, 16.2), ylim=(-0.3, T + 1.2))
        axes.set_axis_off()

    facts = {"differs_beyond_rounding": (apart > 1e-5, 0), "segments": (n, 3)}
    return Mechanism("Fig. 3: SGMV, each segment by its own weights", facts, draw)


def fig04() -> Mechanism:
    """Tiles of SGMV's kernels: a tile has rows of one segment only, and each row is in one tile."""
    lengths = (70, 3, 40, 1)
    T = padded(sum(lengths))
    items = np.asarray(work_items(segments_of(lengths), T))
    live = [tuple(map(int, item)) for item in items if item[3] > item[2]]
    covered = np.zeros(T, int)
    owner = np.full(T, -1)
    for slot, base, lo, hi, _ in live:
        covered[base + lo : base + hi] += 1
        owner[base + lo : base + hi] = slot
    tokens = sum(lengths)
    wrong = int((owner[:tokens] != np.repeat(np.arange(len(lengths)), lengths)).sum())

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for i, (slot, base, lo, hi, _) in enumerate(live):
            axes.barh(i, ROWS, left=base, color=FREE)
            axes.barh(i, hi - lo, left=base + lo, color=COLOURS[slot])
            axes.text(-1, i, f"adapter {slot + 1}, {hi - lo} rows", ha="right", va="center",
                      fontsize="small")  # fmt: skip
        axes.set(yticks=[], xlabel=f"row of x (tiles have {ROWS}; grey: others')", xlim=(0, T))
        axes.invert_yaxis()

    return Mechanism(
        "Fig. 4: tiles of SGMV's kernels",
        {
            "rows_that_no_tile_has": (int((covered[:tokens] == 0).sum()), 0),
            "rows_that_two_tiles_have": (int((covered > 1).sum()), 0),
            "rows_of_another_adapter": (wrong, 0), "tiles": (len(live), 5),
        },
        draw,
    )  # fmt: skip


def fig05() -> Mechanism:
    """A GPU runs out of KV memory: its newest request is cancelled there, and resumes on the other
    GPU from the tokens generated so far."""
    arrivals = [request(0.1 * i, 8, 20, f"lora {i}", i) for i in range(3)]
    found, alone = serve(arrivals), serve(arrivals[2:])
    names = list(dict.fromkeys(name for s in found.samples for name in s.tokens))
    where: dict[str, list[str]] = defaultdict(list)
    for sample in found.samples:
        for gpu, of in sample.working_sets.items():
            for name in of:
                if where[name][-1:] != [gpu]:
                    where[name].append(gpu)
    moved = [name for name in names if len(where[name]) > 1]
    tokens = [s.tokens[moved[0]] for s in found.samples if moved and moved[0] in s.tokens]
    lost = sum(after < before for before, after in pairwise(tokens))
    return Mechanism(
        "Fig. 5: a request that moves",
        {
            "requests_moved": (len(moved), 1), "evictions": (found.evictions, 1),
            "the_newest_moves": (bool(moved) and moved[0] == names[-1], 1),
            "tokens_lost": (lost, 0), "tokens_of_the_moved": (len(found.outputs[2]), 20),
            "differs_from_a_run_alone": (found.outputs[2] != alone.outputs[0], 0),
        },
        lambda figure: draw_cluster(figure, found),
    )  # fmt: skip


def fig06() -> Mechanism:
    """Four requests that end at different steps. With one KV cache for the batch, all four decode
    until the last one ends, and a new request waits until then. With a KV cache for each request, a
    request that ends makes room for the new one."""
    lengths, late = (3, 5, 9, 6), 4
    engine = engine_of(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, kv_cache_tokens=256,
        max_prefills_per_step=4,
    )  # fmt: skip
    requests = {
        f"R{i + 1}": ([5 + i] * 4, sampling(tokens, seed=i))
        for i, tokens in enumerate((*lengths, late))
    }
    shots = snapshots.run(engine, requests, 0, progress=False)
    rows = [{o.request for owners in shot.device.values() for o in owners} for shot in shots]
    useful = {name: sum(name in row for row in rows) for name in requests}
    longest = max(lengths)
    wasted = sum(longest - tokens for tokens in lengths)

    def draw(figure: FigureBase) -> None:
        one, each = figure.subplots(1, 2, sharey=True, sharex=True)
        for i, tokens in enumerate((*lengths, late)):
            start, end = (0, longest) if i < len(lengths) else (longest, longest + late)
            one.barh(i, tokens, left=start, color=COLOURS[i])
            one.barh(i, end - start - tokens, left=start + tokens, color=FREE, hatch="//",
                     edgecolor=GREY)  # fmt: skip
            steps = [step for step, row in enumerate(rows) if f"R{i + 1}" in row]
            each.barh(i, len(steps), left=steps[0], color=COLOURS[i])
        one.set_title(f"one cache for the batch: {wasted} steps wasted (hatched)", fontsize="small",
                      loc="left")  # fmt: skip
        each.set_title(f"a cache for each: {len(rows)} steps in all", fontsize="small", loc="left")
        for axes in (one, each):
            axes.set(xlabel="step")
            axes.set_yticks(range(5), [f"R{i + 1}" for i in range(5)])
        one.invert_yaxis()

    expected = dict(zip(useful, (*lengths, late)))
    return Mechanism(
        "Fig. 6: a KV cache for the batch wastes steps",
        {
            "steps_wasted_with_one_cache": (wasted, 13),
            "steps_wasted_with_a_cache_each": (
                sum(max(0, useful[name] - tokens) for name, tokens in expected.items()), 0),
            "late_request_waits_for_the_longest": (
                next(i for i, row in enumerate(rows) if "R5" in row) >= longest, 0),
        },
        draw,
    )  # fmt: skip


STUDY = mechanisms.study(
    __file__, "Punica Figs. 2 to 6",
    fig02, fig03, fig04, fig05, fig06,
    claim="requests of many adapters are packed, batched, moved and left as the figures show",
    here="two simulated GPUs of steps of a second, SGMV in float32, the engine's scheduler",
    size=(14, 10),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
