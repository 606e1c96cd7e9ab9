"""The gates of a study's --gates, and how all studies of answers differ from the paper."""

from experiments.lib.typed_flags import ModelFlags
from models import checkpoint
from models.hub import BUNDLED
from paged.kv_cache.lserve.gates import Gates, read_gates

BUNDLED_GATES = str(BUNDLED / "duo_gates.json")
DIFFERS = "the paper asks Llama-3-8B up to 256k tokens; here nearly all of 16 KV heads need all"


def gates_of(flags: ModelFlags, gates: str) -> Gates:
    """The gates in a file. Raises ValueError for a model or a file that is invalid."""
    checkpoint.load_config(flags.model)  # Errors of the model come first, apart from the file's.
    if not gates:
        raise ValueError("--gates must name a file, not ''")
    return read_gates(gates, lambda: checkpoint.weights_hash(flags.model))
