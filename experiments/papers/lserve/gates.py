"""The gates that a study's --gates names, and what all studies of answers differ in."""

from experiments.lib.typed_flags import ModelFlags
from models import checkpoint
from models.hub import BUNDLED
from paged.kv_cache.lserve.gates import Gates, read_gates

BUNDLED_GATES = str(BUNDLED / "duo_gates.json")
# In every study of answers.
DIFFERS = "the paper asks Llama-3-8B up to 256k tokens; here nearly all of 16 KV heads need all"


def gates_of(flags: ModelFlags, gates: str) -> Gates:
    """Raises ValueError for a model or a file that is none."""
    checkpoint.load_config(flags.model)  # Its errors are not the file's.
    if not gates:
        raise ValueError("--gates must name a file, not ''")
    return read_gates(gates, lambda: checkpoint.weights_hash(flags.model))
