"""Model families as pure functions; see `models.llama.forward` for their arguments."""

import pallas_kernels  # noqa: F401  Imported first, because it prepares JAX.
from models.checkpoint import load, load_config
from models.hub import load_tokenizer

__all__ = ["load", "load_config", "load_tokenizer"]
