"""DiffKV's attention, page management and engine beside the dense policy (DiffKV §7.3).

    python -m experiments.bench.diffkv
    python -m experiments.bench.diffkv --sections=kernel_speed,compaction

The sections are the performance figures of experiments/figures/diffkv, which say what they measure:

kernel_speed      decode attention by format and length (Fig. 15a)
compaction        page management on the device and on the host, exact (Fig. 13)
step_breakdown    where a step's time goes (Fig. 14)
batch_latency     a batch of eight from its prompts to its last tokens, by length (Fig. 15b)
throughput        batch and throughput in a fixed number of bytes (Fig. 17)
dynamic_workload  latency by request rate (Fig. 16)

Accuracy is not measured here: a few prompts would tell nothing of two points. --accuracy_study
names the folder that `experiments.figures.diffkv.accuracy_memory` has written, and
`accuracy_drop_points` is what the system --accuracy_system of it loses against 16 bits over all of
its prompts.

Claims: decode_over_dense at most 0.9; kv_memory_fraction at most 0.40; batch_gain_over_ideal at
least 0.80; compaction exact with 8,192 heads. Writes to --output_dir: report.json, summary.json
with null for what was not measured, and a CSV and a plot for each section.
"""

from pathlib import Path

from absl import flags

from experiments.figures.diffkv import (
    batch_latency,
    compaction,
    dynamic_workload,
    kernel_speed,
    performance,
    step_breakdown,
    throughput,
)
from experiments.lib.program import Options, Program, refusals
from experiments.lib.text_files import read_csv

SECTIONS = {
    module.SECTION.name: module.SECTION
    for module in (
        kernel_speed, compaction, step_breakdown, batch_latency, throughput, dynamic_workload
    )
}  # fmt: skip
NUMBERS = (
    "kv_memory_fraction", "batch_gain", "batch_gain_over_ideal", "compaction_exact_heads",
    "compaction_share_8b", "accuracy_drop_points", "decode_over_dense",
)  # fmt: skip
ALL = "all"


def accuracy_drop(folder: str, system: str) -> dict[str, float | None]:
    """Points that a system of the study lost, and the most that the paired 95 % interval allows;
    None without a study. ValueError for one without that system."""
    if not folder:
        return {"accuracy_drop_points": None}
    columns = "system", "task", "prompts", "difference", "difference_low"
    path = Path(folder) / "accuracy.csv"
    rows = [row for _, _, row in read_csv(path, columns)]
    found = [row for row in rows if row["system"] == system]
    pooled = [row for row in found if row["task"] == ALL or len(found) == 1]
    if not pooled:
        known = ", ".join(dict.fromkeys(row["system"] for row in rows))
        raise ValueError(f"--accuracy_system must be one of {known}, not {system!r}")
    try:
        return {
            "accuracy_drop_points": -float(pooled[0]["difference"]),
            "accuracy_drop_most": -float(pooled[0]["difference_low"]),
            "accuracy_prompts": float(pooled[0]["prompts"]),
        }
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def main(options: Options) -> int:
    with refusals():
        if not options.sections or set(options.sections) - set(SECTIONS):
            raise ValueError(f"--sections are some of {', '.join(SECTIONS)}")
        chosen = [SECTIONS[name] for name in options.sections]
        for section in chosen:
            section.check(options)
        accuracy = accuracy_drop(options.accuracy_study, options.accuracy_system)
    numbers: dict[str, float | None] = dict.fromkeys(NUMBERS)
    return performance.run(options, chosen, "bench_diffkv", numbers | accuracy)


def define_flags() -> None:
    performance.define_flags()
    flags.DEFINE_list("sections", list(SECTIONS), f"some of {', '.join(SECTIONS)}")
    flags.DEFINE_string("accuracy_study", "", "folder of results of the accuracy study; or none")
    flags.DEFINE_string("accuracy_system", "DiffKV 1/0", "a system of it: alpha_h/alpha_l")
    throughput.define_alpha_flags()
    for module in (kernel_speed, compaction, step_breakdown):
        module.define_flags()
    for engines in (batch_latency, throughput, dynamic_workload):
        engines.define_own_flags()


FILES = tuple(file for section in SECTIONS.values() for file in section.files)
PROGRAM = Program(main, define_flags, "results/bench_diffkv", FILES)

if __name__ == "__main__":
    PROGRAM.run()
