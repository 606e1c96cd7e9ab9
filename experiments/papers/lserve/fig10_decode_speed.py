"""Decode steps over the length, by system and kind of sparsity (LServe Figs. 10, 16, Table 7), in
simulated time.

python -m experiments.papers.lserve.fig10_decode_speed

Each system decodes one sequence on an A100. Table 7 has vLLM and LServe on Llama-3-8B. Fig. 16
ablates LServe over its own dense kernels (`qserve`). The decode attention of LServe and QServe is
parallel over heads only (§2.2), and is slow for one sequence with 8 KV heads. 'split' rows assume
that a head's tokens are split over multiprocessors. Neither assumption gives all numbers of the
paper. With split heads the dense kernels are only 1.5 times slower than LServe, and LServe's step
hardly grows with the length, but Table 7's step grows. With parallelism over heads only, static
sparsity gains nothing for one sequence, but in Fig. 16 it gains up to 1.7 times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import gpu
from experiments.papers.lserve.gpu import DECODE, Row, SimulatedFlags, thousands
from experiments.study import Setting, Study, Values

CONTEXTS = tuple(1024 * n for n in (64, 96, 128, 160, 192, 224, 256, 320))
SYSTEMS = ("vllm", "minference", "duo", "qserve", "static", "dynamic", "lserve")
TAKEN_APART = ("qserve", "static", "dynamic", "lserve")
MODELS = ("llama-3-8b", "llama-2-7b")
TABLE_7 = {
    "vllm": (12.51, 14.49, 16.34, 18.20, 21.73, 21.96, 23.72, 27.45),
    "lserve": (11.49, 12.05, 12.74, 12.88, 13.30, 13.73, 14.20, 15.10),
}
# An A100-80's memory limits Llama-2-7B: its tokens take four times the KV memory of Llama-3-8B's.
LONGEST = {"llama-3-8b": gpu.LONGEST, "llama-2-7b": 131072}


@dataclass(frozen=True)
class DecodeFlags(SimulatedFlags):
    contexts: tuple[int, ...] = flag(CONTEXTS, "tokens", least=64, most=gpu.LONGEST)
    models: tuple[str, ...] = flag(MODELS, "that decode", choices=MODELS)


def measure(flags: DecodeFlags, _) -> Iterator[Row]:
    for model in flags.models:
        contexts = [n for n in flags.ascending if n <= LONGEST[model]]
        yield from gpu.rows(flags, model, DECODE, SYSTEMS, contexts)
    yield from gpu.rows(flags, MODELS[0], DECODE, TAKEN_APART, flags.ascending, split=True)


@gpu.with_knobs(
    "over_vllm_llama-3-8b", "over_vllm_llama-2-7b", "lserve_over_dense_256k",
    "lserve_over_dense_split_256k",
)  # fmt: skip
def values(rows: Sequence[Row]) -> Values:
    """SYSTEM_ms_LENGTH: milliseconds of a step (Table 7).
    over_SYSTEM_MODEL: LServe's speedup, mean over the lengths.
    SYSTEM_over_dense_256k, SYSTEM_over_dense_split_256k: speedup over dense kernels (Fig. 16).
    """
    ms = {(row.model, row.system, row.context): row.ms for row in rows}
    numbers: dict[str, float | None] = {}
    for system in (*TABLE_7, "lserve split"):
        for row in rows:
            if (row.model, row.system) == (MODELS[0], system):
                name = system.replace(" ", "_")
                numbers[f"{name}_ms_{thousands(row.context)}"] = row.ms
    for model in dict.fromkeys(row.model for row in rows):
        contexts = dict.fromkeys(row.context for row in rows if row.model == model)
        for system in SYSTEMS[:4]:
            ratios = [ms[model, system, n] / ms[model, "lserve", n] for n in contexts]
            numbers[f"over_{system}_{model}"] = float(np.mean(ratios))
    for kind in ("", " split"):
        for system in TAKEN_APART[1:]:
            dense, ours = (ms.get((MODELS[0], s + kind, 262144)) for s in ("qserve", system))
            name = f"{system}_over_dense{kind.replace(' ', '_')}_256k"
            numbers[name] = dense / ours if dense and ours else None
    return numbers


PAPER: dict[str, float | tuple[float, float]] = {
    "over_vllm_llama-3-8b": 1.5, "over_vllm_llama-2-7b": 2.0, "static_over_dense_256k": (1.0, 1.7),
    "dynamic_over_dense_256k": 4.5, "lserve_over_dense_256k": 7.7,
    "static_over_dense_split_256k": (1.0, 1.7), "dynamic_over_dense_split_256k": 4.5,
    "lserve_over_dense_split_256k": 7.7,
}  # fmt: skip
PAPER |= {
    f"{system}_ms_{thousands(n)}": ms
    for system, table in TABLE_7.items()
    for n, ms in zip(CONTEXTS, table)
}
STUDY = Study(
    __file__,
    title="Decode steps over the length (LServe Figs. 10, 16, Table 7)",
    kind="simulated",
    claim="LServe decodes 1.5 times as fast as vLLM on Llama-3-8B and 2.0 times on Llama-2-7B on "
    "average, and 7.7 times as fast as its own dense kernels at 256k",
    rule="the means over the lengths at least 1.45 (Table 7's is 1.46) and 2.0, and LServe over "
    "its dense kernels at least 7.7",
    holds=lambda v: v["over_vllm_llama-3-8b"] >= 1.45 and v["over_vllm_llama-2-7b"] >= 2
    and v["lserve_over_dense_256k"] >= 7.7,
    setting=Setting(
        "Llama-3-8B and Llama-2-7B, one sequence, an A100-80; " + gpu.SETTING,
        gpu.DIFFERS + "; Minitron-4B and the L40S are left out (--gpu=l40s)",
        "paper",
    ),
    flags=DecodeFlags,
    measure=measure,
    values=values,
    paper=PAPER,
    draw=gpu.draw,
    tolerance=0.15,
    size=(11, 4.6),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
