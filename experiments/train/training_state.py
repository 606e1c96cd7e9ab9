"""Checkpoints of training runs: arrays and plain values, written atomically."""

import json
import os
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
    """Load a file of `save`, as a pytree like `tree`. Raises ValueError if shapes differ."""
    leaves, treedef = jax.tree.flatten(tree)
    with np.load(path) as z:
        meta = json.loads(str(z["meta"]))
        shapes = [z[f"leaf{i}"].shape for i in range(len(z.files) - 1)]
        if shapes != [x.shape for x in leaves]:
            raise ValueError(f"the checkpoint in {path.parent} is of another model")
        loaded = [jnp.asarray(z[f"leaf{i}"]) for i in range(len(leaves))]
    return jax.tree.unflatten(treedef, loaded), meta
