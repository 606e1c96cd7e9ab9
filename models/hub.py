"""Models on disk.

A model's name is one of

- 'bundled': the folder models/bundled in this repository;
- 'judge': the folder models/judge in this repository;
- a folder with config.json, one or many safetensors files, and a tokenizer;
- a Hugging Face hub id 'owner/name', which is downloaded.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "bundled"
OWN = {"bundled": BUNDLED, "judge": BUNDLED.with_name("judge")}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_DOWNLOADED = ("model*.safetensors", "*.json", "*.jinja", *TOKENIZER_FILES)


def find(model: str | Path) -> Path:
    """The folder of `model`, downloaded for a hub id. Raises ValueError for an unknown model."""
    if model in OWN:
        if not OWN[str(model)].is_dir():
            raise ValueError(
                f"{OWN[str(model)]} is not there: configs/judge_training.flags trains the model "
                "as results/judge_training/model, to be copied there"
            )
        return OWN[str(model)]
    folder = Path(os.path.expanduser(model))  # Path.expanduser raises for an unknown user.
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{model} is a file; a model is a folder with config.json and weights")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
        raise ValueError(f"there is no folder {model}, and it is no hub id 'owner/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(_DOWNLOADED)))
    except Exception as error:  # The network, the hub and the disk have no common base class.
        raise ValueError(
            f"there is no folder {model}, and the download from the Hugging Face hub failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def read_json(path: Path, parse):
    """The result of `parse` for the JSON object in the file `path`. Raises ValueError as
    `parse_json` does, and if the file is missing."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return parse_json(path.read_bytes(), path, parse)


def parse_json(content: bytes, path: Path, parse):
    """The result of `parse` for the JSON object in `content`, the content of the file `path`.

    Raises ValueError, with the file's name, if `content` is no JSON object or if `parse` raises
    ValueError.
    """
    try:
        value = json.loads(content.decode())
        if not isinstance(value, dict):
            raise ValueError(f"it should hold a JSON object, not {value!r:.40}")
        return parse(value)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise ValueError(f"{path}: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, sorted by name.

    Raises ValueError if there are no weight files, if a file of the index is missing, or if all
    weights are pickles.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        files = [folder / name for name in read_json(index, _shard_names)]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{index} names {file.name}, which is missing")
        return files
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise ValueError(
            f"{folder} has its weights only as pickles ({', '.join(pickled)}), which may run any "
            "code when they are read. If you trust them, convert them where torch is installed: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _shard_names(index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"weight_map should map tensors to files, but is {weight_map!r:.40}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"weight_map names {name!r}, which is no file of this folder")
    return names


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
