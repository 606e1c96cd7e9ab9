"""What the heads that were added in growing do (experiments/train/grow.py).

python -m experiments.papers.lserve.added_heads

Shares of streaming heads, and means over heads, say little about a model that does not need many of
its heads. A question and its right answer pass through the model together, with all heads, without
the added ones, and without the inherited ones. The outputs of missing heads are zeros. An answer is
right if each of its tokens after the first is the likeliest after the right tokens before it.
"""

import functools
from collections.abc import Iterator, Sequence
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
from experiments.papers.lserve.gates import RETRIEVAL_GATE, gates_of
from experiments.study import Run, Setting, Study, Values
from experiments.train import grow
from models import checkpoint
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend

LOSS = 10.0  # percentage points
OFF = NOTHING, ADDED, INHERITED = "nothing", "added", "inherited"  # KV heads


@dataclass(frozen=True)
class HeadFlags(Flags):
    model: str = flag("models/judge_grown", "a folder", path=True)
    grown_from: str = flag("bundled", "the smaller model: 'bundled', or a folder", path=True)
    gates: str = flag("models/judge_grown/duo_gates.json", "as --lserve_gates", path=True)
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values", "cot"), "tasks of experiments/tasks/tasks.py"
    )
    context: int = flag(1024, "tokens of prompt and answer", least=256)
    num_prompts: int = flag(25, "prompts of each task", least=1)
    seed: int = flag(7, "of the prompts", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(tasks=self.tasks)


@dataclass(frozen=True)
class Row:
    """A question with heads off.

    off: one of OFF.
    added_norm, inherited_norm: norm of what a KV head adds to the residual stream, mean over tokens
        and heads; 0 for heads that are off.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    task: str
    prompt: int
    off: str
    added_norm: float
    inherited_norm: float
    first_wrong: int


@partial(jax.jit, static_argnums=1)
def _forward(params, config: ModelConfig, tokens_T, on_LxK):
    """The likeliest token [T] after each token; the norms [L, T, K] of what KV heads write."""
    T, K = len(tokens_T), config.num_kv_heads
    shape = config.hidden_size, K, config.num_heads // K, config.head_dim
    writes = jnp.stack([layer["wo"].reshape(shape) for layer in params["layers"]])
    exact = causal_attend(config)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, norms):
        out, _ = exact(layer, q_TxHxD, k_TxKxD, v_TxKxD, None)
        heads = out.reshape(T, *shape[1:]) * on_LxK[layer][:, None, None]
        written = jnp.einsum("tkgd,ekgd->tke", heads, writes[layer])
        norms = norms.at[layer].set(jnp.linalg.norm(written, axis=-1))
        return heads.reshape(out.shape), norms

    model, norms = family(config), jnp.zeros((config.num_layers, T, K))
    hidden, norms = model.forward(params, config, tokens_T, jnp.arange(T), attend, norms)
    return model.logits(params, config, hidden).argmax(-1), norms


def row_of(
    params, config: ModelConfig, question: masked.Question, off: str, inherited_LxK: np.ndarray
) -> tuple[float, float, int]:
    """The fields of a row after `off`."""
    everything = np.ones_like(inherited_LxK)
    on = {NOTHING: everything, ADDED: inherited_LxK, INHERITED: ~inherited_LxK}
    tokens = [*question.prompt, *question.answer[:-1]]
    likeliest, norms = _forward(params, config, masked.padded(tokens), on[off])
    mean_LxK = np.asarray(norms)[:, : len(tokens)].mean(1)
    answer = np.asarray(likeliest)[len(question.prompt) : len(tokens)]
    added, ours = (float(mean_LxK[each].mean()) for each in (~inherited_LxK, inherited_LxK))
    return added, ours, question.first_wrong(answer)


@functools.lru_cache(maxsize=1)
def heads_of(flags: HeadFlags) -> tuple[np.ndarray, np.ndarray]:
    """([L, K] inherited, [L, K] gates). Raises ValueError for a model whose sizes cannot be grown
    from the smaller one's, and for gates that are not the model's."""
    config = checkpoint.load_config(flags.model)
    inherited = grow.inherited(checkpoint.load_config(flags.grown_from), config)
    if inherited.all():
        raise ValueError(f"--model={flags.model} has no more heads than --grown_from")
    return inherited, np.array(gates_of(flags.model, flags.gates))


def of_prompt(flags: HeadFlags, task: str, index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    inherited, _ = heads_of(flags)
    question = masked.questions_of(flags, task, flags.context)[index]
    return masked.Rows(
        [[task, index, off, *row_of(params, config, question, off, inherited)] for off in OFF]
    )


def check(flags: HeadFlags) -> None:
    check_model(flags.model, [flags.context])
    heads_of(flags)
    for task in flags.tasks:
        masked.questions_of(flags, task, flags.context)


def measure(flags: HeadFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    for fields in masked.fields_of(run, of_prompt, flags, flags.tasks, flags.num_prompts):
        yield Row(*fields)


def values(flags: HeadFlags, rows: Sequence[Row]) -> Values:
    """right_OFF: percent of right answers with these heads off. norm_added, norm_inherited: norms
    with no head off. gate_added, gate_inherited: mean gates. NAME_heads: numbers of KV heads; local
    ones have gates below RETRIEVAL_GATE."""
    inherited, gates = heads_of(flags)
    local = gates < RETRIEVAL_GATE
    plain = [row for row in rows if row.off == NOTHING]
    return {
        f"right_{off}": masked.percent_right(row.first_wrong for row in rows if row.off == off)
        for off in OFF
    } | {
        "norm_added": float(np.mean([row.added_norm for row in plain])),
        "norm_inherited": float(np.mean([row.inherited_norm for row in plain])),
        "added_heads": int((~inherited).sum()), "inherited_heads": int(inherited.sum()),
        "gate_added": float(gates[~inherited].mean()),
        "gate_inherited": float(gates[inherited].mean()),
        "local_added_heads": int((~inherited & local).sum()),
        "local_inherited_heads": int((inherited & local).sum()),
    }  # fmt: skip


def draw(flags: HeadFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, (right, norm) = values(flags, rows), figure.subplots(1, 2)
    right.barh(OFF, [numbers[f"right_{off}"] or 0.0 for off in OFF], color="#2f6b9a")
    right.set(xlabel="right answers (%)", ylabel="heads off", xlim=(0, 100))
    groups = ADDED, INHERITED
    norm.barh(groups, [numbers[f"norm_{each}"] or 0.0 for each in groups], color="#e0a030")
    norm.set(xlabel="norm of a head's output, mean", ylabel="heads")


STUDY = Study(
    __file__,
    title="What the added heads of the former judge do",
    kind="analogue",
    claim="answers need the heads that were added in growing",
    rule=f"without the added heads {LOSS:g} points or more are lost",
    holds=lambda v: v["right_added"] <= v[f"right_{NOTHING}"] - LOSS,
    setting=Setting(
        "the former judge, four tasks at 1,024 tokens; a forward pass",
        "the paper has no such row",
        "reduced",
    ),
    flags=HeadFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 1},
    minutes=(1, 10),
    size=(11, 3),
)

if __name__ == "__main__":
    STUDY.run()
