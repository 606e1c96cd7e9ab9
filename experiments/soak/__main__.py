"""Serve random requests for a long time, and check the engine at every step.

python -m experiments.soak --minutes=30
python -m experiments.soak --policy=lserve --preemption_mode=swap \\
    --lserve_gates=models/bundled/duo_gates.json --lserve_streaming_share=0.5 \\
    --lserve_budget=48 --lserve_sink=16 --lserve_local=32
python -m experiments.soak --policy=diffkv --noprefix_caching --nochunked_prefill --page_size=8 \\
    --max_model_len=96 --max_num_batched_tokens=96 --max_num_seqs=4 --kv_cache_tokens=40 \\
    --diffkv_window=16 --diffkv_gates=models/bundled/duo_gates.json --diffkv_streaming_share=0.5 \\
    --diffkv_sink=8 --diffkv_local=16 --diffkv_read_pages=4 --logprob_tolerance=0.1

With --chunked_prefill --kv_cache_tokens=320 --diffkv_pins=2 --diffkv_prompt_tile=8 as further flags
the last command also pins prefixes.

Random requests arrive: single sequences, parallel samples and beam searches. Requests stream, stop
at strings, share prefixes, some of them pinned, and are aborted in any state. The KV cache is so
small that requests preempt each other (--preemption_mode: by recompute or swap). Invalid requests
must be refused, and Ctrl-C interrupts some calls (--interrupts). Requests may use the adapters of
--adapters, more than --adapter_slots.
Every --drain_every steps all requests end, and the engine must be in its initial state.

Checks:

- each request gets one final output; tokens, texts and finish reasons fit the request;
- --check_share of the outputs equal the output of the request served alone;
- the oldest request always advances;
- every block, on the device and in host memory, has exactly the references of block tables, pins
  and swapped sequence groups; every slot has its sequence;
- refused requests leave no trace;
- memory does not grow;
- every mechanism that the flags enable has occurred: stop at a string or token, abort, close of a
  stream, refusal, preemption, swaps in both directions, parallel samples, beam search, prefix cache
  hit, pin, adapter eviction, page selection and its reuse, move of a streaming window, sparse
  prefill, demotion and dropping of tokens, comparison with a request alone, interrupt.

All decisions depend on --seed, the number of the step and the engine's state alone: --steps repeats
a run without interrupts. Writes to --output_dir: report.json, summary.json, samples.csv and
soak.png. Ends with an error that names the first violation, its step and the seed.
"""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.adapters import adapters_flag, asked_for
from experiments.lib.flags import loading
from experiments.lib.program import Program, refusals
from experiments.lib.signals import Stop
from experiments.lib.typed_flags import ModelFlags, Output, flag
from experiments.soak.checks import KINDS, Violation
from experiments.soak.comparison import LOGPROB_TOLERANCE
from experiments.soak.mechanisms import check_mechanisms, named_mechanisms, observe
from experiments.soak.operations import OPERATIONS
from experiments.soak.users import Users, make_users
from models import checkpoint
from paged.config import EngineConfig
from paged.kv_cache.vllm import VLLMHost

SAMPLE_EVERY = 50  # steps between samples
HUNG_S = 600.0  # longest time between two samples; then the program dumps its stacks and exits
SETTLED = 0.25  # share of the run after which memory must not grow
SLOPE_MINUTES = 5.0  # shortest run with a meaningful memory slope
# A KV cache so small that it rarely holds all requests.
ENGINE_DEFAULTS = EngineConfig(
    max_model_len=192, max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_step=4,
    kv_cache_tokens=448, prefix_caching=True,
)  # fmt: skip


@dataclass(frozen=True)
class SoakFlags(ModelFlags):
    minutes: float = flag(30.0, "how long", least=0.01)
    steps: int = flag(0, "how many steps instead, if not 0", least=0)
    drain_every: int = flag(500, "steps after which all requests end", least=1)
    check_share: float = flag(
        0.05, "of the requests, to be compared with a run of each alone", least=0, most=1
    )
    interrupts: float = flag(
        0.0, "share of the users' calls that a signal may interrupt, as Ctrl-C does; such a run "
        "cannot be repeated", least=0, most=1,
    )  # fmt: skip
    logprob_tolerance: float = flag(
        LOGPROB_TOLERANCE, "between a request in company and alone; more where keys and values are "
        "quantised, as the last bit can decide a code", least=0,
    )  # fmt: skip
    max_rss_growth_mib: float = flag(32.0, "in resident memory, after a quarter of the run")
    adapters: str = adapters_flag()
    engine: EngineConfig = ENGINE_DEFAULTS


@dataclass(frozen=True)
class Sample:
    """The state after a step.

    rss_mib: resident memory in MiB; None if unknown.
    live_arrays: number of live JAX arrays.
    blocks_idle: free blocks that still hold a cached prefix.
    blocks_swapped: blocks in host memory.
    at_rest: whether all requests had ended.
    """

    step: int
    minutes: float
    rss_mib: float | None
    live_arrays: int
    running: int
    waiting: int
    blocks_used: int
    blocks_idle: int
    blocks_swapped: int
    requests: int
    output_tokens: int
    at_rest: bool = False


def sample(users: Users, step: int, minutes: float, at_rest: bool = False) -> Sample:
    policy, scheduler = users.engine.host_policy, users.engine.scheduler
    held = {name: len(units) for name, units in policy.used_units().items()}
    swapped = sum(count for name, count in held.items() if name.startswith("host "))
    cache = policy.pool.cache if isinstance(policy, VLLMHost) else None
    return Sample(
        step, minutes, rss_mib(), len(jax.live_arrays()), len(scheduler.running),
        len(scheduler.waiting), sum(held.values()) - swapped, len(cache.idle) if cache else 0,
        swapped, users.counts["requests"], users.counts["output_tokens"], at_rest,
    )  # fmt: skip


def rss_mib() -> float | None:
    """Resident memory of this process in MiB; None without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(
    users: Users,
    *,
    steps: int = 0,
    minutes: float = 0.0,
    drain_every: int = 500,
    operations=OPERATIONS,
    progress: bool = True,
    stop_requested: Callable[[], bool] = lambda: False,
) -> tuple[list[Sample], int, Exception | None]:
    """Let `users` act for `steps` steps (0: for `minutes`), or until an error or `stop_requested`.

    Returns (samples, number of steps, error): a Violation, the engine's exception, or None.
    """
    began, samples, step = time.monotonic(), [], 0
    total = steps or 60 * minutes

    def minutes_now() -> float:
        return (time.monotonic() - began) / 60

    bar = tqdm(
        total=total, desc="soaking", unit="step" if steps else "s", disable=not progress,
        bar_format="{desc} {percentage:3.0f}% |{bar}| {n:.0f}/{total:.0f} {unit}{postfix}",
    )  # fmt: skip
    try:
        users.pin()
        while not stop_requested() and ((step < steps) if steps else (minutes_now() < minutes)):
            users.act(step, operations)
            step += 1
            if step % SAMPLE_EVERY == 0:
                observe(users)
            drains = step % drain_every == 0
            if drains:
                users.drain()
                users.pin()
            if drains or step % SAMPLE_EVERY == 0:
                samples.append(sample(users, step, minutes_now(), at_rest=drains))
                faulthandler.dump_traceback_later(HUNG_S, exit=True)
                # tqdm drops the total once n exceeds it.
                bar.n = min(total, step if steps else 60 * samples[-1].minutes)
                bar.set_postfix_str(f"step {step}, {users.counts['requests']} requests")
        stopped = stop_requested()
        if not stopped:  # after a signal, do not wait for all requests to end
            users.drain()
        samples.append(sample(users, step, minutes_now(), at_rest=not stopped))
    except Exception as error:
        return samples, step, error
    finally:
        faulthandler.cancel_dump_traceback_later()
        bar.close()
    return samples, step, None


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Memory growth over the samples after the share SETTLED.

    live_arrays_growth: JAX arrays gained between the first and the last sample at rest.
    rss_first_mib, rss_last_mib: resident memory in the first and the last sample.
    rss_slope_mib_per_hour: least-squares slope, if the samples span `SLOPE_MINUTES` or more.
    """
    samples = samples[int(SETTLED * len(samples)) :]
    rest = [s.live_arrays for s in samples if s.at_rest]
    numbers: dict[str, float] = {"live_arrays_growth": rest[-1] - rest[0]} if rest else {}
    measured = [(s.minutes / 60, s.rss_mib) for s in samples if s.rss_mib is not None]
    if len(measured) > 1:
        hours, rss = np.array(measured).T
        numbers |= {"rss_first_mib": rss[0], "rss_last_mib": rss[-1]}
        if 60 * np.ptp(hours) >= SLOPE_MINUTES:
            numbers["rss_slope_mib_per_hour"] = np.polyfit(hours - hours[0], rss, 1)[0]
    return numbers


def check_growth(numbers: dict[str, float], max_rss_growth_mib: float) -> Violation | None:
    """A violation if there are more JAX arrays, or if resident memory grew by more than
    `max_rss_growth_mib`."""
    if numbers.get("live_arrays_growth", 0) > 0:
        return Violation("memory_growth", f"{numbers['live_arrays_growth']:.0f} more JAX arrays")
    grown = numbers.get("rss_last_mib", 0) - numbers.get("rss_first_mib", 0)
    if grown > max_rss_growth_mib:
        return Violation("memory_growth", f"resident memory grew by {grown:.1f} MiB")
    return None


def summary(users: Users, samples: Sequence[Sample], steps: int, error: Exception | None) -> dict:
    """Flat numbers: the run's counts; for each kind of violation, 1 if it ended the run, else 0."""
    kind = "raised" if error and not isinstance(error, Violation) else getattr(error, "kind", "")
    return {
        "steps": steps,
        "minutes": samples[-1].minutes if samples else 0.0,
        **{kind_: int(kind_ == kind) for kind_ in KINDS},
        "aborted": users.counts["ended_abort"] + users.counts["closed"],
        **users.counts,
        **growth(samples),
        "compilations_after_warmup": users.engine.metrics.compilations_after_warmup,
        "digest": users.digest,
    }


def plot(samples: Sequence[Sample], path: Path, title: str, footer: str) -> None:
    """Resident memory, blocks and requests over time."""
    figure = run_record.new_figure(9, 7)
    memory, blocks, requests = figure.subplots(3, 1, sharex=True)
    minutes = [s.minutes for s in samples]
    memory.plot(minutes, [s.rss_mib or np.nan for s in samples], color="#2f6b9a")
    memory.set(ylabel="resident memory (MiB)", ylim=(0, None))
    for axes, names in (
        (blocks, ("blocks_used", "blocks_idle", "blocks_swapped")),
        (requests, ("running", "waiting")),
    ):
        for name, colour in zip(names, ("#2f6b9a", "#e0a030", "#c8553d")):
            values = [getattr(s, name) for s in samples]
            label = name.replace("_", " ")
            axes.plot(minutes, values, ".", markersize=2, color=colour, label=label)
        axes.set(ylim=(0, None))
        axes.legend(loc="upper right", markerscale=5)
    blocks.set(ylabel="KV blocks")
    requests.set(ylabel="requests", xlabel="time (minutes)")
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def main(flags: SoakFlags, output: Output) -> int:
    config, folder = flags.engine, output.folder
    with refusals():
        model = checkpoint.load_config(flags.model)
        served = asked_for(flags.adapters, model, config, flags.dtype, folder)
        users = make_users(
            config, config.seed, flags.check_share, flags.interrupts, flags.logprob_tolerance,
            served, **loading(flags),
        )  # fmt: skip
        named = named_mechanisms(users)
    # The reference is warmed up first, because compilations are counted for the whole process.
    users.reference.warm_up()
    users.engine.warm_up()
    with Stop() as stop:
        samples, steps, wrong = run(
            users,
            steps=flags.steps,
            minutes=flags.minutes,
            drain_every=flags.drain_every,
            stop_requested=stop.requested,
        )
        partial = stop.cause
        if not partial:  # memory of an interrupted run may not have settled
            wrong = wrong or check_growth(growth(samples), flags.max_rss_growth_mib)
            wrong = wrong or check_mechanisms(named, users.counts)
        numbers = summary(users, samples, steps, wrong) | {"partial": int(bool(partial))}
        facts = {
            "experiment": "soak",
            "flags": flags,
            "seed": config.seed,
            "weights_sha256": checkpoint.weights_hash(flags.model),
            "violation": wrong and f"{wrong}",
            "partial": partial,
            "measured": numbers,
        }
        environment = run_record.describe_environment()
        run_record.write_csv(folder, "samples.csv", samples)
        run_record.write_json(folder, "report.json", facts | environment)
        run_record.write_summary(folder, numbers)
        title = f"{numbers['requests']:,} requests in {numbers['steps']:,} steps"
        plot(samples, folder / "soak.png", title, run_record.hardware_line(environment))
        tell(numbers, wrong, partial, flags, folder)
    return 128 + stop.signal if stop.signal else 0


def tell(
    numbers: dict, wrong: Exception | None, partial: str | None, flags: SoakFlags, folder: Path
) -> None:
    """Print the results; exit with an error if `wrong` is not None."""
    for name, value in numbers.items():
        print(f"{name:28} {value:,.6g}" if isinstance(value, float) else f"{name:28} {value:,}")
    if wrong:
        traceback.print_exception(wrong)
        steps = numbers["steps"]
        if isinstance(wrong, Violation) and wrong.kind == "unexercised":
            sys.exit(f"nothing was lost in {steps} steps, but {wrong}")
        sys.exit(
            f"violated in step {steps} with --seed={flags.engine.seed}: {wrong}\n"
            f"repeat with the same flags, --steps={steps + 1} and another --output_dir"
        )
    ended = f"nothing lost until {partial}" if partial else "nothing lost"
    print(f"{ended}; samples.csv, soak.png and more are in {folder}/")


PROGRAM = Program(main, SoakFlags, Output("results/soak"), ("samples.csv", "soak.png"))

if __name__ == "__main__":
    PROGRAM.run()
