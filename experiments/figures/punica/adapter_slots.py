"""Many adapters over few slots: loading on demand, and what overtaking is worth (Punica §5.2).

python -m experiments.figures.punica.adapter_slots

Requests for --adapters LoRA adapters, by a Zipf law, come faster than they can be served, and the
device holds --adapter_slots of them. A request waits for its adapter; later ones may overtake it,
`max_overtakes` times at most. First in simulated time, where loads take --load_ms one after the
other, with each of several bounds; then with the bundled model and random adapters, measured.

Each run is checked by its log: no request is overtaken more often than the bound says, and a replay
of the log, which for the model computes all tokens anew, gives the same schedule and tokens. Claims
(ours; the paper has none): the mean time to first token falls with the bound, by half at 64 at the
latest, and hardly any further without one; most of the load time passes while steps run. Writes to
--output_dir: runs.csv, adapter_slots.png, report.json, summary.json, events.jsonl (of the model's
run, for `experiments.replay`) and the adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments import replay, serve
from experiments.diff_events import first_difference
from experiments.lib import adapters, random_adapters, run_record
from experiments.lib.engines import load_engine
from experiments.lib.event_log import EventLog, write_log
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program, refusals
from experiments.workloads.workloads import Request
from models import checkpoint
from models.config import ModelConfig
from paged.adapters.adapter import Adapter
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator.executor import LinearCost, SimulatedExecutor

UNBOUNDED = 2**31 - 1
BOUNDS = (0, 16, 32, 64, UNBOUNDED)
CONFIG = EngineConfig(
    max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256, kv_cache_tokens=4096,
    max_adapter_rank=random_adapters.RANK,
)  # fmt: skip
PROMPT, OUTPUT = (5, 120), (5, 60)  # tokens, from … to


@dataclass(frozen=True)
class Run:
    """A run's numbers; those from `loads` on are of `adapters.measure`."""

    engine: str
    max_overtakes: int
    requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    output_tokens_per_s: float
    loads: float
    load_s: float
    hidden: float
    hit_rate: float
    most_overtaken: float


def zipf(count: int, adapters: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """The adapter of each of `count` requests, [count]: i with a share of (i + 1)^-exponent."""
    shares = (1.0 + np.arange(adapters)) ** -exponent
    return rng.choice(adapters, count, p=shares / shares.sum())


def make_requests(
    count: int, rate: float, names: Sequence[str], exponent: float, vocab_size: int, seed: int
) -> list[Request]:
    rng = np.random.default_rng([seed, 6])
    times = np.cumsum(rng.exponential(1 / rate, count))
    which = zipf(count, len(names), exponent, rng)
    return [
        Request(
            float(time), rng.integers(3, vocab_size, rng.integers(*PROMPT)).tolist(),
            int(rng.integers(*OUTPUT)), ignore_eos=True, adapter=names[adapter],
        )
        for time, adapter in zip(times, which, strict=True)
    ]  # fmt: skip


def numbers_of(name: str, engine: Engine) -> Run:
    """Raises AssertionError if a request was overtaken too often."""
    records, counted = engine.metrics.requests, adapters.measure(engine.events)
    assert counted is not None, "no request names an adapter"
    most, bound = counted["most_overtaken"], engine.config.max_overtakes
    assert most <= bound, f"a request was overtaken {most} times, not {bound} at most"
    ttft = [r.first_token_s - r.arrival_s for r in records if r.first_token_s is not None]
    tokens = sum(record.output_tokens for record in records)
    began = min(record.arrival_s for record in records)
    ended = max(record.finish_s for record in records)
    return Run(
        engine=name,
        max_overtakes=bound,
        requests=len(records),
        ttft_mean_s=float(np.mean(ttft)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        output_tokens_per_s=tokens / (ended - began),
        **{
            key: counted[key] for key in ("loads", "load_s", "hidden", "hit_rate", "most_overtaken")
        },
    )


def check_replay(engine: Engine, again: Callable[[EventLog], Engine]) -> None:
    """Raises AssertionError unless the engine that `again` makes does all as `engine` has."""
    log = EventLog("events.jsonl", run_record.plain(engine.events))
    events = replay.replay(again(log), log)
    difference = first_difference(log, events)
    assert difference is None, difference and difference.describe("the run", "its replay")


def simulate(
    model: ModelConfig, config: EngineConfig, requests: Sequence[Request], names: Sequence[str],
    load_s: float,
) -> Engine:  # fmt: skip
    """Serve all in simulated time, with a load of `load_s` seconds; the engine."""
    executor = SimulatedExecutor(
        LinearCost(), vocab_size=model.vocab_size, first_token=3, adapter_page_s=load_s
    )
    engine = Engine(model, config, executor)
    for name in names:
        engine.add_known_adapter(Adapter(name, "", name, random_adapters.RANK))
    serve.run(engine, requests, progress=False)
    return engine


def measure(options: Options, config: EngineConfig) -> Engine:
    """The bundled model and random adapters, all of which are replayed on a second engine."""
    model = checkpoint.load_config("bundled")
    names = [f"lora-{i:03}" for i in range(options.real_adapters)]
    requests = make_requests(
        options.real_requests, options.real_rate, names, options.zipf, model.vocab_size,
        options.seed,
    )  # fmt: skip
    engine = load_engine(config)
    for i, name in enumerate(names):
        folder = Path(options.output_dir) / "adapters" / name
        engine.add_adapter(name, random_adapters.write(folder, model, options.seed + i))
    engine.warm_up()
    serve.run(engine, requests)
    return engine


def run(
    options: Options, model: ModelConfig, config: EngineConfig, bounds: Sequence[int] = BOUNDS
) -> list[Run]:
    """All bounds in simulated time."""
    names = [f"lora-{i:03}" for i in range(options.adapters)]
    requests = make_requests(
        options.requests, options.rate, names, options.zipf, model.vocab_size, options.seed
    )
    runs = []
    for bound in tqdm(bounds, "simulating", unit=" bounds"):
        bounded = replace(config, max_overtakes=bound)
        engine = simulate(model, bounded, requests, names, 1e-3 * options.load_ms)
        runs.append(numbers_of("simulated", engine))
        check_replay(engine, lambda log: replay.simulated_engine(log, model))
    return runs


def shown(bound: int) -> str:
    return "no bound" if bound == UNBOUNDED else str(bound)


def table(runs: Sequence[Run]) -> str:
    lines = [
        f"{'':11}{'overtaken at most':>18}{'(in fact)':>10}{'TTFT mean s':>13}{'p99':>8}"
        f"{'loads':>7}{'ms each':>9}{'beside steps':>14}{'hit rate':>10}{'tokens/s':>10}"
    ]
    lines += [
        f"{run.engine:11}{shown(run.max_overtakes):>18}{run.most_overtaken:>10}"
        f"{run.ttft_mean_s:>13.2f}{run.ttft_p99_s:>8.2f}{run.loads:>7}{1e3 * run.load_s:>9.1f}"
        f"{run.hidden:>14.1%}{run.hit_rate:>10.2f}{run.output_tokens_per_s:>10.0f}"
        for run in runs
    ]
    return "\n".join(lines)


def summary(runs: Sequence[Run]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for run in runs:
        at = f"{run.engine}_{shown(run.max_overtakes).replace(' ', '_')}"
        names = ("ttft_mean_s", "ttft_p99_s", "hidden", "hit_rate", "loads", "most_overtaken")
        numbers |= {f"{name}_{at}": getattr(run, name) for name in names}
    simulated = {run.max_overtakes: run.ttft_mean_s for run in runs if run.engine == "simulated"}
    return numbers | {
        f"ttft_{shown(bound).replace(' ', '_')}_over_0": simulated[bound] / simulated[0]
        for bound in BOUNDS[1:]
    }


def plot(runs: Sequence[Run], path: Path, title: str, footer: str) -> None:
    """Time to first token and hit rate over the bound, in simulated time."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = [shown(run.max_overtakes) for run in runs]
    axes.plot(labels, [run.ttft_mean_s for run in runs], "o-", color="#2f6b9a", label="mean")
    axes.plot(labels, [run.ttft_p99_s for run in runs], "o:", color="#2f6b9a", label="99th of 100")
    axes.set(xlabel="max_overtakes", ylabel="time to first token (s)", ylim=(0, None))
    axes.legend(loc="upper right")
    hits = axes.twinx()
    hits.plot(labels, [run.hit_rate for run in runs], "s-", color="#c8553d")
    hits.set_ylabel("hit rate", color="#c8553d")
    hits.set_ylim(0, 1)
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=110)


def main(options: Options) -> None:
    with refusals():
        config = replace(CONFIG, adapter_slots=options.adapter_slots, seed=options.seed)
    runs = run(options, checkpoint.load_config("bundled"), config)
    environment, folder = run_record.describe_environment(), options.output_dir
    hardware = run_record.hardware_line(environment)
    if options.real_requests:
        engine = measure(options, config)
        write_log(folder, "events.jsonl", engine.events)
        runs.append(numbers_of("measured", engine))
        check_replay(engine, lambda log: load_engine(replay.logged_config(log)))
    text = f"{table(runs)}\n(simulated: no time of any device; measured: {hardware})"
    numbers = summary(runs)
    content = {
        "experiment": "adapter_slots",
        "flags": vars(options),
        "seed": options.seed,
        "engine": config,
        "measured_on": hardware,
        "measured": [asdict(each) for each in runs],
        "claims": text.splitlines(),
        **environment,
    }
    run_record.write_csv(folder, "runs.csv", runs)
    run_record.write_json(folder, "report.json", content)
    run_record.write_summary(folder, numbers)
    title = f"{options.adapters} adapters over {options.adapter_slots} slots"
    footer = f"simulated time; a load takes {options.load_ms:g} ms"
    plot(runs[: len(BOUNDS)], Path(folder) / "adapter_slots.png", title, footer)
    print(text)


def define_flags() -> None:
    flags.DEFINE_integer("adapters", 200, "in simulated time", lower_bound=1)
    flags.DEFINE_integer("adapter_slots", 8, "on the device", lower_bound=1)
    flags.DEFINE_integer("requests", 250, "in simulated time", lower_bound=1)
    define_float("rate", 70.0, "requests a second, in simulated time", lower_bound=1e-3)
    define_float("load_ms", 150.0, "of one adapter, in simulated time", lower_bound=0.0)
    define_float("zipf", 1.3, "exponent of the adapters' popularity", lower_bound=0.0)
    flags.DEFINE_integer("real_adapters", 40, "beside the bundled model", lower_bound=1)
    flags.DEFINE_integer("real_requests", 80, "to the bundled model; 0: none", lower_bound=0)
    define_float("real_rate", 40.0, "requests a second to the bundled model", lower_bound=1e-3)
    flags.DEFINE_integer("seed", 0, "of requests and adapters", lower_bound=0)


PROGRAM = Program(
    main,
    define_flags,
    "results/adapter_slots",
    ("runs.csv", "adapter_slots.png", "events.jsonl"),
)

if __name__ == "__main__":
    PROGRAM.run()
