"""What large channels of keys and of values do to page formats (DiffKV §7.2, Fig. 8).

python -m experiments.papers.diffkv.large_channels

A token's channels share a scale, so one large channel takes precision from all others. Two channels
of every key are multiplied by each of --factors, and the same channels of every query divided by
it, in the weights of the norms of keys and queries. The model's outputs stay the same, in each bit,
as factors are powers of two. Large channels of values are made in the same way, in the projections
of values and outputs.

A prompt passes through the model whole. Its keys and values are quantised in each of --formats, and
the right answer passes through the model once for each (`experiments/papers/masked.py`). The
answer's own keys and values are not quantised.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.study import Run, Setting, Study, Values
from models.config import ModelConfig
from pallas_kernels.quantization import quantizer
from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantized_attention.pages import parse_format

EXACT = "exact"
LARGE = KEYS, VALUES = "keys", "values"
LOSS, NEAR = 10, 2  # percentage points
MOST = 256  # largest factor; the quantiser clips at 32,752


@dataclass(frozen=True)
class ChannelFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values"), "tasks of experiments/tasks/tasks.py"
    )
    context: int = flag(2048, "tokens of prompt and answer", least=256)
    num_prompts: int = flag(25, "prompts of each task", least=1)
    factors: tuple[int, ...] = flag((1, 4, 16, 64, 256), "of two channels", least=1, most=MOST)
    formats: tuple[str, ...] = flag(("K8V8", "K8V4", "K4V8", "K4V4"), "of keys and values")
    seed: int = flag(7, "of the prompts", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(tasks=self.tasks, factors=self.factors, formats=self.formats)
        if wrong := [each for each in self.factors if each & (each - 1)]:
            raise ValueError(f"--factors must be powers of two, not {wrong}")


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    large: KEYS or VALUES, which have the large channels.
    ratio: a token's largest channel over its median one, in absolute values; mean over the tokens
        of the prompt and over all heads.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    task: str
    prompt: int
    large: str
    factor: int
    format: str
    ratio: float
    first_wrong: int


def channels(config: ModelConfig) -> np.ndarray:
    """The two channels. In keys they are the pair that the rotary embedding turns slowest."""
    return np.array([config.head_dim // 2 - 1, config.head_dim - 1])


def with_large_channels(params, config: ModelConfig, large: str, factor: int):
    """The same model, with two channels of keys or values that are `factor` times as large."""
    at, shape = channels(config), (-1, config.head_dim, config.hidden_size)
    layers = []
    for layer in params["layers"]:
        if large == KEYS:
            new = {
                "k_norm": layer["k_norm"].at[at].multiply(factor),
                "q_norm": layer["q_norm"].at[at].divide(factor),
            }
        else:
            wv, wo = layer["wv"].reshape(shape), layer["wo"].T.reshape(shape)
            new = {
                "wv": wv.at[:, at].multiply(factor).reshape(layer["wv"].shape),
                "wo": wo.at[:, at].divide(factor).reshape(layer["wo"].T.shape).T,
            }
        layers.append(layer | new)
    return params | {"layers": layers}


def asked_of(asked: masked.Asked, large: str, factor: int) -> masked.Asked:
    """The question, asked of the model of `with_large_channels`."""
    found = copy.copy(asked)
    found.params = with_large_channels(asked.params, asked.config, large, factor)
    found.kv = asked.kv.at[:, LARGE.index(large), :, :, channels(asked.config)].multiply(factor)
    return found


@partial(jax.jit, static_argnums=(1, 2))
def quantised(kv_Lx2xSxKxD, keys: KVFormat, values: KVFormat):
    """The keys and values as pages of these formats hold them."""
    found = []
    for i, format in enumerate((keys, values)):
        codes, scales = quantizer.quantize(kv_Lx2xSxKxD[:, i], format)
        found.append(quantizer.dequantize(codes, scales, format))
    return jnp.stack(found, 1)


def ratio(x_LxTxKxD: np.ndarray) -> float:
    """As in `Row`."""
    sizes = np.abs(x_LxTxKxD)
    return float(np.mean(sizes.max(-1) / np.median(sizes, -1)))


def of_prompt(flags: ChannelFlags, task: str, index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    question = masked.questions_of(flags, task, flags.context)[index]
    asked, found = masked.Asked(params, config, question), []
    for large in LARGE:
        for factor in flags.factors:
            here = asked_of(asked, large, factor)
            exact = here.kv
            size = ratio(np.asarray(exact[:, LARGE.index(large), : here.start]))
            for name in (EXACT, *flags.formats):
                if name != EXACT:
                    here.kv = quantised(exact, *parse_format(name, config.head_dim, "float16"))
                wrong = question.first_wrong(here.likeliest(masked.everything))
                found.append([task, index, large, factor, name, size, wrong])
    return masked.Rows(found)


def check(flags: ChannelFlags) -> None:
    config = check_model(flags.model, [flags.context])
    if not config.qk_norm:
        raise ValueError(f"--model={flags.model} must normalise queries and keys, as Qwen3 does")
    for name in flags.formats:
        parse_format(name, config.head_dim, "float16")
    for task in flags.tasks:
        masked.questions_of(flags, task, flags.context)


def measure(flags: ChannelFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    for fields in masked.fields_of(run, of_prompt, flags, flags.tasks, flags.num_prompts):
        yield Row(*fields)


def values(_: ChannelFlags, rows: Sequence[Row]) -> Values:
    """right_FORMAT_LARGE_FACTOR, right answers in percent, where FORMAT may be `exact`;
    ratio_LARGE_FACTOR, the mean of `Row.ratio`."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.format}_{row.large}_{row.factor}", []).append(row)
    numbers: dict[str, float | None] = {}
    for name, mine in found.items():
        numbers[f"right_{name}"] = masked.percent_right(row.first_wrong for row in mine)
        numbers[f"ratio_{name.partition('_')[2]}"] = float(np.mean([row.ratio for row in mine]))
    return numbers


def lost(v: Mapping[str, float], format: str, large: str) -> dict[int, float]:
    """Points that the format loses, by ascending factor."""
    start = f"right_{EXACT}_{large}_"
    factors = sorted(int(each.removeprefix(start)) for each in v if each.startswith(start))
    return {x: v[f"{start}{x}"] - v[f"right_{format}_{large}_{x}"] for x in factors}


def holds(v: Mapping[str, float]) -> bool:
    alone = [lost(v, "K4V4", large)[1] <= NEAR for large in LARGE]
    parted = [
        any(x >= LOSS and other[factor] <= NEAR for factor, x in lost(v, weak, large).items())
        for large, weak, strong in ((KEYS, "K4V8", "K8V4"), (VALUES, "K8V4", "K4V8"))
        for other in [lost(v, strong, large)]
    ]
    return all(alone + parted)


def draw(flags: ChannelFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, factors = values(flags, rows), sorted(flags.factors)
    for axes, large in zip(figure.subplots(1, 2, sharey=True), LARGE):
        for name in (EXACT, *flags.formats):
            right = [numbers[f"right_{name}_{large}_{factor}"] or 0.0 for factor in factors]
            axes.plot(factors, right, marker="o", ls="--" if name == EXACT else "-", label=name)
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel=f"factor of two channels of the {large}", ylim=(-3, 103), xticks=factors,
            xticklabels=[str(each) for each in factors],
        )  # fmt: skip
    figure.axes[0].set(ylabel="right answers (%)")
    figure.axes[0].legend(frameon=False)


STUDY = Study(
    __file__,
    title="Page formats and large channels (DiffKV Fig. 8)",
    kind="analogue",
    claim="without large channels four bits are enough for keys and values; with them keys, or "
    "values, can need eight",
    rule=f"at factor 1 K4V4 loses at most {NEAR} points. At some factor of keys K4V8 loses {LOSS} "
    f"or more, and K8V4 at most {NEAR}; at some factor of values K8V4 loses {LOSS} or more, and "
    f"K4V8 at most {NEAR}",
    holds=holds,
    setting=Setting(
        "the judge model, three tasks at 2,048 tokens; a forward pass",
        "the paper has no such figure, and suspects the number of query heads of a KV head",
        "reduced",
    ),
    flags=ChannelFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 1, "context": 1024, "factors": (1, 16)},
    minutes=(1, 20),
    size=(9, 4),
)

if __name__ == "__main__":
    STUDY.run()
