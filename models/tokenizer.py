"""The tokenizer of a model."""

from pathlib import Path

from models.hub import TOKENIZER_FILES, find


def load_tokenizer(model: str | Path):
    """The tokenizer of `model` (named as in models/hub.py), a transformers fast tokenizer.

    Raises ValueError if the tokenizer is missing or cannot be read.
    """
    folder = find(model)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer.json")
    from transformers import AutoTokenizer  # Imported here because it takes seconds.

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # The library `tokenizers` raises plain Exception.
        raise ValueError(f"{folder}: the tokenizer cannot be read: {error}") from error
