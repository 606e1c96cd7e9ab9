"""How much KV memory parallel sampling and beam search save by sharing blocks (vLLM §6.3, Fig. 15).

    python -m experiments.figures.vllm.sharing_savings

Serves requests with the lengths of Alpaca and ShareGPT, as parallel sampling and as beam search of
several sizes. The lengths are synthetic, with the published means, and the texts are made-up
stories. The saving of a step is defined as in the paper: the blocks that sharing saves, divided by
the blocks that there would be without sharing. The saving of a case is the mean over its steps. To
explain it, the program also measures how much of the cache is prompts, how many prompts fill no
block, how soon all beams have a common ancestor, and what blocks of one token would save.

--length_scale below 1 shortens all lengths for a quick run. Scale --page_size by the same factor,
or too few prompts fill a block. Writes to --output_dir: savings.csv, savings.png, report.json,
summary.json and genealogies.jsonl, the family tree of each beam search:

    {"dataset", "width", "request_id", "prompt_tokens", "parents": "00 00 10 …"}

parents: a word for each step, beginning with the step that ends the prompt. A word has a digit (of
base 36) for each live beam, best first: the place of its parent among the beams before the step.
Before the first step there is one beam.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import serve
from experiments.figures.vllm.genealogies import (
    Sharing,
    genealogies,
    samples_sharing,
    sharing,
    word,
)
from experiments.figures.vllm.sharing_report import (
    METHODS,
    Row,
    explanation,
    paper_text,
    plot,
    summary,
    table,
)
from experiments.lib import run_record
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import (
    define_engine_flags,
    define_executor_flag,
    define_float,
    fields_of,
    loading,
)
from experiments.lib.program import Options, Program, refusals
from experiments.tasks import stories
from experiments.workloads import synthetic_lengths
from experiments.workloads.workloads import PAPER_CONTEXT, Request, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.checks import help_of
from paged.config import EngineConfig
from paged.engine import Engine
from paged.metrics import StepRecord
from paged.requests.sampling_params import SamplingParams

MAX_CHARACTERS = 16  # More than any token of the stories has.


def story_tokens(tokenizer, length: int, seed: int) -> list[int]:
    """The first `length` tokens of made-up stories."""
    tokens = tokenizer.encode(stories.text(MAX_CHARACTERS * length, seed))[:length]
    assert len(tokens) == length, "a token has more characters than MAX_CHARACTERS"
    return tokens


def make_requests(
    dataset: str, num_requests: int, sigma: float, limit: int, scale: float, seed: int, tokenizer
) -> tuple[list[Request], dict[str, Any]]:
    """Requests with stories as prompts, and notes on their lengths.

    Lengths are the dataset's times `scale`, at most `limit` tokens of prompt and output together.
    Raises ValueError for a limit below 2 / scale + 2.
    """
    longest = min(PAPER_CONTEXT, int((limit - 2) / scale))  # Both lengths may be rounded up.
    if longest < 2:
        raise ValueError(
            f"--kv_cache_tokens and --max_model_len leave {limit} tokens for each sequence of a "
            f"request: too few for a prompt and an output"
        )
    lengths, notes = synthetic_lengths.draw(num_requests, dataset, sigma, longest, seed)
    requests = []
    for i, pair in enumerate(lengths):
        prompt, output = (max(1, round(scale * length)) for length in pair)
        tokens = story_tokens(tokenizer, prompt, seed + i)
        requests.append(Request(0.0, tokens, output, ignore_eos=True))
    return requests, notes | {"length_scale": scale}


def how_to_sample(method: str, sequences: int) -> SamplingParams:
    """The sampling of a case. Raises ValueError for more sequences than a request may have."""
    if method == "beam":
        return SamplingParams(beam_width=sequences, n=sequences)
    return SamplingParams(n=sequences, temperature=1.0)


def savings(steps: Iterable[StepRecord], capacity: int) -> tuple[float, float]:
    """The mean saving over the steps that hold anything, and the saving of all blocks together.

    capacity: in tokens. A block counts with all tokens that it has room for, as `Usage` does.
    """
    pairs = [(step.kv_shared, capacity - step.kv_free) for step in steps]
    shared, used = np.array([pair for pair in pairs if pair[1]], np.float64).T
    return float((shared / (shared + used)).mean()), float(shared.sum() / (shared + used).sum())


def run_case(
    engine: Engine, dataset: str, method: str, sequences: int, requests: Sequence[Request],
    seed: int, progress: bool = True,
) -> tuple[Row, list[dict[str, Any]]]:  # fmt: skip
    """Serve the requests. Returns the savings, and the genealogies of beam searches."""
    engine.metrics.clear()
    config = engine.config
    serve.run(engine, requests, how_to_sample(method, sequences), seed, progress)
    trees = [
        {"dataset": dataset, "width": sequences, **tree} for tree in genealogies(engine.events)
    ]
    if method == "beam":
        shared = [sharing(tree["prompt_tokens"], tree["parents"]) for tree in trees]
    else:
        shared = [samples_sharing(len(r.prompt), r.max_tokens, sequences) for r in requests]
    length, logical, distinct, prompt, unshared = (
        np.concatenate([getattr(s, field.name) for s in shared]) for field in fields(Sharing)
    )
    mean, pooled = savings(engine.metrics.steps, (config.num_blocks - 1) * config.page_size)
    prompts = np.array([len(request.prompt) for request in requests])
    row = Row(
        dataset=dataset,
        method=method,
        sequences=sequences,
        saving=mean,
        pooled_saving=pooled,
        one_token_saving=float(1 - distinct.sum() / logical.sum()),
        prompt_share=float(prompt.sum() / logical.sum()),
        short_prompts=float((prompts < config.page_size).mean()),
        mean_prompt_tokens=float(prompts.mean()),
        mean_output_tokens=float(np.mean([request.max_tokens for request in requests])),
        unshared_tokens=float(unshared.mean()),
        length_tokens=float(length.mean()),
        steps=len(engine.metrics.steps),
        preemptions=sum(step.preemptions for step in engine.metrics.steps),
    )
    return row, trees


def checked_sizes(texts: Sequence[str], config: EngineConfig) -> list[int]:
    """The numbers of sequences. ValueError for what is none, or more than can run."""
    if not texts or not all(text.isdigit() and int(text) > 1 for text in texts):
        raise ValueError(f"--sequences must be numbers above 1, not {','.join(texts)!r}")
    sizes = sorted(set(map(int, texts)))
    if sizes[-1] > config.max_num_seqs:
        raise ValueError(f"--sequences ({sizes[-1]}) exceed --max_num_seqs ({config.max_num_seqs})")
    for method in METHODS:
        how_to_sample(method, sizes[-1])
    return sizes


def main(options: Options) -> None:
    output_dir = Path(options.output_dir)
    with refusals():
        model = checkpoint.load_config(options.model)
        config = engine_config(model, **fields_of(EngineConfig, options))
        sizes = checked_sizes(options.sequences, config)
        tokenizer = load_tokenizer(options.model)
        room = config.kv_cache_tokens // sizes[-1] // config.page_size * config.page_size
        counts = {"alpaca": options.num_requests, "sharegpt": options.num_sharegpt_requests}
        made = {
            dataset: make_requests(
                dataset, count, options.length_sigma, min(config.max_model_len, room),
                options.length_scale, options.seed, tokenizer,
            )
            for dataset, count in counts.items()
        }  # fmt: skip
        engine = load_engine(config, tokenizer, **loading(options))
    engine.warm_up()
    rows: list[Row] = []
    trees: list[dict[str, Any]] = []
    for dataset, (requests, _) in made.items():
        for method in METHODS:
            for size in sizes:
                row, of_case = run_case(engine, dataset, method, size, requests, options.seed)
                rows.append(row)
                trees += of_case
    environment = run_record.describe_environment()
    facts = {
        "experiment": "sharing_savings",
        "flags": vars(options),
        "lengths": {dataset: notes for dataset, (_, notes) in made.items()},
        "rows": [asdict(row) | {"paper": paper_text(row)} for row in rows],
        "explanation": explanation(rows, config.page_size),
    }
    run_record.write_csv(output_dir, "savings.csv", rows)
    lines = (tree | {"parents": " ".join(map(word, tree["parents"]))} for tree in trees)
    run_record.write_json_lines(output_dir, "genealogies.jsonl", lines)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(rows))
    footer = (
        f"{options.model}, {options.executor}; {' and '.join(map(str, counts.values()))} requests "
        f"with lengths × {options.length_scale:g}, blocks of {config.page_size} tokens"
    )
    plot(rows, output_dir / "savings.png", footer)
    print(f"{table(rows, config.page_size)}\n({footer})")


def define_flags() -> None:
    flags.DEFINE_list("sequences", ["2", "4", "6"], "samples of a prompt, and beam widths")
    flags.DEFINE_integer("num_requests", 48, "of a case with Alpaca's lengths", lower_bound=1)
    flags.DEFINE_integer("num_sharegpt_requests", 16, "with ShareGPT's, longer", lower_bound=1)
    define_float("length_scale", 1.0, "multiplies all lengths", lower_bound=0.01)
    define_float("length_sigma", 1.0, help_of(WorkloadConfig)["length_sigma"], 0.0, 3.0)
    define_executor_flag()
    define_engine_flags()


PROGRAM = Program(
    main,
    define_flags,
    "results/sharing_savings",
    ("savings.csv", "genealogies.jsonl", "savings.png"),
)

if __name__ == "__main__":
    PROGRAM.run()
