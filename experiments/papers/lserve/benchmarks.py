"""LServe's tables on public benchmarks: dense attention and LServe on the user's model and problems
(§4.2)."""

from dataclasses import dataclass
from typing import Any

from experiments import accuracy
from experiments.accuracy import AccuracyFlags
from experiments.lib.typed_flags import flag
from experiments.papers.lserve.gates import gates_of

DENSE = "Dense"
LLAMA_3 = "gradientai/Llama-3-8B-Instruct-Gradient-1048k"
GATES = "results/gates/gates.json"


@dataclass(frozen=True)
class LServeFlags(AccuracyFlags):
    contexts: tuple[int, ...] = flag((32768,), "the longest prompt and answer, in tokens")
    gates: str = flag(GATES, "as --lserve_gates; of the same model, by duo_gates", path=True)
    share: float = flag(0.5, "of the KV heads that stream", least=0, most=1)
    budgets: tuple[int, ...] = flag((4096,), "tokens that a query of a dense head reads", least=192)
    kv_bits: int = flag(16, "of LServe's keys and values", choices=(4, 8, 16))


def systems(flags: LServeFlags) -> accuracy.Systems:
    """Dense, and LServe at each budget. With several budgets LServe's name includes the budget."""
    found, gates = {DENSE: accuracy.config_of(flags)}, gates_of(flags.model, flags.gates)
    for budget in flags.budgets:
        name = f"LServe-{budget}" if len(flags.budgets) > 1 else "LServe"
        chosen: dict[str, Any] = {
            "gates": gates, "streaming_share": flags.share, "budget": budget,
            "kv_bits": flags.kv_bits,
        }  # fmt: skip
        found[name] = accuracy.config_of(flags, policy="lserve", policy_options=chosen)
    return found


def command(module: str, model: str, problems: str, contexts: str, match: str) -> str:
    """A command line that trains gates by the paper's recipe, and then runs the study."""
    return (
        f"python -m experiments.papers.lserve.duo_gates --model={model} --mix=passkeys=1 "
        "--steps=2000 --output_dir=results/gates && "
        f"python -m experiments.papers.lserve.{module} --model={model} --dtype=bfloat16 "
        f"--gates={GATES} --problems={problems} --contexts={contexts} --match={match}"
    )
