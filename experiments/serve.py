"""The main job: serve a workload with a model through paged KV memory, and report on it.

python -m experiments.serve --flagfile=configs/demo.flags

Writes to --output_dir: report.json (all about the run), summary.json (its numbers, flat),
requests.csv, outputs.jsonl, events.jsonl, and pictures.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from experiments import plots, report, run_record, workloads
from experiments.flags import (
    define_engine_flags,
    define_fields,
    engine_config,
    load_engine,
    values_of,
)
from experiments.workloads import Request, Vocabulary, Workload, WorkloadConfig
from models import weights
from paged.clock import WallClock
from paged.engine import Engine
from paged.sequence import RequestOutput, SamplingParams
from paged.validation import check_group

FLAGS = flags.FLAGS
WORKLOAD_HELP = {
    "num_requests": "requests at most; a file may hold fewer",
    "request_rate": "Poisson arrivals per second; inf for all at once",
    "max_tokens": "output tokens for prompts that do not say",
    "context_length": "tokens of a prompt of --workload=tasks:...",
    "time_scale": "multiplies a trace's arrival times",
    "overlong": "a trace's requests beyond the context: error, clip or drop",
    "length_sigma": "spread of the synthetic log-normal lengths",
    "length_divisor": "divides all synthetic lengths and the context that bounds them",
    "num_shots": "examples in the shared prefix of --workload=translation: 1 or 5",
}
SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_k": "sample among the k most probable tokens; 0 is off",
    "top_p": "sample among the most probable tokens of this total probability",
    "min_p": "leave out tokens less probable than this times the most probable one",
    "repetition_penalty": "divides positive logits of tokens seen before; 1 is off",
    "presence_penalty": "subtracted from logits of tokens generated before; 0 is off",
    "frequency_penalty": "the same for each time that they were generated; 0 is off",
    "n": "sequences of each request: sampled ones, or the best of a beam search",
    "beam_width": "beams of a search instead of sampling; 1 is off",
    "length_penalty": "of a beam search: above 0 it favours long outputs",
}


def define_flags() -> list[str]:
    """Define this program's flags; returns their names."""
    flags.DEFINE_string("workload", "sharegpt", workloads.FORMS)
    flags.DEFINE_string("output_dir", "results/serve", "where the report goes")
    names = define_fields(WorkloadConfig, WORKLOAD_HELP)
    names += define_fields(SamplingParams, SAMPLING_HELP)
    return ["workload", "output_dir", *names, *define_engine_flags()]


def prepare() -> tuple[Engine, Workload, SamplingParams]:
    """What the flags ask for; all but the weights is checked before the weights are read.

    Raises: ValueError for whatever is wrong with a flag, the model's folder or the workload.
    """
    run_record.check_output_dir(FLAGS.output_dir)
    wanted = WorkloadConfig(**values_of(field.name for field in fields(WorkloadConfig)))
    sampling = SamplingParams(**values_of(SAMPLING_HELP))
    model = weights.load_config(FLAGS.model)
    config = engine_config(model)
    tokenizer = weights.load_tokenizer(FLAGS.model)
    check_group(sampling, model, config)
    pages = config.kv_cache_tokens // config.page_size // sampling.num_sequences
    longest = min(config.max_model_len, pages * config.page_size)
    workload = workloads.load(wanted, Vocabulary(tokenizer, model.vocab_size, longest))
    for i, request in enumerate(workload.requests):
        sampling_of(request, sampling, FLAGS.seed, i)
    return load_engine(config, tokenizer), workload, sampling


def sampling_of(request: Request, sampling: SamplingParams, seed: int, i: int) -> SamplingParams:
    """Of request i: what it says itself, and for the rest `sampling`; it draws with seed + i.

    Raises: ValueError if the two do not go together.
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
) -> list[RequestOutput]:
    """Serve `requests` as they arrive on the engine's clock; their outputs, in the same order.

    Time 0 of the workload is now. sampling: of all, but what a request says itself; request i draws
    with seed + i. Raises: ValueError for a request that the engine refuses.
    """
    sampling, clock = sampling or SamplingParams(), engine.executor.clock
    start = clock.now()
    coming = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival_s))
    index: dict[str, int] = {}
    outputs: dict[int, RequestOutput] = {}
    with tqdm(total=len(requests), desc="serving", unit="req", disable=not progress) as bar:
        while coming or engine.has_unfinished():
            while coming and start + requests[coming[0]].arrival_s <= clock.now():
                i = coming.popleft()
                request = requests[i]
                how = sampling_of(request, sampling, seed, i)
                arrival = start + request.arrival_s
                index[engine.add_request(request.prompt, how, arrival_time=arrival)] = i
            if not engine.has_unfinished():
                clock.wait_until(start + requests[coming[0]].arrival_s)
                continue
            for output in engine.step():
                outputs[index[output.request_id]] = output
                bar.update()
    return [outputs[i] for i in range(len(requests))]


def write(
    output_dir: str | Path,
    engine: Engine,
    workload: Workload,
    outputs: Sequence[RequestOutput],
    facts: dict[str, Any],
) -> str:
    """Write every file of a run, with `facts` (flags, model) in report.json; returns the table."""
    environment = run_record.describe_environment()
    hardware = run_record.hardware_line(environment)
    if not isinstance(engine.executor.clock, WallClock):
        hardware = "simulated time"
    answered = report.score(workload.requests, outputs)
    measured, answers = report.measure(engine.metrics), report.answers_exact(answered)
    content = facts | {
        "measured_on": hardware,
        "workload": workload.notes | report.describe_requests(answered),
        "measured": measured,
        "exact_answers": {task: f"{right}/{total}" for task, (right, total) in answers.items()},
        **environment,
    }
    run_record.write_json(output_dir, "report.json", content)
    run_record.write_summary(output_dir, report.summary(measured, answers))
    run_record.write_json_lines(output_dir, "events.jsonl", engine.events)
    run_record.write_json_lines(output_dir, "outputs.jsonl", map(report.output_line, answered))
    report.write_requests_csv(output_dir, engine.metrics.requests)
    title = f"{len(outputs)} requests, policy {engine.config.policy}"
    plots.save(engine.metrics, output_dir, title, hardware)
    return report.show(answered) + "\n\n" + report.table(measured, answers, hardware)


def main(argv: list[str], names: Sequence[str] = ()) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags are --name=value")
    try:
        engine, workload, sampling = prepare()
    except ValueError as error:
        sys.exit(f"error: {error}")
    engine.warm_up()
    outputs = run(engine, workload.requests, sampling, FLAGS.seed)
    facts = {
        "experiment": "serve",
        "flags": values_of(names),
        "seed": FLAGS.seed,
        "model": asdict(engine.model) | {"weights_sha256": weights.weights_hash(FLAGS.model)},
    }
    print(write(FLAGS.output_dir, engine, workload, outputs, facts))
    print(f"report.json, summary.json, pictures and more are in {FLAGS.output_dir}/")


if __name__ == "__main__":
    defined = define_flags()
    app.run(lambda argv: main(argv, defined))
