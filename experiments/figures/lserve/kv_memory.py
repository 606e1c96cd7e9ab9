"""Bytes of keys and values by their format and the share of streaming heads (LServe §3.1, §3.2).

python -m experiments.figures.lserve.kv_memory

For each format: bytes of a token in a KV head, keys and values together, with scales, zero points
and statistics of keys; bytes that a sequence of --context tokens holds in all layers while it
decodes; and the same as a share of a cache of 16-bit pages without any of this. Nothing is run: the
numbers are those by which the policy makes its pools. Writes to --output_dir: formats.csv,
report.json and summary.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from experiments.lib import run_record
from experiments.lib.flags import define_path
from experiments.lib.program import Options, Program, refusals
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache import lserve
from paged.kv_cache.lserve.gates import Gates
from paged.kv_cache.lserve.layout import layout_of
from paged.kv_cache.policy import ShardedModel

BITS = (16, 8, 4)
SHARES = (0.0, 0.5)
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Row:
    """bits: of an element; share: of KV heads that stream. The bytes of a token are those of one
    KV head, averaged over a page; 0 where no head is of the kind."""

    bits: int
    share: float
    dense_token_bytes: float
    streaming_token_bytes: float
    sequence_bytes: int
    over_16_bits: float


def some_gates(model: ModelConfig) -> Gates:
    """Gates by which any share of the heads is spread over layers and heads."""
    L, K = model.num_layers, model.num_kv_heads
    return tuple(tuple((layer + head) % K / K for head in range(K)) for layer in range(L))


def run(model: ModelConfig, context: int, page_size: int, budget: int) -> list[Row]:
    """A row for each format and share. Raises ValueError for what cannot work."""
    return [_row(model, context, page_size, budget, b, s) for s in SHARES for b in BITS]


def _row(
    model: ModelConfig, context: int, page_size: int, budget: int, bits: int, share: float
) -> Row:
    options = lserve.Options(
        budget=budget, kv_bits=bits, streaming_share=share, gates=some_gates(model)
    )
    config = EngineConfig(
        policy="lserve", policy_options=options, page_size=page_size, max_num_seqs=1,
        max_model_len=context, kv_cache_tokens=2 * context,
    )  # fmt: skip
    sharded = ShardedModel.split(model, dtype=DTYPE)
    lserve.check(config, model)
    layout = layout_of(config, sharded)
    dense, streaming = layout.unit_bytes
    pages = -(-context // page_size)
    held = pages * dense + min(pages, layout.window) * streaming
    per_token = [page / page_size for page in layout.page_bytes]
    return Row(
        bits, share, per_token[0], per_token[1] if layout.streams else 0.0, held,
        held / (context * sharded.kv_token_bytes()),
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for row in rows:
        name = f"kv{row.bits}_streaming_{100 * row.share:.0f}"
        numbers[f"dense_token_bytes_{name}"] = row.dense_token_bytes
        numbers[f"memory_over_16_bits_{name}"] = row.over_16_bits
    return numbers


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':6}{'streaming':>10}{'bytes of a token and head':>28}{'a sequence':>13}{'':>9}"]
    for row in rows:
        of_token = f"{row.dense_token_bytes:,.1f}"
        if row.streaming_token_bytes:
            of_token += f" and {row.streaming_token_bytes:,.1f}"
        lines.append(
            f"KV{row.bits:<4}{row.share:>10.0%}{of_token:>28}"
            f"{row.sequence_bytes / 2**20:>9,.0f} MiB{row.over_16_bits:>8.3f}×"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    with refusals():
        model = checkpoint.load_config(options.model)
        rows = run(model, options.context, options.page_size, options.budget)
    folder = Path(options.output_dir)
    facts = {"experiment": "kv_memory", "flags": vars(options), "rows": rows}
    run_record.write_csv(folder, "formats.csv", rows)
    run_record.write_json(folder, "report.json", facts | run_record.describe_environment())
    run_record.write_summary(folder, summary(rows))
    print(table(rows))
    print(f"(a sequence of {options.context:,} tokens; × a cache of {DTYPE} pages alone)")


def define_flags() -> None:
    define_path("model", "configs/models/llama-3-8b", "whose shape; no weights are read")
    flags.DEFINE_integer("context", 65536, "tokens of the sequence", lower_bound=2)
    flags.DEFINE_integer("page_size", 64, "tokens of a page", lower_bound=1)
    flags.DEFINE_integer("budget", 4096, "tokens that a query of a dense head reads", lower_bound=1)


PROGRAM = Program(main, define_flags, "results/lserve_kv_memory", ("formats.csv",))

if __name__ == "__main__":
    PROGRAM.run()
