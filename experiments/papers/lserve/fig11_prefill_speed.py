"""Prefill of whole prompts by length and system (LServe §4.3, Fig. 11), and LServe beside Quest in
both stages (§4.4, Table 5), in simulated time.

python -m experiments.papers.lserve.fig11_prefill_speed

One prompt is prefilled in one step on an A100. From 128k on LServe's dense heads attend as in
MInference. Their page selection takes no time in this simulation, and at 256k they read only 4,096
tokens. LServe is therefore ten times as fast as vLLM; the paper measures at most 2.9. `static` is
LServe without sparse prefill in dense heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import gpu
from experiments.papers.lserve.gpu import DECODE, PREFILL, Row, SimulatedFlags, thousands
from experiments.study import Setting, Study, Values

MODELS = ("llama-3-8b", "llama-2-7b")
SYSTEMS = ("vllm", "qserve", "minference", "duo", "static", "lserve")
CONTEXTS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128, 256))
SPARSE_FROM = 131072  # least tokens of a prompt that is prefilled sparsely (§4.3)
QUEST_CONTEXTS = CONTEXTS[:5]
# Prefill in seconds, decode in milliseconds. At 64k Quest is out of memory.
TABLE_5 = {
    (PREFILL, "quest"): (0.51, 0.82, 1.62, 3.61), (DECODE, "quest"): (13.13, 13.58, 14.08, 14.86),
    (PREFILL, "lserve"): (0.24, 0.49, 1.08, 2.32, 5.27),
    (DECODE, "lserve"): (10.02, 10.29, 10.22, 10.24, 11.54),
}  # fmt: skip


@dataclass(frozen=True)
class PrefillFlags(SimulatedFlags):
    contexts: tuple[int, ...] = flag(CONTEXTS, "tokens", least=64, most=gpu.LONGEST)


def measure(flags: PrefillFlags, _) -> Iterator[Row]:
    dense = [n for n in flags.ascending if n < SPARSE_FROM]
    sparse = [n for n in flags.ascending if n >= SPARSE_FROM]
    for model in MODELS:
        yield from gpu.rows(flags, model, PREFILL, SYSTEMS, dense)
        yield from gpu.rows(flags, model, PREFILL, SYSTEMS[:-1], sparse)
        for row in gpu.rows(flags, model, PREFILL, ("lserve_minference",), sparse):
            yield replace(row, system="lserve")
    contexts = [n for n in flags.ascending if n in QUEST_CONTEXTS]
    in_memory = [n for n in contexts if n != QUEST_CONTEXTS[-1]]
    yield from gpu.rows(flags, MODELS[1], PREFILL, ("quest",), in_memory)
    yield from gpu.rows(flags, MODELS[1], DECODE, ("quest",), in_memory)
    yield from gpu.rows(flags, MODELS[1], DECODE, ("lserve",), contexts)


PAPER: dict[str, float | tuple[float, float]] = {
    "prefill_over_vllm_llama-2-7b": 1.8, "most_over_vllm_llama-3-8b": (1.0, 2.9),
    "static_most_over_vllm_llama-3-8b": (1.0, 2.9),
}  # fmt: skip
PAPER |= {
    f"{stage}_{'s' if stage == PREFILL else 'ms'}_{system}_{thousands(n)}": value
    for (stage, system), column in TABLE_5.items()
    for n, value in zip(QUEST_CONTEXTS, column)
}
PAPER |= {
    f"{stage}_over_quest_{thousands(n)}": ratio
    for stage, ratios in ((PREFILL, (2.1, 1.7, 1.5, 1.6)), (DECODE, (1.3, 1.3, 1.4, 1.5)))
    for n, ratio in zip(QUEST_CONTEXTS, ratios)
}


@gpu.with_knobs(*(name for name in PAPER if "over_quest" in name or "over_vllm" in name))
def values(rows: Sequence[Row]) -> Values:
    """Numbers by model, system and length.

    prefill_over_SYSTEM_MODEL, most_over_SYSTEM_MODEL: LServe's speedup, mean and largest over the
        lengths.
    static_over_vllm_MODEL, static_most_over_vllm_MODEL: speedup of `static`, mean and largest.
    STAGE_UNIT_SYSTEM_LENGTH, STAGE_over_quest_LENGTH: times and speedups of Table 5.
    """
    ms = {(row.model, row.stage, row.system, row.context): row.ms for row in rows}
    numbers: dict[str, float | None] = {}

    def ratios(model: str, above: str, below: str) -> list[float]:
        """Prefill time of `above` over prefill time of `below`, at each length that both have."""
        contexts = [n for m, stage, s, n in ms if (m, stage, s) == (model, PREFILL, below)]
        both = [n for n in contexts if (model, PREFILL, above, n) in ms]
        return [ms[model, PREFILL, above, n] / ms[model, PREFILL, below, n] for n in both]

    for model in MODELS:
        for system in SYSTEMS[:4]:
            over = ratios(model, system, "lserve")
            numbers[f"prefill_over_{system}_{model}"] = float(np.mean(over))
            numbers[f"most_over_{system}_{model}"] = max(over)
        over = ratios(model, "vllm", "static")
        numbers[f"static_over_vllm_{model}"] = float(np.mean(over))
        numbers[f"static_most_over_vllm_{model}"] = max(over)
    for model, stage, system, context in ms:
        if model == MODELS[1] and system in ("quest", "lserve") and context in QUEST_CONTEXTS:
            unit = "s" if stage == PREFILL else "ms"
            seconds = ms[model, stage, system, context] / (1e3 if stage == PREFILL else 1)
            numbers[f"{stage}_{unit}_{system}_{thousands(context)}"] = seconds
            if system == "quest":
                ratio = ms[model, stage, "quest", context] / ms[model, stage, "lserve", context]
                numbers[f"{stage}_over_quest_{thousands(context)}"] = ratio
    return numbers


STUDY = Study(
    __file__,
    title="Prefill by length and system, and Quest (LServe Fig. 11, Table 5)",
    kind="simulated",
    claim="LServe prefills up to 2.9 times as fast as vLLM, 1.8 times on Llama-2-7B on average, "
    "and is faster than Quest in prefill (1.5 to 2.1 times) and decode (1.3 to 1.5 times)",
    rule="on Llama-2-7B at least 1.8 on average, and at least 1.5 and 1.3 times Quest everywhere",
    holds=lambda v: v["prefill_over_vllm_llama-2-7b"] >= 1.8
    and all(v[f"prefill_over_quest_{thousands(n)}"] >= 1.5 for n in QUEST_CONTEXTS[:4])
    and all(v[f"decode_over_quest_{thousands(n)}"] >= 1.3 for n in QUEST_CONTEXTS[:4]),
    setting=Setting(
        "Llama-3-8B and Llama-2-7B, one prompt, an A100-80; " + gpu.SETTING,
        gpu.DIFFERS + "; MInference's estimates of what to read take no time",
        "paper",
    ),
    flags=PrefillFlags,
    measure=measure,
    values=values,
    paper=PAPER,
    draw=gpu.draw,
    tolerance=0.15,
    size=(12, 4.6),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
