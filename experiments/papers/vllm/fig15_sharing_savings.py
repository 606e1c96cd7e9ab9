"""KV memory that parallel sampling and beam search save by sharing blocks (vLLM §6.3, Fig. 15).

    python -m experiments.papers.vllm.fig15_sharing_savings

The program serves requests with the lengths of Alpaca and ShareGPT, by parallel sampling and by
beam search of several sizes. The lengths are synthetic, with the published means; the texts are
made-up stories. As in the paper, the saving of a step is the number of blocks saved by sharing over
the number of blocks without sharing. The saving of a case is the mean over its steps. Further
columns of the rows explain the savings: the saving of blocks of one token, the share of prompts in
the KV memory without sharing, and the length of the end that not all sequences of a request share.

--length_scale below 1 shortens all lengths for a quick run. --page_size needs the same factor,
because otherwise too few prompts fill a block. The program also writes genealogies.jsonl, with a
line for each beam search:

    {"dataset", "width", "request_id", "prompt_tokens", "parents": "00 00 10 …"}

"parents" has a word for each step, beginning with the step that ends the prompt. A word has a digit
(of base 36) for each live beam, in descending order of scores: the index of the beam's parent among
the beams before the step. Before the first step there is one beam.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import run_record
from experiments.lib.engines import EXECUTORS, engine_config, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.papers.vllm.genealogies import Sharing, genealogies, sharing, word
from experiments.study import Run, Setting, Study, Values
from experiments.tasks import stories
from experiments.workloads import synthetic_lengths
from experiments.workloads.workloads import PAPER_CONTEXT, Request, WorkloadConfig
from models import checkpoint, load_tokenizer
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
TITLES = {"parallel": "parallel sampling", "beam": "beam search"}
LABELS = {"parallel": "output sequences", "beam": "beam width"}
GENEALOGIES = "genealogies.jsonl"
ENGINE = help_of(EngineConfig)
MAX_CHARACTERS = 16  # no token of the stories has more characters


@dataclass(frozen=True)
class SharingFlags(ModelFlags):
    sequences: tuple[int, ...] = flag((2, 4, 6), "samples of a prompt, and beam widths", least=2)
    num_requests: int = flag(48, "of a case with Alpaca's lengths", least=1)
    num_sharegpt_requests: int = flag(16, "with ShareGPT's, longer", least=1)
    length_scale: float = flag(1.0, "multiplies all lengths", least=0.01)
    length_sigma: float = flag(1.0, help_of(WorkloadConfig)["length_sigma"], least=0, most=3)
    page_size: int = flag(EngineConfig.page_size, ENGINE["page_size"], least=1)
    kv_cache_tokens: int = flag(EngineConfig.kv_cache_tokens, ENGINE["kv_cache_tokens"], least=1)
    max_num_seqs: int = flag(EngineConfig.max_num_seqs, ENGINE["max_num_seqs"], least=1)
    executor: str = flag("device", "what runs the steps", choices=EXECUTORS)
    seed: int = flag(0, "of the workload and of sampling", least=0)

    def __post_init__(self):
        super().__post_init__()
        if max(self.sequences) > self.max_num_seqs:
            raise ValueError(
                f"--sequences ({max(self.sequences)}) exceed --max_num_seqs ({self.max_num_seqs})"
            )
        for method in METHODS:
            how_to_sample(method, max(self.sequences))


@dataclass(frozen=True)
class Row:
    """One case: a dataset, a method and a number of sequences.

    saving: mean saving over the steps, a fraction.
    pooled: the saving in the blocks of all steps, summed before the division.
    one_token: `pooled` if blocks held one token. Compare it with `pooled`, not with `saving`.
    prompt_share: share of prompts in the tokens without sharing.
    length_tokens: tokens of a sequence, mean over the steps of all requests.
    unshared_tokens: those after the last token that all sequences share.
    """

    dataset: str
    method: str
    sequences: int
    saving: float
    pooled: float
    one_token: float
    prompt_share: float
    length_tokens: float
    unshared_tokens: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    steps: int
    preemptions: int


def story_tokens(tokenizer, length: int, seed: int) -> list[int]:
    """The first `length` tokens of made-up stories."""
    tokens = tokenizer.encode(stories.text(MAX_CHARACTERS * length, seed))[:length]
    assert len(tokens) == length, "a token has more characters than MAX_CHARACTERS"
    return tokens


def make_requests(
    dataset: str, num_requests: int, sigma: float, limit: int, scale: float, seed: int, tokenizer
) -> list[Request]:
    """Requests with stories as prompts. Lengths are the dataset's times `scale`; prompt and output
    have at most `limit` tokens together. Raises ValueError for a limit below 2 * scale + 2."""
    longest = min(PAPER_CONTEXT, int((limit - 2) / scale))  # both lengths may be rounded up
    if longest < 2:
        raise ValueError(
            f"--kv_cache_tokens and --max_model_len leave {limit} tokens for each sequence of a "
            f"request: too few for a prompt and an output"
        )
    lengths, _ = synthetic_lengths.draw(num_requests, dataset, sigma, longest, seed)
    requests = []
    for i, pair in enumerate(lengths):
        prompt, output = (max(1, round(scale * length)) for length in pair)
        tokens = story_tokens(tokenizer, prompt, seed + i)
        requests.append(Request(0.0, tokens, output, ignore_eos=True))
    return requests


def how_to_sample(method: str, sequences: int) -> SamplingParams:
    """The sampling of a case. Raises ValueError for more sequences than a request may have."""
    if method == "beam":
        return SamplingParams(beam_width=sequences, n=sequences)
    return SamplingParams(n=sequences, temperature=1.0)


def savings(steps: Iterable[StepRecord], capacity: int) -> tuple[float, float]:
    """Mean saving over the steps with blocks in use, and the saving of all their blocks together.

    capacity: slots of the KV cache, in tokens. All slots of a used block are in use, as in `Usage`.
    """
    pairs = [(step.kv_shared, capacity - step.kv_free) for step in steps]
    shared, used = np.array([pair for pair in pairs if pair[1]], np.float64).T
    whole = shared + used
    return float((shared / whole).mean()), float(shared.sum() / whole.sum())


def run_case(
    engine: Engine, dataset: str, method: str, sequences: int, requests: Sequence[Request],
    seed: int,
) -> tuple[Row, list[dict[str, Any]]]:  # fmt: skip
    """Serve the requests. Returns the case's row, and the genealogies of its beam searches."""
    engine.metrics.clear()
    config = engine.config
    serve.run(engine, requests, how_to_sample(method, sequences), seed, progress=False)
    trees = [
        {"dataset": dataset, "width": sequences, **tree} for tree in genealogies(engine.events)
    ]
    if method == "beam":
        each = [sharing(tree["prompt_tokens"], tree["parents"]) for tree in trees]
    else:
        kept = list(range(sequences))
        each = [sharing(len(r.prompt), [kept] * (r.max_tokens - 1), sequences) for r in requests]
    of_all = {f.name: np.concatenate([getattr(s, f.name) for s in each]) for f in fields(Sharing)}
    mean, pooled = savings(engine.metrics.steps, (config.num_blocks - 1) * config.page_size)
    row = Row(
        dataset=dataset,
        method=method,
        sequences=sequences,
        saving=mean,
        pooled=pooled,
        one_token=float(1 - of_all["distinct"].sum() / of_all["logical"].sum()),
        prompt_share=float(of_all["prompt"].sum() / of_all["logical"].sum()),
        length_tokens=float(of_all["length"].mean()),
        unshared_tokens=float(of_all["unshared"].mean()),
        mean_prompt_tokens=float(np.mean([len(request.prompt) for request in requests])),
        mean_output_tokens=float(np.mean([request.max_tokens for request in requests])),
        steps=len(engine.metrics.steps),
        preemptions=sum(step.preemptions for step in engine.metrics.steps),
    )
    return row, trees


def config_of(flags: SharingFlags) -> EngineConfig:
    return engine_config(
        checkpoint.load_config(flags.model), page_size=flags.page_size, seed=flags.seed,
        kv_cache_tokens=flags.kv_cache_tokens, max_num_seqs=flags.max_num_seqs,
    )  # fmt: skip


def requests_of(flags: SharingFlags) -> dict[str, list[Request]]:
    """Requests by dataset. Raises ValueError if the KV memory is too small for a request's
    sequences."""
    config, tokenizer = config_of(flags), load_tokenizer(flags.model)
    room = config.kv_cache_tokens // max(flags.sequences) // config.page_size * config.page_size
    counts = {"alpaca": flags.num_requests, "sharegpt": flags.num_sharegpt_requests}
    return {
        dataset: make_requests(
            dataset, count, flags.length_sigma, min(config.max_model_len, room),
            flags.length_scale, flags.seed, tokenizer,
        )
        for dataset, count in counts.items()
    }  # fmt: skip


def check(flags: SharingFlags) -> None:
    requests_of(flags)


def measure(flags: SharingFlags, run: Run) -> Iterator[Row]:
    engine = load_engine(config_of(flags), **loading(flags))
    engine.warm_up()
    trees: list[dict[str, Any]] = []
    sizes = sorted(set(flags.sequences))
    for (dataset, asked), method, size in product(requests_of(flags).items(), METHODS, sizes):
        row, of_case = run_case(engine, dataset, method, size, asked, flags.seed)
        trees += of_case
        yield row
    lines = (tree | {"parents": " ".join(map(word, tree["parents"]))} for tree in trees)
    run_record.write_json_lines(run.folder, GENEALOGIES, lines)


def values(_: SharingFlags, rows: Sequence[Row]) -> Values:
    """METHODn_saving: saving of n sequences with Alpaca's lengths.
    METHODn_saving_sharegpt: saving of n sequences with ShareGPT's lengths.
    """
    numbers = {}
    for row in rows:
        suffix = "" if row.dataset == "alpaca" else f"_{row.dataset}"
        numbers[f"{row.method}{row.sequences}_saving{suffix}"] = row.saving
    return numbers


def _draw_case(axes: Axes, rows: Sequence[Row]) -> None:
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
    axes.margins(y=0.2)
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)


def draw(_: SharingFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, key in zip(figure.subplots(2, 2).flat, product(DATASETS, METHODS)):
        _draw_case(axes, [row for row in rows if (row.dataset, row.method) == key])


STUDY = Study(
    __file__,
    title="KV blocks saved by sharing (vLLM §6.3, Fig. 15)",
    kind="analogue",
    claim="savings grow with the number of sequences, and beams share far more than samples",
    rule="savings grow with the sequences, and beam search saves at least three times as much",
    holds=lambda v: (
        v["parallel2_saving"] < v["parallel4_saving"] < v["parallel6_saving"]
        and v["beam2_saving"] < v["beam4_saving"] < v["beam6_saving"]
        and all(v[f"beam{n}_saving"] >= 3 * v[f"parallel{n}_saving"] for n in (2, 4, 6))
    ),
    setting=Setting(
        "the bundled model, stories with the datasets' mean lengths, 48 and 16 requests",
        "the paper has OPT-13B and the datasets' own texts; lengths are log-normal with sigma 1",
        "reduced",
    ),
    flags=SharingFlags,
    measure=measure,
    values=values,
    paper={
        f"{method}{size}_saving": saving
        for (_, method), of_size in PAPER.items()
        for size, saving in of_size.items()
    }
    | {
        f"{method}{size}_saving_{dataset}": span
        for (dataset, method), span in PAPER_RANGE.items()
        for size in (2, 4, 6)
    },
    check=check,
    draw=draw,
    quick={"num_requests": 8, "num_sharegpt_requests": 2, "executor": "simulated"},
    minutes=(0.5, 20),
    size=(8, 6.5),
)

if __name__ == "__main__":
    STUDY.run()
