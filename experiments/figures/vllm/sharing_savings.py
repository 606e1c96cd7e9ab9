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

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import serve
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
from models import checkpoint
from paged.checks import help_of
from paged.config import EngineConfig
from paged.engine import Engine
from paged.metrics import StepRecord
from paged.requests.sampling_params import SamplingParams

DATASETS, METHODS = ("alpaca", "sharegpt"), ("parallel", "beam")
# Fig. 15: the savings with 2, 4 and 6 sequences. For ShareGPT the paper's text gives only ranges.
PAPER = {
    ("alpaca", "parallel"): {2: 0.0609, 4: 0.0853, 6: 0.0979},
    ("alpaca", "beam"): {2: 0.3756, 4: 0.5313, 6: 0.5516},
}
PAPER_RANGE = {("sharegpt", "parallel"): (0.162, 0.305), ("sharegpt", "beam"): (0.443, 0.663)}
PAPER_PROMPT_SHARE = 0.12  # §1: of the KV memory in the experiment with parallel sampling.
TITLES = {"parallel": "parallel sampling", "beam": "beam search"}
LABELS = {"parallel": "output sequences", "beam": "beam width"}
DIGITS = string.digits + string.ascii_lowercase
MAX_CHARACTERS = 16  # More than any token of the stories has.


@dataclass(frozen=True)
class Row:
    """One case: a dataset, a method and a number of sequences.

    saving: the mean saving over the steps, a fraction.
    pooled_saving: the saving of the blocks of all steps together, in which full steps count more.
    one_token_saving: the pooled saving if blocks held one token each.
    prompt_share: the fraction of prompts among the tokens that would be held without sharing.
    short_prompts: the fraction of prompts that fill no block.
    unshared_tokens: tokens of a sequence since the request's sequences parted, mean over steps.
    length_tokens: tokens of a sequence with its prompt, mean over steps.
    """

    dataset: str
    method: str
    sequences: int
    saving: float
    pooled_saving: float
    one_token_saving: float
    prompt_share: float
    short_prompts: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    unshared_tokens: float
    length_tokens: float
    steps: int
    preemptions: int


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

    capacity: token slots. A block counts with all its token slots, as `Usage` does.
    """
    pairs = [(step.kv_shared, capacity - step.kv_free) for step in steps]
    shared, used = np.array([pair for pair in pairs if pair[1]], np.float64).T
    return float((shared / (shared + used)).mean()), float(shared.sum() / (shared + used).sum())


def genealogies(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """request_id, prompt_tokens and parents (see above) of each beam search in a log."""
    prompts: dict[str, int] = {}
    parents: dict[str, list[list[int]]] = {}
    for event in events:
        if event["event"] == "arrival":
            prompts[event["request_id"]] = event["prompt_tokens"]
        elif event["event"] == "beams":
            of_request = parents.setdefault(event["request_id"], [])
            if event["parents"]:  # Without parents, the search is over.
                of_request.append([event["before"].index(slot) for slot in event["parents"]])
    return [
        {"request_id": name, "prompt_tokens": prompts[name], "parents": steps}
        for name, steps in parents.items()
    ]


def word(parents: Sequence[int]) -> str:
    """The parents of a step in the notation of genealogies.jsonl."""
    return "".join(DIGITS[parent] for parent in parents)


@dataclass(frozen=True)
class Sharing:
    """The tokens that a request holds in each of its steps.

    length: of one sequence.
    logical: of all sequences, without sharing.
    distinct: of all sequences, with sharing in blocks of one token.
    prompt: those of `logical` that belong to prompts.
    unshared: of one sequence, since all sequences parted.
    """

    length: np.ndarray
    logical: np.ndarray
    distinct: np.ndarray
    prompt: np.ndarray
    unshared: np.ndarray


def sharing(prompt_tokens: int, parents: Sequence[Sequence[int]]) -> Sharing:
    """The most that sequences of this genealogy can share."""
    paths = np.zeros((1, 0), np.int64)  # Names of each sequence's output tokens, equal if shared.
    rows = [(*[prompt_tokens] * 4, 0)]
    names = 0
    for of_step in parents:
        count = len(of_step)
        paths = np.column_stack([paths[list(of_step)], np.arange(names, names + count)])
        names += count
        common = int((paths == paths[0]).all(axis=0).sum())
        length = prompt_tokens + paths.shape[1]
        distinct = prompt_tokens + len(np.unique(paths))
        unshared = paths.shape[1] - common
        rows.append((length, count * length, distinct, count * prompt_tokens, unshared))
    return Sharing(*np.array(rows, np.int64).T)


def samples_sharing(prompt_tokens: int, output_tokens: int, sequences: int) -> Sharing:
    """The most that sequences can share which have only their prompt in common."""
    prompt, output = np.full(output_tokens, prompt_tokens), np.arange(output_tokens)
    return Sharing(
        length=prompt + output,
        logical=sequences * (prompt + output),
        distinct=prompt + sequences * output,
        prompt=sequences * prompt,
        unshared=output,
    )


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


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers by name. Those of ShareGPT have a suffix."""
    numbers = {}
    for row in rows:
        suffix = "" if row.dataset == "alpaca" else f"_{row.dataset}"
        numbers[f"{row.method}{row.sequences}_saving{suffix}"] = row.saving
    return numbers


def paper_text(row: Row) -> str:
    """What the paper measured, in per cent."""
    of_size = PAPER.get((row.dataset, row.method), {})
    if row.sequences in of_size:
        return f"{of_size[row.sequences]:.2%}"
    if span := PAPER_RANGE.get((row.dataset, row.method)):
        return f"{span[0]:.1%} – {span[1]:.1%}"
    return "–"


def table(rows: Sequence[Row], page_size: int) -> str:
    """A line for each case, with the paper's number, and explanations of the differences."""
    lines = [
        f"{'memory saved by sharing':24}{'ours':>8}{'paper':>16}{'pooled':>15}"
        f"{'1-token blocks':>16}{'prompt tokens':>15}{'since parted':>16}"
    ]
    for row in rows:
        lines.append(
            f"{row.dataset:10}{row.method:10}{row.sequences:4}{row.saving:8.1%}"
            f"{paper_text(row):>16}{row.pooled_saving:15.1%}{row.one_token_saving:16.1%}"
            f"{row.prompt_share:15.1%}{row.unshared_tokens:8.0f} of {row.length_tokens:4.0f}"
        )
    return "\n".join([*lines, *explanation(rows, page_size)])


def explanation(rows: Sequence[Row], page_size: int) -> list[str]:
    """Lines that explain the savings."""
    lines = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        published = synthetic_lengths.PUBLISHED_MEANS[dataset]
        of_dataset = [row for row in rows if row.dataset == dataset]
        prompt, output = of_dataset[0].mean_prompt_tokens, of_dataset[0].mean_output_tokens
        lines.append(
            f"{dataset}: {prompt:.1f} prompt tokens on average (paper: {published[0]:.1f}) and "
            f"{output:.1f} output tokens ({published[1]:.1f}); {of_dataset[0].short_prompts:.0%} "
            f"of the prompts fill no block of {page_size}"
        )
        widest = max(row.sequences for row in of_dataset)
        for row in (row for row in of_dataset if row.sequences == widest):
            lost = 100 * (row.one_token_saving - row.pooled_saving)
            lines.append(f"  {row.sequences} {why(row)}; in blocks, {lost:.1f} points less")
    return lines


def why(row: Row) -> str:
    """Why a case cannot save more."""
    if row.method == "beam":
        return (
            f"beams of {row.length_tokens:.0f} tokens share all but their last "
            f"{row.unshared_tokens:.0f} on average"
        )
    paper = f" (paper: {PAPER_PROMPT_SHARE:.0%})" if row.dataset == "alpaca" else ""
    return (
        f"samples share their prompts, {row.prompt_share:.1%} of the cache without sharing{paper}, "
        f"but for one copy in {row.sequences}"
    )


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of one dataset and method beside the paper's (Fig. 15), in per cent."""
    dataset, method = rows[0].dataset, rows[0].method
    of_size = PAPER.get((dataset, method), {})
    places, aside = np.arange(len(rows)), 0.2 if of_size else 0.0
    heights = [100 * row.saving for row in rows]
    bars = axes.bar(places - aside, heights, 0.38, color="#2f6b9a", label="ours")
    axes.bar_label(bars, fmt="%.1f", fontsize="small")
    if known := [i for i, row in enumerate(rows) if row.sequences in of_size]:
        heights = [100 * of_size[rows[i].sequences] for i in known]
        at = np.array(known) + aside
        bars = axes.bar(at, heights, 0.38, color="#c9d6e2", label="paper (OPT-13B)")
        axes.bar_label(bars, fmt="%.1f", fontsize="small")
    if span := PAPER_RANGE.get((dataset, method)):
        low, high = (100 * value for value in span)
        axes.axhspan(low, high, color="#c9d6e2", alpha=0.6, zorder=0, label="paper's range")
    axes.set_xticks(places, [str(row.sequences) for row in rows])
    axes.set_title(f"{dataset}, {TITLES[method]}", loc="left", fontsize="medium")
    axes.set(xlabel=LABELS[method], ylabel="memory saving (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.2)
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)


def plot(rows: Sequence[Row], path: Path, footer: str) -> None:
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    for axes, key in zip(figure.subplots(2, 2).flat, [(d, m) for d in DATASETS for m in METHODS]):
        draw(axes, [row for row in rows if (row.dataset, row.method) == key])
    figure.suptitle("KV blocks saved by sharing (vLLM Fig. 15)")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=110)


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
        tokenizer = checkpoint.load_tokenizer(options.model)
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
