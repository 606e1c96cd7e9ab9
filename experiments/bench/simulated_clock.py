"""Durations of runs in simulated time, with rates fitted on this machine, beside real durations.

    python -m experiments.bench.simulated_clock

The engine serves each trace on this device, and again in simulated time:

    demo      tasks' prompts that arrive at random, as in configs/demo.flags
    sharegpt  ShareGPT's lengths, all at once, as in configs/sharegpt.flags
    diffkv    the demo's prompts under the policy DiffKV

First, the schedules must be the same: the run's log is replayed on a simulated device, and every
event must be equal. Second, the durations must be close: the requests are served again by an engine
that computes the time of a step from the step's size (`Rates`), each request with its output length
in the real run. The rates are fitted to steps of other requests, which the same engine serves
before and after the trace, so that a slow spell of the machine affects both. Rates are means, so
that sums of step times are right on a busy machine too.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import nnls

from experiments import serve
from experiments.diff_events import first_difference
from experiments.lib import shipped
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.event_log import read_log, write_log
from experiments.lib.typed_flags import Flags, flag
from experiments.replay import replay, simulated_engine
from experiments.study import Run, Setting, Study, Values
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from paged.step_inputs import StepInputs

PROMPTS = WorkloadConfig(
    f"prompts:{shipped.found('configs/demo_prompts.jsonl')}", num_requests=48, request_rate=16
)
DEMO = {
    "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256,
    "max_prefills_per_step": 4, "page_size": 16, "kv_cache_tokens": 8192,
}  # fmt: skip
SHAREGPT = {
    "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "page_size": 16,
    "kv_cache_tokens": 4096,
}  # fmt: skip
DIFFKV = DEMO | {
    "policy": "diffkv", "policy_options": {"alpha_h": 1.0, "alpha_l": 0.02},
    "chunked_prefill": False, "max_num_batched_tokens": 1024, "max_prefills_per_step": 1,
}  # fmt: skip
TRACES: dict[str, tuple[WorkloadConfig, dict[str, Any]]] = {
    "demo": (PROMPTS, DEMO),
    "sharegpt": (WorkloadConfig("sharegpt", length_divisor=4), SHAREGPT),
    "diffkv": (PROMPTS, DIFFKV),
}
# Longest prompt and longest output, in tokens, of the requests whose steps the rates are fitted to.
MEASURED = {"demo": (900, 60), "sharegpt": (175, 90), "diffkv": (900, 60)}
TOLERANCE = 0.15


@dataclass(frozen=True)
class ClockFlags(Flags):
    traces: tuple[str, ...] = flag(tuple(TRACES), "traces to serve", choices=tuple(TRACES))
    requests: int = flag(64, "requests of each trace at most", least=1)
    measured: int = flag(16, "requests whose steps are measured, before and after", least=1)
    seed: int = flag(1, "seed of the requests whose steps are measured", least=0)


@dataclass(frozen=True)
class Rates:
    """Seconds of a step by its size: the clock of a `SimulatedExecutor`.

    step_s: seconds per step.
    prefill_step_s: additional seconds per step with prefill tokens.
    prefill_token_s: seconds per prefill token, padding included.
    decode_row_s: seconds per decode row, padding included.
    cached_token_s: seconds per token of context of a decode row.
    pair_s: seconds per (query, key) pair of a prefill.
    """

    step_s: float
    prefill_step_s: float
    prefill_token_s: float
    decode_row_s: float
    cached_token_s: float
    pair_s: float

    @classmethod
    def fit(cls, sizes: np.ndarray, seconds: np.ndarray) -> "Rates":
        """Non-negative least squares. sizes: [n, 6], rows of `size_of`. seconds: [n]."""
        scale = np.maximum(sizes.max(0), 1.0)
        return cls(*(nnls(sizes / scale, seconds)[0] / scale).tolist())

    def __call__(self, inputs: StepInputs) -> float:
        return float(size_of(inputs) @ [getattr(self, field.name) for field in fields(self)])


def size_of(inputs: StepInputs) -> np.ndarray:
    """[6] The factor on each field of `Rates` in the step's time, in the order of the fields."""
    prompts, prefill = inputs.num_prefill_rows, inputs.num_prefill_tokens
    lengths = np.asarray(inputs.lengths, np.float64)
    new = np.diff(np.asarray(inputs.query_starts, np.float64))
    pairs = new * (lengths[:prompts] - new) + new * (new + 1) / 2
    rows = len(lengths) - prompts
    return np.array([1, prefill > 0, prefill, rows, lengths[prompts:].sum(), pairs.sum()])


@dataclass(frozen=True)
class Row:
    """A trace served on the device and in simulated time.

    same_schedule: whether the run's log and its replay are equal.
    error: relative error of the simulated duration.
    step_error: mean relative error of the steps that the rates are fitted to.
    steps, steps_simulated: number of steps on the device, and in simulated time.
    step_s to pair_s: the fitted `Rates`.
    """

    trace: str
    requests: int
    same_schedule: bool
    seconds: float
    simulated_s: float
    error: float
    step_error: float
    steps: int
    steps_simulated: int
    events: int
    step_s: float
    prefill_step_s: float
    prefill_token_s: float
    decode_row_s: float
    cached_token_s: float
    pair_s: float


def measured_requests(
    count: int, longest: tuple[int, int], vocab_size: int, seed: int
) -> list[Request]:
    """`count` requests that arrive at once, with random lengths up to `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, np.array(longest) + 1, (count, 2)).tolist()
    return [
        Request(
            0.0, rng.integers(vocab_size // 2, vocab_size, prompt).tolist(), output, ignore_eos=True
        )
        for prompt, output in lengths
    ]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Requests that an engine has served.

    seconds: seconds from the start to the end of the last request.
    first_step: index of the first step.
    outputs: number of output tokens of each request.
    """

    seconds: float
    first_step: int
    outputs: list[int]


def serve_all(engine: Engine, requests: Sequence[Request]) -> Served:
    start_s, first = engine.executor.clock.now(), len(engine.metrics.steps)
    outputs = serve.run(engine, requests, progress=False)
    ends = [record.finish_s for record in engine.metrics.requests[-len(requests) :]]
    return Served(max(ends) - start_s, first, [len(output.tokens) for output in outputs])


def compare(
    name: str, engine: Engine, requests: Sequence[Request], measured: Sequence[Sequence[Request]]
) -> Row:
    """Serve a trace on a warm engine, between the two sets of `measured` requests, and again in
    simulated time."""
    sizes: list[np.ndarray] = []
    execute = engine.executor.execute

    def watched(inputs: StepInputs):
        sizes.append(size_of(inputs))
        return execute(inputs)

    engine.executor.execute = watched  # type: ignore[method-assign]
    _, of_trace, after = (serve_all(engine, each) for each in (measured[0], requests, measured[1]))
    others = [*range(of_trace.first_step), *range(after.first_step, len(sizes))]
    fitted = np.array([sizes[i] for i in others])
    seconds = np.array([engine.metrics.steps[i].device_s for i in others])
    rates = Rates.fit(fitted, seconds)
    told = fitted @ list(vars(rates).values())
    executor = SimulatedExecutor(rates, vocab_size=engine.model.vocab_size)
    simulated = Engine(engine.model, engine.config, executor, engine.tokenizer)
    again = serve_all(simulated, [
        replace(request, max_tokens=length, ignore_eos=True, stop=())
        for request, length in zip(requests, of_trace.outputs, strict=True)
    ])  # fmt: skip
    return Row(
        trace=name,
        requests=len(requests),
        same_schedule=_replays(engine),
        seconds=of_trace.seconds,
        simulated_s=again.seconds,
        error=again.seconds / of_trace.seconds - 1,
        step_error=float(np.mean(np.abs(told / seconds - 1))),
        steps=after.first_step - of_trace.first_step,
        steps_simulated=len(simulated.metrics.steps),
        events=len(engine.events),
        **vars(rates),
    )


def _replays(engine: Engine) -> bool:
    """Whether a replay of the engine's log in simulated time gives equal events."""
    with tempfile.TemporaryDirectory() as folder:
        log = read_log(write_log(folder, "events.jsonl", engine.events))
    events = replay(simulated_engine(log, engine.model, engine.tokenizer), log)
    return first_difference(log, events) is None


def served(flags: ClockFlags, name: str) -> Row:
    """Serve a trace on the device and in simulated time."""
    model, tokenizer = checkpoint.load_config("bundled"), load_tokenizer("bundled")
    asked, config_fields = TRACES[name]
    config = engine_config(model, **config_fields)
    asked = replace(asked, num_requests=min(flags.requests, asked.num_requests))
    vocabulary = Vocabulary(tokenizer, model.vocab_size, config.max_model_len)
    requests = workloads.load(asked, vocabulary).requests
    engine = load_engine(config, tokenizer)
    engine.warm_up(progress=False)
    measured = [
        measured_requests(flags.measured, MEASURED[name], model.vocab_size, flags.seed + i)
        for i in range(2)
    ]
    return compare(name, engine, requests, measured)


def measure(flags: ClockFlags, run: Run) -> Iterator[Row]:
    for name in flags.traces:
        yield run.once(served, flags, name)


def values(_: ClockFlags, rows: Sequence[Row]) -> Values:
    found: dict[str, float] = {}
    for row in rows:
        found |= {
            f"{row.trace}_error": row.error,
            f"{row.trace}_same_schedule": float(row.same_schedule),
            f"{row.trace}_seconds": row.seconds,
            f"{row.trace}_simulated_s": row.simulated_s,
        }
    return found


def holds(found: Mapping[str, float]) -> bool:
    same = all(found[f"{trace}_same_schedule"] for trace in TRACES)
    return same and all(abs(found[f"{trace}_error"]) <= TOLERANCE for trace in TRACES)


def draw(_: ClockFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [row.seconds for row in rows], 0.4, label="run")
    axes.bar(places + 0.2, [row.simulated_s for row in rows], 0.4, label="simulated")
    axes.set_xticks(places, [row.trace for row in rows])
    axes.set(ylabel="seconds", yscale="log")
    axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="The simulated clock beside a real run",
    kind="measured",
    claim="a trace has the same schedule on a device and in simulated time, and with the device's "
    "own rates takes as long",
    rule=f"every event of a replay is the same, and durations agree within {TOLERANCE:.0%}, in all "
    "of " + ", ".join(TRACES),
    holds=holds,
    setting=Setting(
        "the bundled model (1.5M), float32, on this device; ShareGPT's lengths divided by 4",
        "",
        "paper",
    ),
    flags=ClockFlags,
    measure=measure,
    values=values,
    draw=draw,
    quick={"requests": 8, "measured": 6},
    minutes=(3, 6),
    size=(5, 3.4),
)

if __name__ == "__main__":
    STUDY.run()
