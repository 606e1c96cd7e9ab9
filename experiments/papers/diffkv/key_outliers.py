"""What channels of large keys do to formats of fewer bits (DiffKV §7.2, Fig. 8, Tables 1 and 3).

python -m experiments.papers.diffkv.key_outliers

A token's channels share a scale, so one large channel takes precision from all others. Two channels
of every key, a pair of the rotary embedding, are multiplied by each of --factors, and those of
every query are divided by it: by the norms' weights, so the model computes what it computed before.
Powers of two make both exact.

A prompt passes through the model whole. Its keys and values are quantised in each of --formats, and
the right answer passes through the model once for each (`experiments/papers/masked.py`). The
answer's own keys and values are not quantised.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.study import Run, Setting, Study, Values
from models import checkpoint
from models.config import ModelConfig
from pallas_kernels.quantization import quantizer
from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantized_attention.pages import parse_format

FORMATS = ("K8V4", "K4V8", "K8V2", "K4V4", "K4V2", "K2V4")
EXACT, INT4, OURS = "exact", "K4V4", "K8V4"
LOSS, NEAR = 10, 2  # percentage points


@dataclass(frozen=True)
class OutlierFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values"), "tasks of experiments/tasks/tasks.py"
    )
    context: int = flag(2048, "tokens of prompt and answer", least=256)
    num_prompts: int = flag(40, "prompts of each task", least=1)
    factors: tuple[int, ...] = flag((1, 4, 8, 16), "of two channels of every key", least=1)
    formats: tuple[str, ...] = flag(FORMATS, "of keys and values, such as K8V4")
    seed: int = flag(7, "of the prompts", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(tasks=self.tasks, factors=self.factors, formats=self.formats)
        if wrong := [each for each in self.factors if each & (each - 1)]:
            raise ValueError(f"--factors must be powers of two, not {wrong}")


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    largest: a key's largest channel over its median one, in absolute values; mean over heads and
        over the prompt's tokens.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    task: str
    prompt: int
    factor: int
    format: str
    largest: float
    first_wrong: int


@dataclass(frozen=True)
class Rows:
    """The rows of a prompt, as `Run.once` keeps them."""

    fields: list[list]


def channels(config: ModelConfig) -> np.ndarray:
    """The two channels: the pair that the rotary embedding turns slowest."""
    return np.array([config.head_dim // 2 - 1, config.head_dim - 1])


def with_outliers(params, config: ModelConfig, factor: int):
    """The same model, whose keys have the two channels `factor` times as large."""
    at = channels(config)
    layers = [
        layer | {
            "k_norm": layer["k_norm"].at[at].multiply(factor),
            "q_norm": layer["q_norm"].at[at].divide(factor),
        }
        for layer in params["layers"]
    ]  # fmt: skip
    return params | {"layers": layers}


def outliers_of(asked: masked.Asked, factor: int) -> masked.Asked:
    """The question, asked of the model of `with_outliers`."""
    found = copy.copy(asked)
    found.params = with_outliers(asked.params, asked.config, factor)
    found.kv = asked.kv.at[:, 0, :, :, channels(asked.config)].multiply(factor)
    return found


@partial(jax.jit, static_argnums=(1, 2))
def quantised(kv_Lx2xSxKxD, keys: KVFormat, values: KVFormat):
    """The keys and values as pages of these formats hold them."""
    found = []
    for i, format in enumerate((keys, values)):
        codes, scales = quantizer.quantize(kv_Lx2xSxKxD[:, i], format)
        found.append(quantizer.dequantize(codes, scales, format))
    return jnp.stack(found, 1)


def everything(layer, q_RxKxGxD, keys_SxKxD, at_R):
    return jnp.ones((1, 1, 1), bool)


def largest(keys_LxTxKxD: np.ndarray) -> float:
    """As in `Row`."""
    sizes = np.abs(keys_LxTxKxD)
    return float(np.mean(sizes.max(-1) / np.median(sizes, -1)))


@functools.lru_cache(maxsize=1)
def loaded(model: str):
    return checkpoint.load(model)


@functools.lru_cache(maxsize=1)
def questions_of(flags: OutlierFlags, task: str) -> list[masked.Question]:
    return masked.questions(flags.model, task, flags.context, flags.num_prompts, flags.seed)


def of_prompt(flags: OutlierFlags, task: str, index: int) -> Rows:
    config, params = loaded(flags.model)
    question = questions_of(flags, task)[index]
    asked, found = masked.Asked(params, config, question), []
    for factor in flags.factors:
        here = outliers_of(asked, factor)
        size = largest(np.asarray(here.kv[:, 0, : here.start]))
        exact = here.kv
        for name in (EXACT, *flags.formats):
            if name != EXACT:
                here.kv = quantised(exact, *parse_format(name, config.head_dim, "float16"))
            wrong = question.first_wrong(here.likeliest(everything))
            found.append([task, index, factor, name, size, wrong])
    return Rows(found)


def check(flags: OutlierFlags) -> None:
    config = check_model(flags.model, [flags.context])
    if not config.qk_norm:
        raise ValueError(f"--model={flags.model} must normalise queries and keys, as Qwen3 does")
    for name in flags.formats:
        parse_format(name, config.head_dim, "float16")
    for task in flags.tasks:
        questions_of(flags, task)


def measure(flags: OutlierFlags, run: Run) -> Iterator[Row]:
    with refusals():
        loaded(flags.model)
    for task in flags.tasks:
        for index in tqdm(range(flags.num_prompts), task):
            if run.stopped():
                return
            for each in run.once(of_prompt, flags, task, index).fields:
                yield Row(*each)


def values(_: OutlierFlags, rows: Sequence[Row]) -> Values:
    """By factor C: largest_C, the mean of `Row.largest`; right_FORMAT_C, right answers in percent;
    also right_exact_C, of keys and values that are not quantised."""
    numbers: dict[str, float | None] = {}
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.format}_{row.factor}", []).append(row)
    for name, mine in found.items():
        numbers[f"right_{name}"] = masked.percent_right(row.first_wrong for row in mine)
        numbers[f"largest_{mine[0].factor}"] = float(np.mean([row.largest for row in mine]))
    return numbers


def lost(v: Mapping[str, float], name: str) -> list[float]:
    """Points that the format loses, by ascending factor."""
    start = f"right_{EXACT}_"
    factors = sorted(int(each.removeprefix(start)) for each in v if each.startswith(start))
    return [v[f"{start}{factor}"] - v[f"right_{name}_{factor}"] for factor in factors]


def holds(v: Mapping[str, float]) -> bool:
    least, *_, most = lost(v, INT4)
    return least <= NEAR and most >= LOSS and max(lost(v, OURS)) <= NEAR


def draw(flags: OutlierFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, axes = values(flags, rows), figure.subplots()
    factors = sorted(flags.factors)
    for name in (EXACT, *flags.formats):
        right = [numbers[f"right_{name}_{factor}"] or 0.0 for factor in factors]
        axes.plot(factors, right, marker="o", ls="--" if name == EXACT else "-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="factor of two channels of the keys", ylabel="right answers (%)", ylim=(-3, 103),
        xticks=factors, xticklabels=[str(each) for each in factors],
    )  # fmt: skip
    axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="Key formats and large channels (DiffKV Fig. 8)",
    kind="analogue",
    claim="keys with large channels need eight bits, and values do not; without such channels four "
    "bits are enough for both",
    rule=f"{INT4} loses at most {NEAR} points at the smallest factor and at least {LOSS} at the "
    f"largest; {OURS} loses at most {NEAR} at each",
    holds=holds,
    setting=Setting(
        "the judge model, three tasks at 2,048 tokens; a forward pass",
        "the paper has no such figure; its models have the channels that training gave them",
        "reduced",
    ),
    flags=OutlierFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 1, "context": 1024, "factors": (1, 16)},
    minutes=(1, 20),
    size=(6.5, 4),
)

if __name__ == "__main__":
    STUDY.run()
