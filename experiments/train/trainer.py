"""The trainer of the bundled model: schedule, optimizer, step, checkpoints.

The probabilities of lengths and tasks, the position jumps and the learning rates depend only on the
number of steps and training tokens so far. The data of a step depend only on these probabilities,
the options and the step. So a run can be repeated, and a resumed run equals an uninterrupted run.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from tqdm import tqdm

from experiments.tasks import tasks
from experiments.train import build_tokenizer, training_state
from experiments.train.attention import batched_attend
from experiments.train.data import SHORTEST, TASKS, Batch, TrainingData, check_corpus
from models import llama, params
from models.common import Adapters
from models.config import ModelConfig
from paged import checks
from paged.checks import described

CHECKPOINT = "checkpoint.npz"
# Options of the first weights and the data. A resumed run may change only other options.
FIXED = "seed", "qk_gain", "corpus_characters"


@dataclass(frozen=True)
class Options:
    """All options of a training run, besides the model's configuration. Each field has a help text.

    Raises ValueError for values of the wrong type, numbers out of bounds and invalid schedules.
    """

    tokens: float = described(9.5e6, "budget", least=0)
    lengths: str = described("0:128=1", "tokens seen:length=probability,...;...")
    mix: str = described("0:needles=1", "tokens seen:training task=probability,...;...")
    batch_tokens: int = described(4096, "tokens of a step (half as many below length 256)", least=0)
    muon_lr: float = described(0.02, "learning rate of matrices", least=0)
    adam_lr: float = described(3e-3, "learning rate of all other parameters", least=0)
    rates: str = described(
        "0:1;5e6:1;9.5e6:.02",
        "tokens seen:factor on both learning rates;..., with lines between these points",
    )
    max_position: int = described(
        4352, "positions jump up to here, so that retrieval carries this far", least=0
    )
    jump_from: float = described(3.4e6, "tokens seen when jumps begin", least=0)
    qk_gain: float = described(
        1.5, "initial gain of q's and k's norms: selective attention learns to copy early", least=0
    )
    filler_weight: float = described(
        0.05,
        "weight of a filler token in the loss, four times that in stories; answers have 1",
        least=0,
        below=0.25,
    )
    seed: int = described(1, "of weights and data", least=0)
    corpus_characters: int = described(6_000_000, "of filler text", least=10_000)

    def __post_init__(self):
        checks.make_plain(self)
        checks.require_bounds(self)
        stages: dict[str, Callable[[str], bool]] = {
            "lengths": lambda value: _are_shares(value, lambda name: int(name) >= SHORTEST),
            "mix": lambda value: _are_shares(value, TASKS.__contains__),
            "rates": lambda value: 0 <= float(value) < math.inf,
        }
        for name, valid in stages.items():
            if not _is_schedule(getattr(self, name), valid):
                raise checks.refusal(name, "a schedule from token 0 on", getattr(self, name))
        check_corpus(self.corpus_characters, longest(self.lengths))


def _is_schedule(text: str, valid: Callable[[str], bool]) -> bool:
    """Whether `text` has stages 'tokens:value;...' of ascending tokens from 0 on, with values for
    which `valid` returns True."""
    try:
        starts, stages = zip(*(stage.split(":") for stage in text.split(";")), strict=True)
        tokens = [float(start) for start in starts]
        return tokens[0] == 0 and tokens == sorted(tokens) and all(map(valid, stages))
    except ValueError:
        return False


def _are_shares(value: str, is_name: Callable[[str], bool]) -> bool:
    parts = [part.split("=") for part in value.split(",")]
    shares = [float(share) for _, share in parts]
    return (
        all(is_name(name) for name, _ in parts) and min(shares) >= 0 and 0 < sum(shares) < math.inf
    )


def longest(lengths: str) -> int:
    """The longest sequence of a schedule of lengths."""
    stages = [stage.partition(":")[2] for stage in lengths.split(";")]
    return max(int(each.partition("=")[0]) for stage in stages for each in stage.split(","))


def shares_at(schedule: str, tokens: int) -> dict[str, float]:
    """name -> share after `tokens` tokens, from the schedule 'tokens:name=share,...;...'."""
    stages = [stage.split(":") for stage in schedule.split(";")]
    current = [shares for start, shares in stages if tokens >= float(start)][-1]
    return {name: float(share) for name, share in (part.split("=") for part in current.split(","))}


def rate_at(step: int, tokens: int, rates: str) -> float:
    """The factor on both learning rates: the product of a warm-up over 50 steps and the linear
    interpolation between the points of `rates`, 'tokens:factor;...'."""
    points = np.array([point.split(":") for point in rates.split(";")], float)
    return min(1.0, (step + 1) / 50) * float(np.interp(tokens, points[:, 0], points[:, 1]))


def initialise(config: ModelConfig, key, qk_gain: float):
    """Random parameters, with factors on embeddings, head, norms of q and k, `wo` and `w_down`."""
    p = params.init(llama.declare(config), key)
    residual = (2 * config.num_layers) ** -0.5
    factors = {"q_norm": qk_gain, "k_norm": qk_gain, "wo": residual, "w_down": residual}
    layers = [{name: factors.get(name, 1) * x for name, x in each.items()} for each in p["layers"]]
    return p | {"embed": 5 * p["embed"], "lm_head": 0.5 * p["lm_head"], "layers": layers}


@cache
def make_optimizer(config: ModelConfig, muon_lr: float, adam_lr: float):
    """Muon for the layers' matrices, Adam for embeddings, head and gains.

    Equal arguments give the same object, so that `_train_step` is traced once for all trainers.
    """
    declared = llama.declare(config)
    matrix = MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    dimensions = {name: None for name in declared} | {
        "layers": jax.tree.map(
            lambda p: matrix if len(p.shape) == 2 else None,
            declared["layers"],
            is_leaf=params.is_param,
        )
    }

    def build(muon_rate, adam_rate):
        return muon(
            muon_rate,
            weight_decay=0.01,
            adam_b2=0.98,
            adam_learning_rate=adam_rate,
            muon_weight_dimension_numbers=dimensions,
        )

    rates = optax.inject_hyperparams(build)(muon_rate=muon_lr, adam_rate=adam_lr)
    return optax.chain(optax.clip_by_global_norm(1.0), rates)


def predict(p, config: ModelConfig, tokens_BxT, positions_BxT, adapters: Adapters | None = None):
    """Logits [B, T, V]. adapters: see models/common.py."""
    B, T = tokens_BxT.shape
    attend = batched_attend(config, T)
    flat = tokens_BxT.reshape(-1), positions_BxT.reshape(-1)
    hidden, _ = llama.forward(p, config, *flat, attend, adapters=adapters)
    return llama.logits(p, config, hidden).reshape(B, T, -1)


def loss_fn(p, config: ModelConfig, tokens, weights, positions, adapters: Adapters | None = None):
    """(weighted mean loss, (right answer tokens [B], answer tokens [B], mean filler loss))."""
    logits = predict(p, config, tokens[:, :-1], positions[:, :-1], adapters)
    labels, weights = tokens[:, 1:], weights[:, 1:]
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    answer, filler = weights >= 1, (weights > 0) & (weights < 1)
    right = (jax.lax.stop_gradient(logits).argmax(-1) == labels) & answer
    filler_loss = jnp.sum(nll * filler) / jnp.maximum(filler.sum(), 1)
    loss = jnp.sum(nll * weights) / jnp.maximum(weights.sum(), 1)
    return loss, (right.sum(1), answer.sum(1), filler_loss)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _train_step(config, optimizer, p, state, tokens, weights, positions, rates):
    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        p, config, tokens, weights, positions
    )
    clip, injected = state
    injected = injected._replace(hyperparams={**injected.hyperparams, **rates})
    updates, state = optimizer.update(grads, (clip, injected), p)
    return optax.apply_updates(p, updates), state, loss, aux


@partial(jax.jit, static_argnums=0)
def _argmax(config, p, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return predict(p, config, tokens, positions).argmax(-1)


def held_out(p, config: ModelConfig, names, lengths, num: int) -> dict[str, float]:
    """{'task@length': share of exact matches} with teacher forcing, on prompts that are not in the
    training data."""
    result, vocabulary = {}, build_tokenizer.Vocabulary()
    for name, length in ((name, length) for length in lengths for name in names):
        if length < tasks.MIN_CONTEXT.get(name, 256):
            continue
        right, rows = 0, max(1, 8192 // length)
        prompts = tasks.make_prompts(name, length, num, seed=0)
        for start in range(0, num, rows):
            chunk, tokens = prompts[start : start + rows], np.zeros((rows, length), np.int32)
            for i, prompt in enumerate(chunk):
                text = prompt.prompt + prompt.answer
                tokens[i] = [build_tokenizer.BOS, *vocabulary.encode(text)]
            predicted = np.asarray(_argmax(config, p, tokens))
            for i, prompt in enumerate(chunk):
                n = prompt.max_tokens
                right += int((predicted[i, -n - 1 : -1] == tokens[i, -n:]).all())
        result[f"{name}@{length}"] = round(right / num, 4)
    return result


class Trainer:
    """A training run. A checkpoint holds parameters, optimizer state, step, tokens, time, log."""

    def __init__(self, config: ModelConfig, options: Options, folder: Path):
        if (most := longest(options.lengths)) > config.max_position_embeddings:
            raise ValueError(
                f"lengths must be at most the model's {config.max_position_embeddings} positions, "
                f"not {most}"
            )
        self.config, self.options, self.folder = config, options, folder
        self.optimizer = make_optimizer(config, options.muon_lr, options.adam_lr)
        self.params = initialise(config, jax.random.key(options.seed), options.qk_gain)
        self.state = self.optimizer.init(self.params)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.log: list[dict] = []
        self.data = TrainingData(options.seed, options.filler_weight, options.corpus_characters)
        self.pool = ThreadPoolExecutor(1)
        self.ahead: Future[Batch] | None = None
        if (folder / CHECKPOINT).exists():
            self._restore()

    def save(self) -> None:
        meta = dict(step=self.step, tokens=self.tokens, log=self.log, seconds=self.seconds)
        training_state.save(self.folder / CHECKPOINT, (self.params, self.state), meta)

    def _restore(self) -> None:
        (self.params, self.state), meta = training_state.restore(
            self.folder / CHECKPOINT, (self.params, self.state)
        )
        self.step, self.tokens = meta["step"], meta["tokens"]
        self.log, self.seconds = meta["log"], meta["seconds"]
        first: dict = next((row["options"] for row in self.log if "options" in row), {})
        for name in FIXED:
            before, now = first.get(name), getattr(self.options, name)
            if name in first and before != now:
                raise ValueError(
                    f"the run in {self.folder} began with {name} {before!r}, not {now!r}"
                )

    def _draw(self, step: int, tokens: int) -> Batch:
        lengths = shares_at(self.options.lengths, tokens)
        shares = np.array(list(lengths.values()))
        rng = np.random.default_rng([self.options.seed, 2, step])
        length = int(list(lengths)[rng.choice(len(lengths), p=shares / shares.sum())])
        # Short sequences have half batches, because induction needs many steps, not many tokens.
        budget = self.options.batch_tokens // (2 if length < 256 else 1)
        reach = self.options.max_position if tokens >= self.options.jump_from else 0
        mix = shares_at(self.options.mix, tokens)
        return self.data.batch(step, length, max(1, budget // length), mix, reach)

    def advance(self) -> tuple[Batch, float, tuple]:
        """Train one step while drawing the next batch. Returns (batch, loss, `loss_fn`'s aux)."""
        batch = self.ahead.result() if self.ahead else self._draw(self.step, self.tokens)
        count = batch.tokens[:, 1:].size
        self.ahead = self.pool.submit(self._draw, self.step + 1, self.tokens + count)
        factor = rate_at(self.step, self.tokens, self.options.rates)
        rates = {
            "muon_rate": jnp.float32(factor * self.options.muon_lr),
            "adam_rate": jnp.float32(factor * self.options.adam_lr),
        }
        arrays = (batch.tokens, batch.weights, batch.positions)
        self.params, self.state, loss, aux = _train_step(
            self.config, self.optimizer, self.params, self.state, *arrays, rates
        )
        self.step, self.tokens = self.step + 1, self.tokens + count
        return batch, float(loss), jax.tree.map(np.asarray, aux)

    def run(
        self,
        minutes: float = 0,
        checkpoint_seconds: float = 120,
        evaluate_every: float = 1e6,
        evaluation_prompts: int = 16,
    ) -> None:
        """Train until the token budget or the limit of `minutes` (0: no limit) is used up."""
        self.record(dict(step=self.step, tokens=self.tokens, options=asdict(self.options)))
        began = last_row = last_save = time.monotonic()
        before, next_evaluation = self.seconds, self.tokens + evaluate_every
        tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        losses: list[tuple[float, float]] = []
        bar = tqdm(
            total=int(self.options.tokens), initial=self.tokens, unit="token", mininterval=10
        )
        while self.tokens < self.options.tokens and (
            not minutes or time.monotonic() - began < 60 * minutes
        ):
            batch, loss, (right, total, filler_loss) = self.advance()
            bar.update(batch.tokens[:, 1:].size)
            losses.append((loss, float(filler_loss)))
            for task, r, n in zip(batch.tasks, right, total):
                entry = tally[f"{task}@{batch.tokens.shape[1] - 1}"]
                entry[0], entry[1] = entry[0] + int(r), entry[1] + int(n)
            now = time.monotonic()
            self.seconds = before + now - began
            if now - last_row > 60:
                mean_loss, mean_filler = np.mean(losses, axis=0).round(4).tolist()
                accuracy = {k: round(r / n, 4) for k, (r, n) in sorted(tally.items()) if n}
                row = dict(seconds=round(self.seconds), step=self.step, tokens=self.tokens)
                losses_row = dict(loss=mean_loss, filler_loss=mean_filler)
                self.record(row | losses_row | dict(answer_tokens_right=accuracy))
                tally.clear()
                losses.clear()
                last_row = now
            if self.tokens >= next_evaluation:
                next_evaluation += evaluate_every
                longest = max(map(int, shares_at(self.options.lengths, self.tokens)))
                self.evaluate(sorted({256, max(256, longest)}), evaluation_prompts)
            if now - last_save > checkpoint_seconds:
                self.save()
                last_save = now
        bar.close()
        self.save()

    def evaluate(self, lengths: list[int], num: int) -> dict[str, float]:
        names = [name for name in tasks.TASKS if name != "story"]
        exact = held_out(self.params, self.config, names, lengths, num)
        self.record(dict(step=self.step, tokens=self.tokens, exact_match=exact))
        return exact

    def record(self, row: dict) -> None:
        self.log.append(row)
        tqdm.write(json.dumps(row).replace('"', ""))
