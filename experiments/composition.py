"""The composition matrix: every preset of a policy with every feature of the engine.

    python -m experiments.composition
    python -m experiments.composition --presets=lserve,diffkv --features=swapping,adapters

A cell serves requests on a small random model with few pages, so that the policy takes effect.

- works: every request has the same tokens as when served alone, under the same policy without the
  feature. Tokens of sampling and beam search also have the same log-probabilities as when forced.
- refused: the engine or a request raises ValueError. The cell keeps its message.
- idle: the feature never takes effect, e.g. recomputing where nothing is ever preempted.
- wrong: a check of tokens, log-probabilities, prefix hits or page owners fails.

A feature that changes numerics, such as 16-bit keys, is compared with requests served alone with
that feature. Near ties of logits, within rounding error, are not differences.

XLA's compilations take nearly all of the time. So each step is padded to one of two shapes, and XLA
does not optimise. The program has two devices, for tensor parallelism. It writes matrix.md beside
rows.csv.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.diff_events import first_difference
from experiments.lib import random_adapters, run_record
from experiments.lib.event_log import read_log, write_log
from experiments.lib.near_ties import NEAR_TIE, num_common
from experiments.lib.presets import CONFIG, PRESETS, TINY, Preset, padded
from experiments.lib.typed_flags import Flags, flag
from experiments.replay import replay, simulated_engine
from experiments.study import Run, Setting, Study, Values
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from paged.engine import Engine, EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput, TokenLogprob

WINDOWED = TINY.replace(model_type="mistral", qk_norm=False, sliding_window=24)
OPT = ModelConfig(
    "opt", 61, 32, 48, 2, 4, 4, 8, 256, 1e-5, tie_word_embeddings=True, activation="relu"
)
# A step has at most six sequences. KV memory holds three sequences of the longest length. All
# prompts are prefilled whole.
BATCHES = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "run_ahead": False}
CHUNKS: dict[str, Any] = {"chunked_prefill": True, "max_num_batched_tokens": 24}
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=1.0, seed=11)
SAME_LOGPROB = 2e-3
WORKS, REFUSED, IDLE, WRONG = "works", "refused", "idle", "wrong"
MARKS = {WORKS: "●", REFUSED: "–", IDLE: "○", WRONG: "✗"}


class Idle(Exception):
    """A cell's feature never took effect."""


class Wrong(Exception):
    """A check of a cell's outputs or pages fails."""


@functools.cache
def params_of(model: ModelConfig) -> dict[str, Any]:
    made = parameters.init(family(model).declare(model), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    return made | {name: made[name] * 50 for name in ("embed", "positions") if name in made}


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, TINY.vocab_size, length).tolist() for length in lengths]


PROMPTS = prompts(40, 33, 21)


class Bench:
    """A preset with a feature's changes of model and configuration."""

    def __init__(self, preset: Preset, model: ModelConfig = TINY, **changes: Any):
        self.preset, self.model = preset, model
        self.changes = BATCHES | changes
        self.changes["kv_cache_tokens"] = self.room(3)
        self._alone: dict[Any, RequestOutput] = {}

    def config(self, **changes: Any) -> EngineConfig:
        return self.preset.engine_config(self.model, **(self.changes | changes))

    def engine(self, **changes: Any) -> Engine:
        """A fresh engine. Raises ValueError for a configuration that the preset refuses."""
        return padded(Engine.from_model(params_of(self.model), self.model, self.config(**changes)))

    def room(self, sequences: int) -> int:
        """The smallest kv_cache_tokens that hold `sequences` of the longest sequences."""
        sharded = ShardedModel.split(self.model)
        for tokens in range(64, 800, 8):
            try:
                config = self.config(kv_cache_tokens=tokens)
                sizes = policy_of(config.policy).sizes(config, sharded)
                if sizes.fits(config.max_model_len, sequences):
                    return tokens
            except ValueError:
                pass
        return CONFIG["kv_cache_tokens"]  # the preset refuses every size

    def variant(self, model: ModelConfig | None = None, **changes: Any) -> "Bench":
        """A bench of the same preset with other numerics; its own `alone` is the reference."""
        return Bench(self.preset, model or self.model, **changes)

    def alone(
        self, how: SamplingParams, asked: Sequence[list[int]] = PROMPTS
    ) -> list[RequestOutput]:
        """The outputs of requests served one after the other, cached by prompt and `how`."""
        missing = [prompt for prompt in asked if (*prompt, how) not in self._alone]
        engine = self.engine() if missing else None
        for prompt in missing:
            assert engine
            (self._alone[*prompt, how],) = engine.generate([prompt], how)
        return [self._alone[*prompt, how] for prompt in asked]

    def company(self, how: SamplingParams = GREEDY, **changes: Any) -> Engine:
        """Check that requests served together have the same tokens as alone; returns the engine."""
        engine = self.engine(**changes)
        compare(engine.generate(PROMPTS, how), self.alone(how))
        return engine

    def as_forced(self, outputs: Sequence[RequestOutput]) -> None:
        """Check that sampled tokens have the same log-probabilities as when forced."""
        for output in outputs:
            for sequence in output.sequences:
                forced = self.forced(output.prompt_tokens, sequence.tokens)
                close(sequence.logprobs, forced.logprobs)

    def forced(self, prompt: list[int], tokens: list[int]) -> SequenceOutput:
        how = replace(GREEDY, forced_output=tuple(tokens), max_tokens=len(tokens))
        return self.engine().generate([prompt], how)[0].sequences[0]


def compare(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    """Raise Wrong unless all tokens are equal, up to the first near tie."""
    for a, b in _paired(ours, theirs, "requests"):
        for s, t in _paired(a.sequences, b.sequences, "sequences"):
            at = num_common(s.tokens, t.tokens)
            if at == min(len(s.tokens), len(t.tokens)):
                if len(s.tokens) != len(t.tokens):
                    raise Wrong(f"{len(s.tokens)} tokens, not {len(t.tokens)}")
            elif t.logprobs is None or lead(t.logprobs[at]) > NEAR_TIE:
                raise Wrong(f"token {at} is {s.tokens[at]}, not {t.tokens[at]}")


def _paired[T](ours: Sequence[T], theirs: Sequence[T], what: str) -> list[tuple[T, T]]:
    if len(ours) != len(theirs):
        raise Wrong(f"{len(ours)} {what}, not {len(theirs)}")
    return list(zip(ours, theirs))


def lead(entry: TokenLogprob) -> float:
    """The lead of the best token's log-probability over the second's."""
    best, second = sorted(entry.top.values(), reverse=True)[:2]
    return best - second


def close(ours: Sequence[TokenLogprob | None] | None, theirs: Any) -> None:
    """Raise Wrong unless all log-probabilities are equal, within SAME_LOGPROB."""
    both = _paired(ours or (), theirs, "log-probabilities")
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    if not pairs:
        raise Wrong("no log-probability")
    far = max(abs(a.logprob - b.logprob) for a, b in pairs)
    if far > SAME_LOGPROB:
        raise Wrong(f"a log-probability differs by {far:.3g}")


# The features. Each raises ValueError if it is refused, Idle if it never takes effect, and Wrong if
# outputs differ.


def chunked_prompts(bench: Bench) -> None:
    """Chunked prefill gives the same tokens as whole prefill."""
    engine = bench.variant(**CHUNKS).engine()
    if not engine.config.chunked_prefill:
        raise ValueError(f"policy {bench.preset.policy!r} needs whole prompts")
    compare(engine.generate(PROMPTS, GREEDY), bench.alone(GREEDY))


def sampled(bench: Bench, n: int) -> None:
    how = replace(SAMPLED, n=n)
    bench.company(how)
    bench.as_forced(bench.alone(how))


def beam_search(bench: Bench) -> None:
    how = replace(
        GREEDY, max_tokens=10, beam_width=3, n=3, logprobs=None, length_penalty=0.0
    )  # so that scores are sums of log-probabilities
    bench.company(how)
    for output in bench.alone(how):
        for beam in output.sequences:
            forced = bench.forced(output.prompt_tokens, beam.tokens)
            total = sum(each.logprob for each in forced.logprobs or ())
            if beam.score is None or abs(beam.score - total) > SAME_LOGPROB:
                raise Wrong(f"a beam of score {beam.score} has log-probability {total}")


def prompt_log_probabilities(bench: Bench) -> None:
    how = replace(GREEDY, max_tokens=2, prompt_logprobs=0)
    outputs = bench.engine().generate(PROMPTS, how)
    for ours, theirs in zip(outputs, bench.alone(how), strict=True):
        close(ours.prompt_logprobs, theirs.prompt_logprobs)


def forced_output(bench: Bench) -> None:
    alone = bench.alone(GREEDY)
    for output in alone:
        how = replace(GREEDY, forced_output=tuple(output.tokens[:9]))
        compare(bench.engine().generate([output.prompt_tokens], how), [output])


def preempted(bench: Bench, mode: str) -> None:
    """Serve twice as many requests as `company`, trying sizes of KV memory until a request is
    preempted, because a policy may compress enough to hold all requests. A size holds three, two or
    one of the longest sequences, or lies halfway between two of these sizes."""
    asked = PROMPTS * 2
    one, two, three = map(bench.room, (1, 2, 3))
    for kv_cache_tokens in (three, two, one, (two + three) // 2, (one + two) // 2):
        engine = bench.engine(preemption_mode=mode, kv_cache_tokens=kv_cache_tokens)
        compare(engine.generate(asked, GREEDY), bench.alone(GREEDY, asked))
        if any(record.preemptions for record in engine.metrics.requests):
            return
    raise Idle("nothing is ever preempted")


def moving_between_engines(bench: Bench) -> None:
    there = bench.engine()
    ids = [there.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(9):
        there.step()
    moved, here = [there.abort(name) for name in ids], bench.engine()
    for output in moved:
        here.add_request(
            output.prompt_tokens, GREEDY, output.request_id, known_output=output.sequences
        )
    outputs = finish(here)
    compare([outputs[name] for name in ids], bench.alone(GREEDY))


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """The outputs of all unfinished requests, by request id."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def aborting(bench: Bench) -> None:
    engine = bench.engine()
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(5):
        engine.step()
    engine.abort(ids.pop(1))
    outputs = finish(engine)
    compare([outputs[name] for name in ids], bench.alone(GREEDY)[::2])
    engine.host_policy.check()
    if held := [name for name, units in engine.host_policy.used_units().items() if len(units)]:
        raise Wrong(f"units of {', '.join(held)} have owners at the end")


def with_shared_prefix() -> list[list[int]]:
    (shared,) = prompts(26)
    return [shared + own for own in prompts(3, 9, 6)]


def check_hits(engine: Engine, outputs: Sequence[RequestOutput]) -> None:
    """Raises Wrong if a prompt hit no cached prefix. Raises ValueError if, under this policy,
    prompts of the same length share no prefix."""
    can = engine.config.parts
    for output in outputs:
        if not can.shares(len(output.prompt_tokens)):
            raise ValueError(f"prompts of {can.unshared_from} tokens or more share no prefix")
        if not output.cached_tokens:
            raise Wrong("nothing was found in the cache")


def prefix_caching(bench: Bench) -> None:
    asked = with_shared_prefix()
    engine = bench.engine(prefix_caching=True)
    outputs = [engine.generate([prompt], GREEDY)[0] for prompt in asked]
    compare(outputs, bench.alone(GREEDY, asked))
    check_hits(engine, outputs[-1:])


def pinned_prefix(bench: Bench) -> None:
    """Serve prompts after a pinned prefix. A policy that stages prompts in tiles keeps the pinned
    prefix staged instead of in the prefix cache."""
    asked = with_shared_prefix()
    if bench.config().parts.staged_tile:
        bench = bench.variant(
            policy_options=replace(bench.config().policy_options, pins=1), **CHUNKS
        )
        engine = bench.engine()
    else:
        engine = bench.engine(prefix_caching=True)
    engine.pin_prefix(asked[0][:26])
    outputs = engine.generate(asked, GREEDY)
    compare(outputs, bench.alone(GREEDY, asked))
    check_hits(engine, outputs)


def with_adapters(bench: Bench, *names: str | None) -> None:
    """Serve requests of several adapters in a batch, with two adapter slots."""
    adapted, known = bench.variant(adapter_slots=2), sorted(filter(None, names))
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: random_adapters.write(Path(folder) / name, bench.model, seed, rank=4 + 4 * seed)
            for seed, name in enumerate(known)
        }

        def engine() -> Engine:
            made = adapted.engine()
            for name, path in paths.items():
                made.add_adapter(name, path)
            return made

        together, single = engine().generate(PROMPTS, GREEDY, names), engine()
        pairs = zip(PROMPTS, names, strict=True)
        compare(together, [single.generate([p], GREEDY, [name])[0] for p, name in pairs])


def tensor_parallel(bench: Bench) -> None:
    if jax.device_count() < 2:
        raise ValueError("this process has one device")
    bench.company(tensor_parallel=2)


def replayed_log(bench: Bench) -> None:
    engine = bench.company(run_ahead=True)
    with tempfile.TemporaryDirectory() as folder:
        write_log(folder, "events.jsonl", engine.events)
        log = read_log(Path(folder) / "events.jsonl")
    again = simulated_engine(log, bench.model)
    again.loop._buckets = engine.loop._buckets
    if difference := first_difference(log, replay(again, log)):
        raise Wrong(str(difference))


PENALTIES = replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={9: 1.0})
FEATURES: dict[str, Callable[[Bench], Any]] = {
    "others_in_the_batch": lambda bench: bench.company(),
    "chunked_prompts": chunked_prompts,
    "several_tokens_a_step": lambda bench: bench.company(multi_step=4),
    "running_ahead": lambda bench: bench.company(run_ahead=True),
    "seeds": lambda bench: sampled(bench, n=1),
    "penalties": lambda bench: bench.company(PENALTIES),
    "parallel_sampling": lambda bench: sampled(bench, n=3),
    "beam_search": beam_search,
    "prompt_log_probabilities": prompt_log_probabilities,
    "forced_output": forced_output,
    "swapping": lambda bench: preempted(bench, "swap"),
    "recomputing": lambda bench: preempted(bench, "recompute"),
    "moving_between_engines": moving_between_engines,
    "aborting": aborting,
    "prefix_caching": prefix_caching,
    "pinned_prefix": pinned_prefix,
    "adapters": lambda bench: with_adapters(bench, "a", "b", None),
    "more_adapters_than_slots": lambda bench: with_adapters(bench, "a", "b", "c"),
    "tensor_parallel": tensor_parallel,
    "keys_and_values_in_16_bits": lambda bench: bench.variant(kv_dtype="bfloat16").company(),
    "w8a8": lambda bench: bench.variant(quantization="w8a8").company(),
    "sliding_window": lambda bench: bench.variant(WINDOWED).company(),
    "multi_head_attention": lambda bench: bench.variant(OPT).company(),
    "replayed_log": replayed_log,
}


@dataclass(frozen=True)
class CompositionFlags(Flags):
    presets: tuple[str, ...] = flag(tuple(PRESETS), "columns of the table", choices=tuple(PRESETS))
    features: tuple[str, ...] = flag(tuple(FEATURES), "lines of the table", choices=tuple(FEATURES))


@dataclass(frozen=True)
class Cell:
    """A preset with a feature. reason: message of the refusal, Idle or Wrong."""

    preset: str
    feature: str
    verdict: str
    reason: str = ""


@functools.cache
def bench_of(preset: str) -> Bench:
    return Bench(PRESETS[preset])


def cell(preset: str, feature: str) -> Cell:
    try:
        FEATURES[feature](bench_of(preset))
    except ValueError as error:
        return Cell(preset, feature, REFUSED, str(error))
    except Idle as idle:
        return Cell(preset, feature, IDLE, str(idle))
    except Wrong as error:
        return Cell(preset, feature, WRONG, str(error))
    return Cell(preset, feature, WORKS)


def measure(flags: CompositionFlags, run: Run) -> Iterator[Cell]:
    cells = []
    for preset in flags.presets:
        for feature in flags.features:
            cells.append(run.once(cell, preset, feature))
            yield cells[-1]
        bench_of.cache_clear()
        jax.clear_caches()
    run_record.write_whole(run.folder / "matrix.md", markdown(cells))


def values(_: CompositionFlags, cells: Sequence[Cell]) -> Values:
    return {name: sum(each.verdict == name for each in cells) for name in MARKS} | {
        "cells": len(cells)
    }


def markdown(cells: Sequence[Cell], with_reasons: bool = True) -> str:
    """The matrix: a line for each feature, and a column for each preset. with_reasons: whether
    numbered lines below the matrix give the reasons of cells that do not work."""
    names = list(dict.fromkeys(each.preset for each in cells))
    by_place = {(each.preset, each.feature): each for each in cells}
    notes: dict[str, int] = {}
    titles = [name.replace("_", " ") for name in names]
    lines = [f"| {' | '.join(['', *titles])} |", f"|---|{':-:|' * len(names)}"]
    for feature in dict.fromkeys(each.feature for each in cells):
        marks = []
        for name in names:
            each = by_place.get((name, feature))
            has_note = with_reasons and each and each.reason
            note = notes.setdefault(each.reason, len(notes) + 1) if each and has_note else ""
            marks.append(f"{MARKS[each.verdict]}{note}" if each else "")
        lines.append(f"| {feature.replace('_', ' ')} | {' | '.join(marks)} |")
    below = [f"{at}. {reason}" for reason, at in notes.items()]
    return "\n".join([*lines, "", *below] if below else lines)


def draw(_: CompositionFlags, figure: Figure, cells: Sequence[Cell]) -> None:
    names = list(dict.fromkeys(each.preset for each in cells))
    features = list(dict.fromkeys(each.feature for each in cells))
    grid, axes = np.full((len(features), len(names)), np.nan), figure.subplots()
    for each in cells:
        y, x = features.index(each.feature), names.index(each.preset)
        grid[y, x] = list(MARKS).index(each.verdict)
        axes.text(x, y, MARKS[each.verdict], ha="center", va="center", fontsize="small")
    axes.imshow(grid, cmap="Pastel2", vmin=0, vmax=7)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
    axes.set_yticks(range(len(features)), [f.replace("_", " ") for f in features], fontsize="small")


STUDY = Study(
    __file__,
    title="The matrix of what composes",
    kind="counted",
    claim="every feature works under every policy, never takes effect, or is refused in words",
    rule="no cell is wrong",
    holds=lambda v: v[WRONG] == 0,
    setting=Setting(
        "a random model of two layers; room for three sequences of 64 tokens, in pages of 4",
        "no paper's",
        "paper",
    ),
    flags=CompositionFlags,
    measure=measure,
    values=values,
    draw=draw,
    table=lambda _, cells: markdown(cells),
    quick={"presets": ("vllm", "lserve", "diffkv_streaming")},
    minutes=(10, 60),
    size=(9, 8),
)

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    with tempfile.TemporaryDirectory() as cache:  # equal programs are compiled once
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        STUDY.run()
