"""Finetune LoRA adapters, each for its own answer format (Punica §2.2).

The base model is the bundled one, or another of Llama's family. Each adapter learns one of
`experiments.tasks.answer_formats`, in a minute or two on two CPU cores, and is written in PEFT's
format. Every `evaluate_every` steps the engine serves the current adapter on prompts that are not
in the training data. Training ends when enough answers are exact. The last evaluation, with and
without the adapter, uses other prompts, which did not determine the end of training.

    python -m experiments.train.lora --output_dir=results/lora
    python -m experiments.serve --workload=tasks:needle,multikey --adapter_slots=4 \\
        --adapters=results/lora/adapters

models/bundled/adapters holds nine adapters; their training.json holds the options.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from experiments.lib import program, report, run_record, shipped
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.plain_attention import check_model
from experiments.lib.typed_flags import Flags, ModelFlags, Output, flag, part
from experiments.tasks import answer_formats, tasks
from experiments.tasks.tasks import TaskPrompt
from experiments.train.data import CHARACTERS, TrainingData, check_corpus
from experiments.train.trainer import loss_fn
from experiments.workloads.tenants import RECORD
from models import checkpoint, llama, load_tokenizer, peft
from models.config import ModelConfig
from models.families import family
from models.hub import find
from models.lora import Lora
from paged import checks
from paged.checks import described, help_of
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams

ADAPTERS = [
    "named:4", "bracketed:4", "twice:4", "tail:4", "outer:4", "doubled:8", "reversed:8", "dashed:8",
    "sorted:16",
]  # fmt: skip
CONTEXT, CONTEXTS = 256, (256, 512)  # prompt tokens: evaluations in training, last evaluation
# Seeds of the prompts of evaluations during training, and of the last evaluation.
STOPPING_SEED, LAST_SEED = 0, 7
WHICH = ("exact_match", "exact_match_without_adapter")
WARM_UP = 20  # steps


@dataclass(frozen=True)
class Options:
    """Options of training, besides answer format and rank. Each field has a help text.

    Raises ValueError for values of the wrong type, and for numbers out of bounds.
    """

    steps: int = described(500, "at most, of each adapter", least=1)
    learning_rate: float = described(
        4e-3, "of Adam, after the warm-up; then it falls to nothing", least=0
    )
    length: int = described(256, "tokens of a training sequence", least=128)
    batch_size: int = described(4, "sequences of a step", least=1)
    evaluate_every: int = described(50, "steps between evaluations through the engine", least=1)
    evaluation_prompts: int = described(
        8, "of each task, in those; the last evaluation has twice as many, at each context", least=1
    )
    enough: float = described(
        1.0, "share of exact answers that ends the training; above 1: none", least=0
    )
    corpus_characters: int = described(1_000_000, "of filler text", least=10_000)
    seed: int = described(1, "of weights and data", least=0)

    def __post_init__(self):
        checks.make_plain(self)
        checks.require_bounds(self)
        check_corpus(self.corpus_characters, self.length)


@dataclass(frozen=True)
class LoraFlags(Flags):
    adapters: tuple[str, ...] = flag(
        tuple(ADAPTERS), "what to train: answer format and rank of each"
    )
    model: str = flag("bundled", help_of(ModelFlags)["model"], path=True)
    training: Options = part(Options())


def ranks(adapters: Sequence[str]) -> dict[str, int]:
    """Rank by answer format, from texts 'format:rank'. Raises ValueError for invalid texts."""
    found = {}
    for each in adapters:
        name, _, rank = each.partition(":")
        if name not in answer_formats.FORMATS or not rank.isdecimal() or not 1 <= int(rank) <= 128:
            formats = ", ".join(answer_formats.FORMATS)
            raise ValueError(
                f"--adapters={each!r} must be format:rank, with a rank from 1 to 128 and a format "
                f"of {formats}"
            )
        found[name] = int(rank)
    if not found:
        raise ValueError("--adapters must name at least one")
    return found


def initialise(config: ModelConfig, rank: int, key) -> dict[str, dict[str, jax.Array]]:
    """{projection: {'a': [L, R, in], 'b': [L, R, out]}} in float32. A is random and B zero, so that
    training starts with the base model's outputs."""
    layers, weights = llama.declare(config)["layers"], {}
    keys = jax.random.split(key, len(llama.PROJECTIONS))
    for name, own in zip(llama.PROJECTIONS, keys):
        fan_out, fan_in = layers[0][name].shape
        a = jax.random.normal(own, (len(layers), rank, fan_in)) * fan_in**-0.5
        weights[name] = {"a": a, "b": jnp.zeros((len(layers), rank, fan_out))}
    return weights


def seam(weights):
    """The `adapters` of models/common.py for one adapter with differentiable weights."""

    def adapters(name, layer, x, y):
        return y + x @ weights[name]["a"][layer].T @ weights[name]["b"][layer]

    return adapters


@cache
def make_optimizer(learning_rate: float, steps: int):
    """Adam. Equal arguments give the same object, so that a step is traced once for each rank."""
    rates = optax.warmup_cosine_decay_schedule(0, learning_rate, WARM_UP, max(steps, WARM_UP + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b2=0.98))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def train_step(config, optimizer, p, weights, state, tokens, label_weights, positions):
    def loss(weights):
        return loss_fn(p, config, tokens, label_weights, positions, seam(weights))

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(weights)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(weights, updates), state, value, aux


def to_lora(weights) -> Lora:
    """The adapter with weights in the form that `seam` takes."""
    arrays = jax.tree.map(np.asarray, weights)
    return Lora({name: list(zip(pair["a"], pair["b"])) for name, pair in arrays.items()})


def generate(
    engine: Engine, prompts: Mapping[str, Sequence[TaskPrompt]], adapter: str | None
) -> dict[str, list[str]]:
    """The engine's greedy answers to groups of prompts."""
    texts = {}
    for group, asked in prompts.items():
        how = [SamplingParams(max_tokens=p.max_tokens, stop=p.stop) for p in asked]
        outputs = engine.generate([p.prompt for p in asked], how, [adapter] * len(asked))
        texts[group] = [output.text for output in outputs]
    return texts


def exact_match(
    texts: Mapping[str, Sequence[str]], prompts: Mapping[str, Sequence[TaskPrompt]]
) -> dict[str, float]:
    """Share of exact answers in each group."""
    return {
        group: float(
            np.mean([report.is_exact(t, p.answer, p.stop) for t, p in zip(texts[group], asked)])
        )
        for group, asked in prompts.items()
    }


def make_prompts(
    contexts: Sequence[int], num: int, seed: int, tokenizer
) -> dict[str, list[TaskPrompt]]:
    """'task@context' → `num` prompts with the tasks' own answers."""
    return {
        f"{task}@{context}": tasks.make_prompts(task, context, num, seed, tokenizer)
        for context in contexts
        for task in answer_formats.TASKS
    }


def expecting(prompts: Mapping[str, Sequence[TaskPrompt]], name: str) -> dict[str, list]:
    """The same prompts with their answers in format `name`."""
    return {k: [answer_formats.asked(name, p) for p in asked] for k, asked in prompts.items()}


def train(
    name: str, rank: int, options: Options, base: str, p, engine: Engine, folder: Path
) -> dict[str, Any]:
    """Train one adapter of the model `base`, with parameters `p`, and write it to `folder`; returns
    its steps, seconds and log."""
    tokenizer = load_tokenizer(base)
    stopping = make_prompts([CONTEXT], options.evaluation_prompts, STOPPING_SEED, tokenizer)
    stopping = expecting(stopping, name)
    rewrite = partial(answer_formats.answer, name)
    data = TrainingData(options.seed, 0.0, options.corpus_characters, rewrite, tokenizer)
    optimizer = make_optimizer(options.learning_rate, options.steps)
    weights = initialise(engine.model, rank, jax.random.key(options.seed))
    state, log, began, steps = optimizer.init(weights), [], time.monotonic(), 0
    with tqdm(total=options.steps, desc=name, unit="step") as bar:
        while steps < options.steps:
            drawn = data.batch(steps, options.length, options.batch_size, {"needles": 1.0})
            batch = drawn.tokens, drawn.weights, drawn.positions
            weights, state, loss, (right, total, _) = train_step(
                engine.model, optimizer, p, weights, state, *batch
            )
            steps += 1
            bar.update()
            if steps % options.evaluate_every and steps < options.steps:
                continue
            peft.save(folder, to_lora(weights), engine.model, base=shipped.named(str(find(base))))
            engine.add_adapter(name, folder)
            exact = exact_match(generate(engine, stopping, name), stopping)
            tokens_right = float(right.sum() / total.sum())
            row = dict(step=steps, loss=round(float(loss), 4), answer_tokens_right=tokens_right)
            log.append(row | dict(exact_match=exact))
            mean = float(np.mean(list(exact.values())))
            bar.set_postfix(loss=f"{loss:.3f}", exact=f"{mean:.2f}")
            if mean >= options.enough:
                break
    return dict(steps=steps, seconds=round(time.monotonic() - began), log=log)


def main(flags: LoraFlags, output: Output) -> None:
    how = flags.training
    with program.refusals():
        wanted = ranks(flags.adapters)
        model = checkpoint.load_config(flags.model)
        if family(model) is not llama:
            raise ValueError(f"--model={flags.model} is {model.model_type}: not of Llama's family")
        check_model(flags.model, [*CONTEXTS, how.length])
        tokenizer = load_tokenizer(flags.model)
        TrainingData(how.seed, 0.0, CHARACTERS * how.length, tokenizer=tokenizer)
        config = engine_config(
            model, max_model_len=CONTEXTS[-1] + 16, max_num_seqs=4, max_num_batched_tokens=64,
            kv_cache_tokens=4096, adapter_slots=1, max_adapter_rank=max(wanted.values()),
        )  # fmt: skip
        last = make_prompts(CONTEXTS, 2 * how.evaluation_prompts, LAST_SEED, tokenizer)
        engine = load_engine(config, model=flags.model)
    p = checkpoint.load(flags.model)[1]
    base, environment = checkpoint.weights_hash(flags.model), run_record.describe_environment()
    without = generate(engine, last, None)
    numbers: dict[str, float] = {}
    trained = {}
    for name, rank in wanted.items():
        folder = output.folder / "adapters" / name
        record: dict[str, Any] = dict(
            answer_format=name, rank=rank, base_weights_sha256=base, options=asdict(how)
        )
        record |= train(name, rank, how, flags.model, p, engine, folder)
        asked = expecting(last, name)
        record["exact_match"] = exact_match(generate(engine, asked, name), asked)
        record["exact_match_without_adapter"] = exact_match(without, asked)
        run_record.write_json(folder, RECORD, record | environment)
        for which in WHICH:
            numbers[f"{which}_{name}"] = float(np.mean(list(record[which].values())))
        numbers[f"steps_{name}"] = record["steps"]
        trained[name] = record
        with_it, without_it = (100 * numbers[f"{which}_{name}"] for which in WHICH)
        print(
            f"{name}, rank {rank}: {with_it:.1f} % of unseen prompts answered exactly, "
            f"{without_it:.1f} % without the adapter; {record['steps']} steps in "
            f"{record['seconds']} s"
        )
    facts = dict(experiment="train.lora", flags=flags, adapters=trained)
    run_record.write_json(output.folder, "report.json", facts | environment)
    run_record.write_summary(output.folder, numbers)


PROGRAM = program.Program(main, LoraFlags, Output("results/lora"))

if __name__ == "__main__":
    PROGRAM.run()
