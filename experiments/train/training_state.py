"""Checkpoints of training runs: arrays and plain values, written atomically."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(path: Path, tree, meta: dict[str, Any]) -> None:
    """Write a pytree's arrays, and `meta` as JSON. An older file stays until the new one is
    complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(tree)
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(x) for i, x in enumerate(leaves)}
    unfinished = path.with_suffix(".tmp.npz")
    np.savez(unfinished, **arrays, meta=np.array(json.dumps(meta)))
    os.replace(unfinished, path)


def restore(path: Path, tree) -> tuple[Any, dict[str, Any]]:
    """Load a file that `save` wrote, as a pytree like `tree`. Raises ValueError for any other file,
    and if shapes differ."""
    leaves, treedef = jax.tree.flatten(tree)
    try:
        with np.load(path) as z:
            meta = json.loads(str(z["meta"]))
            loaded = [z[f"leaf{i}"] for i in range(len(z.files) - 1)]
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        raise ValueError(f"{path} is no checkpoint of a training run: {error}") from None
    if [x.shape for x in loaded] != [x.shape for x in leaves]:
        raise ValueError(f"the checkpoint in {path.parent} is of another model")
    return jax.tree.unflatten(treedef, list(map(jnp.asarray, loaded))), meta
