"""The main program: serve a workload with a model through paged KV memory, and report on it.

python -m experiments.serve --flagfile=configs/demo.flags

Writes to --output_dir: report.json (everything about the run), summary.json (its numbers, flat),
requests.csv, outputs.jsonl, events.jsonl, and pictures.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.lib import adapters, event_log, plots, report, run_record, serving
from experiments.lib.adapters import adapters_flag, popularity_flag
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import ModelFlags, Output, part
from experiments.workloads import popularity, tenants, workloads
from experiments.workloads.workloads import Request, Vocabulary, Workload, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.clock import WallClock
from paged.engine import Engine, EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.validation import check_group, validated_prompt

LONGEST_WAIT_S = 0.5  # longest wait for the next request, between checks of `stop_requested`
# Each request sets its own max_tokens, seed and ignore_eos. The report has no log-probabilities.
NO_FLAGS = ("max_tokens", "seed", "ignore_eos", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class ServeFlags(ModelFlags):
    workload: WorkloadConfig = part(WorkloadConfig("sharegpt"))
    sampling: SamplingParams = part(SamplingParams(), leave_out=NO_FLAGS)
    engine: EngineConfig = part(EngineConfig())
    adapters: str = adapters_flag()
    popularity: str = popularity_flag("distinct")


def prepare(flags: ServeFlags, output_dir: Path) -> tuple[Engine, Workload]:
    """The engine and the workload of the flags. Flags and requests are checked before the weights
    are loaded, each request by the check that the engine runs on its arrival.

    Raises ValueError for an invalid flag, model folder or workload.
    """
    wanted, sampling, config = flags.workload, flags.sampling, flags.engine
    model, tokenizer = checkpoint.load_config(flags.model), load_tokenizer(flags.model)
    check_group(sampling, model, config)
    pages = config.kv_cache_tokens // config.page_size // sampling.num_sequences
    longest = min(config.max_model_len, pages * config.page_size)
    workload = workloads.load(wanted, Vocabulary(tokenizer, model.vocab_size, longest))
    served = adapters.asked_for(flags.adapters, model, config, flags.dtype, output_dir)
    if served:
        count, given = len(workload.requests), [adapter.name for adapter in served]
        names = popularity.assign(given, flags.popularity, count, config.seed)
        formats = tenants.formats(served, flags.model)
        requests = tenants.addressed(workload.requests, names, formats)
        workload = replace(workload, requests=requests)
    sharded = ShardedModel.split(model, config.tensor_parallel, flags.dtype)
    sizes = policy_of(config.policy).sizes(config, sharded)
    for i, request in enumerate(workload.requests):
        try:
            how = sampling_of(request, sampling, config.seed, i)
            validated_prompt(request.prompt, how, tokenizer, model, config, sizes)
        except ValueError as error:
            raise ValueError(f"request {i + 1} of --workload={wanted.workload}: {error}") from None
    engine = load_engine(config, tokenizer, **loading(flags))
    for adapter in served:
        engine.add_known_adapter(adapter)
    return engine, workload


def sampling_of(request: Request, sampling: SamplingParams, seed: int, i: int) -> SamplingParams:
    """The sampling parameters of request i: `sampling` with the request's own fields, and the seed
    `seed` + i.

    Raises ValueError for an invalid combination.
    """
    return replace(
        sampling,
        max_tokens=request.max_tokens,
        seed=(seed + i) % 2**32,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
    )


def run(
    engine: Engine,
    requests: Sequence[Request],
    sampling: SamplingParams | None = None,
    seed: int = 0,
    progress: bool = True,
    skip: bool = False,
) -> list[RequestOutput]:
    """Serve `requests` as they arrive on the engine's clock. Returns their outputs in the same
    order. Time 0 of the workload is now.

    sampling, seed: see `sampling_of`.
    skip: in simulated time, compute runs of decode steps at once (`paged.decode_runs`). The event
        log then lacks these steps.

    Raises ValueError for a request that the engine refuses, and for an engine with unfinished
    requests.
    """
    served: dict[int, RequestOutput] = {}
    serve(engine, requests, served, sampling, seed, progress, skip=skip)
    return [served[i] for i in range(len(requests))]


def serve(
    engine: Engine,
    requests: Sequence[Request],
    served: dict[int, RequestOutput],
    sampling: SamplingParams | None = None,
    seed: int = 0,
    progress: bool = True,
    stop_requested: Callable[[], bool] = lambda: False,
    skip: bool = False,
) -> None:
    """As `run`, until `stop_requested` returns True. Unfinished requests are then aborted, and keep
    their outputs so far. Exceptions of the engine are re-raised.

    served: receives the outputs of all arrived requests, by index in `requests`, also when the
        engine raises.
    """
    if engine.has_unfinished():
        raise ValueError("the engine has requests already: serve or abort them before")
    sampling, clock = sampling or SamplingParams(), engine.executor.clock
    start = clock.now()
    coming = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival_s))
    index: dict[str, int] = {}
    try:
        with tqdm(total=len(requests), desc="serving", unit="req", disable=not progress) as bar:
            while (coming or engine.has_unfinished()) and not stop_requested():
                while coming and start + requests[coming[0]].arrival_s <= clock.now():
                    i = coming.popleft()
                    request = requests[i]
                    how = sampling_of(request, sampling, seed, i)
                    arrival = start + request.arrival_s
                    added = engine.add_request(
                        request.prompt, how, arrival_time=arrival, adapter=request.adapter
                    )
                    index[added] = i
                if not engine.has_unfinished():
                    arrival = start + requests[coming[0]].arrival_s
                    clock.wait_until(min(arrival, clock.now() + LONGEST_WAIT_S))
                    continue
                until = start + requests[coming[0]].arrival_s if coming else math.inf
                for output in engine.run_until(until) if skip else engine.step():
                    served[index[output.request_id]] = output
                    bar.update()
    finally:
        for request_id in list(engine.requests.unfinished):
            served[index[request_id]] = engine.abort(request_id)
        # Collect a step that was dispatched before, and requests that a failure has ended.
        while engine.has_unfinished():
            for output in engine.step():
                served[index[output.request_id]] = output


def write(
    output_dir: str | Path,
    engine: Engine,
    workload: Workload,
    outputs: Sequence[RequestOutput],
    facts: dict[str, Any],
) -> tuple[str, list[OSError]]:
    """Write every file of a run. Returns (table, errors of files that could not be written).

    facts: further fields of report.json: flags, model, `partial` (see `serving.missing`).
    """
    answered = report.score(workload.requests, outputs)
    # Outputs come first, because they cannot be computed again; large files come last.
    lines = list(map(report.output_line, answered))
    failures = run_record.write_all([
        lambda: run_record.write_json_lines(output_dir, "outputs.jsonl", lines)
    ])  # fmt: skip
    partial = facts.get("partial")
    if partial:
        print(
            f"{partial['interrupted_by']}: writing the report on what was served", file=sys.stderr
        )
    environment = run_record.describe_environment()
    hardware = run_record.hardware_line(environment)
    if not isinstance(engine.executor.clock, WallClock):
        hardware = "simulated time"
    measured, answers = report.measure(engine.metrics), report.answers_exact(answered)
    content: dict[str, Any] = facts | {
        "measured_on": hardware,
        "workload": workload.notes | report.describe_requests(answered),
        "measured": measured,
        "adapters": adapters.measure(engine.events),
        "exact_answers": {task: f"{right}/{total}" for task, (right, total) in answers.items()},
        "exact_answers_of_adapters": tenants.answers_exact(answered),
        **environment,
    }
    numbers = report.summary(measured, answers) | {"partial": int(bool(partial))}
    numbers |= {f"adapter_{name}": value for name, value in (content["adapters"] or {}).items()}
    named = {item.output.request_id: item.request.adapter for item in answered}
    rows = [report.request_row(r, named.get(r.request_id)) for r in engine.metrics.requests]
    failures += run_record.write_all([
        lambda: run_record.write_csv(output_dir, "requests.csv", rows),
        lambda: run_record.write_json(output_dir, "report.json", content),
        lambda: run_record.write_summary(output_dir, numbers),
        lambda: event_log.write_log(
            output_dir, "events.jsonl", engine.events, complete=not partial
        ),
    ])  # fmt: skip
    title = f"{len(outputs)} requests, policy {engine.config.policy}"
    title += ", interrupted" * bool(partial)
    failures += plots.save(engine.metrics, output_dir, title, hardware)
    table = report.show(answered) + "\n\n" + report.table(measured, answers, hardware)
    table += tenants.line(content["exact_answers_of_adapters"])
    table += adapters.line(content["adapters"])
    return table + serving.partial_line(partial), failures


def serve_and_write(
    engine: Engine,
    workload: Workload,
    sampling: SamplingParams,
    seed: int,
    output_dir: str | Path,
    facts: dict[str, Any],
) -> int:
    """Serve and write a run; see `serving.serve_and_write`."""
    served: dict[int, RequestOutput] = {}

    def serve_until(stop_requested: Callable[[], bool]) -> None:
        serve(engine, workload.requests, served, sampling, seed, stop_requested=stop_requested)

    def write_served(cause: str | None) -> tuple[str, list[OSError]]:
        arrived = sorted(served)
        asked = replace(workload, requests=[workload.requests[i] for i in arrived])
        outputs = [served[i] for i in arrived]
        reasons = [output.finish_reason for output in outputs]
        partial = serving.missing(cause, len(workload.requests), reasons)
        return write(output_dir, engine, asked, outputs, facts | {"partial": partial})

    files = f"report.json, summary.json, pictures and more are in {output_dir}/"
    return serving.serve_and_write(serve_until, write_served, files)


def main(flags: ServeFlags, output: Output) -> int:
    with refusals():
        engine, workload = prepare(flags, output.folder)
    seed = flags.engine.seed
    facts = {
        "experiment": "serve",
        "flags": flags,
        "seed": seed,
        "model": asdict(engine.model) | {"weights_sha256": checkpoint.weights_hash(flags.model)},
    }
    engine.warm_up()
    return serve_and_write(engine, workload, flags.sampling, seed, output.folder, facts)


PROGRAM = Program(
    main, ServeFlags, Output("results/serve"),
    ("outputs.jsonl", "requests.csv", "events.jsonl", *plots.FILES),
)  # fmt: skip

if __name__ == "__main__":
    PROGRAM.run()
