"""The time of a batch of eight from its prompts to its last tokens (DiffKV Fig. 15b), in simulated
time.

python -m experiments.papers.diffkv.fig15b_batch_latency

Eight problems as long as MATH's arrive at once and generate until each sequence has --tokens
tokens; `vllm` has pages of 16 bits. The paper does not give the length of its prompts. Longer
prompts leave fewer decode steps, and only decode steps read fewer bytes under DiffKV.

Weights and the host take most of a step of eight sequences, and take the same time in both systems.
`bound` is the speedup of the last step if attention took no time; the paper's speedup is larger. At
the time, vLLM's kernel had a thread block for each query head, and each thread block read the whole
KV head. `vllm by query head` is vLLM without a cache that serves these repeated reads; it explains
a part of the paper's factor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots
from experiments.lib.knobs import FACTORS
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import gpu
from experiments.papers.diffkv.gpu import DIFFKV, SERVERS, VLLM, SimulatedFlags
from experiments.papers.drawing import panels
from experiments.study import Setting, Study, Values

BY_QUERY_HEAD = "vllm by query head"
BATCH, MODELS = 8, ("llama-3-8b", "qwen2.5-7b", "qwen2.5-32b", "llama-3-70b")


@dataclass(frozen=True)
class BatchFlags(SimulatedFlags):
    models: tuple[str, ...] = flag(MODELS, "that serve", choices=tuple(SERVERS))
    tokens: tuple[int, ...] = flag((1024, 2048, 4096), "of each sequence", least=2, most=8192)
    prompt: int = flag(160, "of these that its prompt has", least=1)

    def __post_init__(self):
        super().__post_init__()
        least = self.prompt + 2  # two decode steps, because the last token is never an input
        if min(self.tokens) < least:
            raise ValueError(f"--tokens must be at least {least}, two more than --prompt")


@dataclass(frozen=True)
class Row:
    """A batch.

    tokens: final number of tokens of each sequence.
    knob: the changed constant, a name of `knobs.FACTORS`.
    seconds: time of the batch.
    step_ms, attention_ms: time of the last step, and of its attention.
    """

    model: str
    system: str
    tokens: int
    knob: str
    seconds: float
    step_ms: float
    attention_ms: float


def simulate(flags: BatchFlags, model: str, system: str, tokens: int, knob: str) -> Row:
    attention, host = FACTORS[knob]
    server = SERVERS[model]
    kept = VLLM if system == BY_QUERY_HEAD else system
    config = gpu.config_of(kept, server, flags.gpu, BATCH, tokens)
    cost = gpu.clock_of(flags.changed(attention, host), server, config)
    prompts = np.full(BATCH, flags.prompt)
    contexts = flags.prompt + 1 + np.arange(tokens - flags.prompt)[:, None] + np.zeros_like(prompts)
    held = gpu.held(flags, config, cost.model, prompts, contexts)
    of_prompts = None if held is None else held[0]
    first_s = cost.dense_s(BATCH * flags.prompt, BATCH)
    first_s += float(cost.attention_s(prompts, prompts, of_prompts))
    first_s = float(cost.host.step_s(first_s, BATCH, server.gpus))
    of_steps = cost.decodes_s(contexts, np.full(BATCH, -1), held)
    attention_s = cost.attention_s(contexts, np.ones_like(contexts), held)
    if system == BY_QUERY_HEAD:
        read = cost.layout.work(contexts, np.ones_like(contexts))["decode"]
        group = server.config.num_heads // server.config.num_kv_heads
        again = replace(read, bytes=group * read.bytes)
        more_s = cost.costs.part_s(again) - cost.costs.part_s(read)
        more_s = more_s * server.config.num_layers
        of_steps, attention_s = of_steps + more_s, attention_s + more_s
    # The prefill samples the first token, and the last token is never an input.
    return Row(
        model, system, tokens, knob, first_s + float(of_steps[:-1].sum()), 1e3 * of_steps[-2],
        1e3 * attention_s[-2],
    )  # fmt: skip


def measure(flags: BatchFlags, _) -> Iterator[Row]:
    for model in flags.models:
        for tokens in sorted(set(flags.tokens)):
            for knob in FACTORS:
                for system in (VLLM, BY_QUERY_HEAD, DIFFKV):
                    yield simulate(flags, model, system, tokens, knob)


def values(flags: BatchFlags, rows: Sequence[Row]) -> Values:
    """Ratios NAME_MODEL_TOKENS; at the greatest length also NAME_MODEL_TOKENS_KNOB.

    batch_speedup, step_speedup: speedup of DiffKV over 16 bits in the batch and in its last step.
    bound: speedup of the last step with 16 bits if its attention took no time.
    by_query_head: speedup of DiffKV over vLLM by query head in the batch.
    """
    by = {(row.model, row.tokens, row.knob, row.system): row for row in rows}
    numbers: dict[str, float | None] = {}
    for model, tokens, knob, system in by:
        if system == DIFFKV and (not knob or tokens == max(flags.tokens)):
            name = f"{model}_{tokens}" + (f"_{knob}" if knob else "")
            of = {each: by[model, tokens, knob, each] for each in (VLLM, BY_QUERY_HEAD, DIFFKV)}
            dense, ours = of[VLLM], of[DIFFKV]
            numbers[f"batch_speedup_{name}"] = dense.seconds / ours.seconds
            numbers[f"step_speedup_{name}"] = dense.step_ms / ours.step_ms
            numbers[f"bound_{name}"] = dense.step_ms / (dense.step_ms - dense.attention_ms)
            numbers[f"by_query_head_{name}"] = of[BY_QUERY_HEAD].seconds / ours.seconds
    return numbers


def draw(_: BatchFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, mine in panels(figure, [row for row in rows if not row.knob], "model"):
        plots.lines(axes, mine, "tokens", "seconds", "system", "tokens of a sequence", "s")


STUDY = Study(
    __file__,
    title="A batch of eight from its prompts to its last tokens (DiffKV Fig. 15b)",
    kind="simulated",
    claim="a batch of eight is 1.4 to 1.6 times as fast as with vLLM at 4,096 tokens",
    rule="at least 1.4 times at 4,096 tokens, with every model",
    holds=lambda v: all(v[f"batch_speedup_{model}_4096"] >= 1.4 for model in MODELS),
    setting=Setting(
        "Llama-3-8B and Qwen2.5-7B on one, Qwen2.5-32B on two, Llama-3-70B on four; " + gpu.SETTING,
        "prompts of 160 tokens, the paper does not say how long its are; vLLM's attention reads "
        "each key once, 'by query head' once a query head",
        "paper",
    ),
    flags=BatchFlags,
    measure=measure,
    check=lambda flags: gpu.check(flags, flags.models, (DIFFKV,), 0),
    values=values,
    paper={f"batch_speedup_{model}_4096": (1.4, 1.6) for model in MODELS},
    draw=draw,
    quick={"models": MODELS[:1]},
    minutes=(0.2, 0.5),
    size=(12, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
