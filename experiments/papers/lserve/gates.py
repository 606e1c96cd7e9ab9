"""The gates of a study's --gates, and how accuracy studies differ from the paper."""

from experiments.lib import shipped
from models import checkpoint
from paged.kv_cache.gates import GatedOptions, Gates, read_gates

BUNDLED_GATES = "models/bundled/duo_gates.json"
JUDGE_GATES = "models/judge/duo_gates.json"
DIFFERS = "the paper asks Llama-3-8B, with 64k to 256k tokens"
RETRIEVAL_GATE = 0.3  # least gate of a retrieval head


def gates_of(model: str, gates: str) -> Gates:
    """The gates in a file. Raises ValueError for an invalid model or file, and for gates that are
    not the model's."""
    config = checkpoint.load_config(model)
    if not gates:
        raise ValueError("--gates must name a file, not ''")
    found = read_gates(shipped.found(gates), lambda: checkpoint.weights_hash(model))
    GatedOptions(gates=found).check_gates(config)
    return found
