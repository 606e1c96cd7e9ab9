"""Record how many tokens KV heads keep as sequences grow under DiffKV, for simulated devices.

    python -m experiments.papers.diffkv.record_compression \\
        --model=bundled --file=models/bundled/diffkv_compression.json

At each of the paper's pairs of thresholds (Fig. 10), stories of --lengths tokens are prefilled, and
their first tokens are continued by sampling. The tokens that each KV head keeps in high and in low
precision are counted in the device's cache. Means over --sequences are written to --file, which
`paged.kv_cache.diffkv.recording` reads. The generated tokens are then prefilled as a prompt. If
heads keep another share of the same tokens, the text is not the reason: generation has a rule of
its own (Algorithm 1), and its queries see compressed tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.papers.vllm.fig15_sharing_savings import story_tokens
from experiments.study import Run, Setting, Study, Values
from models import checkpoint, load_tokenizer
from paged.device.executor import DeviceExecutor
from paged.engine import Engine
from paged.kv_cache.diffkv.options import Options
from paged.kv_cache.diffkv.recording import Recording
from paged.requests.sampling_params import SamplingParams

# alpha_h and alpha_l of Llama3-8B, Qwen2.5-7B, Llama3-70B, and Qwen2.5-32B and QwQ-32B.
ALPHAS = ((1.0, 0.02), (0.04, 0.04), (1.0, 0.0), (3.0, 0.0))
PROMPT, GENERATED, REREAD = "prompt", "generated", "reread"
OPTIONS = {name: getattr(Options(), name) for name in ("window", "prompt_rule", "generation_rule")}
FIRST = 16  # prompt tokens of a generated sequence


@dataclass(frozen=True)
class RecordFlags(ModelFlags):
    lengths: tuple[int, ...] = flag((128, 256, 512, 1024, 2048, 4096), "tokens", least=65)
    sequences: int = flag(8, "whose means are recorded", least=1)
    file: str = flag("", "that is written; empty: compression.json of the study's folder")
    seed: int = flag(0, "of stories and of sampling", least=0)

    @property
    def ascending(self) -> list[int]:
        return sorted(set(self.lengths))


@dataclass(frozen=True)
class Row:
    """A head at one length.

    phase: PROMPT for prefilled tokens, GENERATED for generated ones, REREAD for tokens that were
        generated and then prefilled.
    tokens: tokens of the sequence.
    high, low: tokens that the head keeps in each precision, means over sequences.
    """

    alpha_h: float
    alpha_l: float
    phase: str
    tokens: int
    layer: int
    head: int
    high: float
    low: float


def engine_of(flags: RecordFlags, alpha: tuple[float, float]) -> Engine:
    model, longest = checkpoint.load_config(flags.model), flags.ascending[-1] + 4
    config = engine_config(
        model, policy="diffkv", policy_options=dict(zip(("alpha_h", "alpha_l"), alpha)),
        max_model_len=longest, max_num_batched_tokens=longest, chunked_prefill=False,
        page_size=PAGE_SIZE, max_num_seqs=flags.sequences, max_prefills_per_step=1,
        kv_cache_tokens=2 * flags.sequences * longest, run_ahead=False,
    )  # fmt: skip
    return load_engine(config, **loading(flags))


def kept(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, lengths: Sequence[int], seed: int
) -> tuple[dict[int, np.ndarray], list[list[int]]]:
    """For each length: the tokens [L * K, 2] that heads keep in high and in low precision when a
    sequence reaches the length, mean over the sequences. Also all tokens of each sequence, in the
    order of their ends."""
    for i, prompt in enumerate(prompts):
        how = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=seed + i)
        engine.add_request(prompt, how)
    executor, scheduler = engine.executor, engine.scheduler
    assert isinstance(executor, DeviceExecutor)
    found: dict[int, list[np.ndarray]] = {length: [] for length in lengths}
    texts = []
    while engine.has_unfinished():
        texts += [output.prompt_tokens + output.tokens for output in engine.step()]
        slots = scheduler.running_slots()
        reached = scheduler.slots.computed[slots]
        if np.isin(reached, lengths).any():
            counts = np.asarray(executor._cache.counts)
            for slot, length in zip(slots.tolist(), reached.tolist()):
                if length in found:
                    found[length].append(counts[slot])
    assert all(len(each) == len(prompts) for each in found.values()), "a length was passed by"
    assert len(texts) == len(prompts), "a sequence has not ended, or ended twice"
    return {length: np.mean(each, axis=0) for length, each in found.items()}, texts


def measure(flags: RecordFlags, run: Run) -> Iterator[Row]:
    model, tokenizer = checkpoint.load_config(flags.model), load_tokenizer(flags.model)
    longest, K = flags.ascending[-1], model.num_kv_heads
    stories = [story_tokens(tokenizer, longest, flags.seed + i) for i in range(flags.sequences)]
    rows = []
    for alpha in ALPHAS:
        engine, found = engine_of(flags, alpha), {}
        for length in tqdm(flags.ascending, f"alpha {alpha}", leave=False):
            of_prompts = [story[:length] for story in stories]
            found[PROMPT, length] = kept(engine, of_prompts, 2, [length], flags.seed)[0][length]
        beginnings = [story[:FIRST] for story in stories]
        grown, texts = kept(engine, beginnings, longest + 2 - FIRST, flags.ascending, flags.seed)
        found |= {(GENERATED, length): counts for length, counts in grown.items()}
        again = [text[:longest] for text in texts]
        found[REREAD, longest] = kept(engine, again, 2, [longest], flags.seed)[0][longest]
        for (phase, length), counts in found.items():
            for head, (high, low) in enumerate(counts.tolist()):
                rows.append(Row(*alpha, phase, length, head // K, head % K, high, low))
                yield rows[-1]
    text = json.dumps(stored(flags, rows)).replace("]]], [[[", "]]],\n[[[")
    run_record.write_whole(Path(flags.file or run.folder / "compression.json"), text + "\n")


def stored(flags: RecordFlags, rows: Sequence[Row]) -> dict[str, Any]:
    """The file's content. Raises ValueError if rows are missing."""
    config = checkpoint.load_config(flags.model)
    shape = len(flags.ascending), config.num_layers, config.num_kv_heads, 2
    recorded = []
    for alpha in ALPHAS:
        curves = {
            phase: np.array([
                [round(row.high, 3), round(row.low, 3)]
                for row in rows if (row.alpha_h, row.alpha_l, row.phase) == (*alpha, phase)
            ]).reshape(shape).tolist()
            for phase in (PROMPT, GENERATED)
        }  # fmt: skip
        options = Options(alpha_h=alpha[0], alpha_l=alpha[1])
        Recording.of(flags.ascending, curves[PROMPT], curves[GENERATED], options)
        recorded.append({"alpha_h": alpha[0], "alpha_l": alpha[1]} | curves)
    return {
        "model": flags.model, "weights_sha256": checkpoint.weights_hash(flags.model),
        "sequences": flags.sequences, "options": OPTIONS, "lengths": flags.ascending,
        "recorded": recorded,
    }  # fmt: skip


def values(flags: RecordFlags, rows: Sequence[Row]) -> Values:
    """PHASE_memory_ALPHA_H_ALPHA_L: bytes of kept tokens at the greatest length over 16-bit bytes.
    PHASE_pruned_ALPHA_H_ALPHA_L: share of dropped tokens."""
    longest = flags.ascending[-1]
    head_dim = checkpoint.load_config(flags.model).head_dim
    formats = Options().formats(PAGE_SIZE, head_dim, "float16")
    sizes = [format.token_bytes for format in formats]
    numbers: dict[str, float | None] = {}
    for alpha_h, alpha_l in ALPHAS:
        for phase in (PROMPT, GENERATED, REREAD):
            mine = [
                (row.high, row.low) for row in rows
                if (row.alpha_h, row.alpha_l, row.phase, row.tokens)
                == (alpha_h, alpha_l, phase, longest)
            ]  # fmt: skip
            shares = np.mean(mine, axis=0) / longest
            name = f"{phase}_{{}}_{alpha_h:g}_{alpha_l:g}"
            numbers[name.format("memory")] = float(shares @ sizes / (4 * head_dim))
            numbers[name.format("pruned")] = float(1 - shares.sum())
    return numbers


def draw(_: RecordFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, alpha in zip(figure.subplots(1, len(ALPHAS), sharey=True), ALPHAS):
        of_alpha = [r for r in rows if (r.alpha_h, r.alpha_l) == alpha and r.phase == GENERATED]
        for layer, head in dict.fromkeys((row.layer, row.head) for row in of_alpha):
            mine = [row for row in of_alpha if (row.layer, row.head) == (layer, head)]
            tokens = [row.tokens for row in mine]
            axes.plot(tokens, [r.high / r.tokens for r in mine], color="#4477aa", lw=0.8)
            kept = [(r.high + r.low) / r.tokens for r in mine]
            axes.plot(tokens, kept, color="#ee6677", lw=0.8)
        axes.set(title="alpha {:g}, {:g}".format(*alpha), xscale="log", xlabel="tokens")
    figure.axes[0].set(ylabel="share in high precision (blue), and kept (red)", ylim=(0, 1.02))


STUDY = Study(
    __file__,
    title="What KV heads keep as sequences grow (DiffKV §3.3, §4)",
    kind="analogue",
    claim="heads and sequences keep different shares: near-lossless thresholds need 19.3 to 36.7 % "
    "of the memory of 16 bits",
    rule="at alpha_h 1 and 3 tokens take at most 0.367 of 16 bits after prompts and in generation",
    holds=lambda v: all(
        v[f"{phase}_memory_{alpha}"] <= 0.367
        for phase in (PROMPT, GENERATED)
        for alpha in ("1_0.02", "1_0", "3_0")
    ),
    setting=Setting(
        "the bundled model (16 KV heads of 64), stories of 128 to 4,096 tokens",
        "the paper's models have 256 to 512 KV heads of 128, and answer questions",
        "reduced",
    ),
    flags=RecordFlags,
    measure=measure,
    values=values,
    draw=draw,
    quick={"lengths": (128, 256), "sequences": 2},
    minutes=(1, 12),
    size=(12, 4),
)

if __name__ == "__main__":
    STUDY.run()
