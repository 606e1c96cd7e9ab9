"""The assignment of adapters to the requests of a workload (Punica §7)."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.peft import CONFIG

SKEW = 1.5  # the paper's Zipf-1.5: adapter i + 1 gets 1/SKEW of adapter i's requests
POPULARITIES = ("distinct", "uniform", "skewed", "identical")


def folders(root: str | Path) -> dict[str, Path]:
    """The PEFT folders in `root` by name. Raises ValueError if there are none."""
    found = sorted(path.parent for path in Path(os.path.expanduser(root)).glob(f"*/{CONFIG}"))
    if not found:
        raise ValueError(f"--adapters={root}: no folder in it has an {CONFIG}")
    return {folder.name: folder for folder in found}


def assign(names: Sequence[str], popularity: str, count: int, seed: int = 0) -> list[str]:
    """The adapter of each of `count` requests.

    'distinct': all adapters in turn.
    'uniform': the first ⌈√count⌉ adapters equally often.
    'skewed': adapter i with probability proportional to 1.5^-i.
    'identical': the first adapter alone.
    """
    rng = np.random.default_rng(seed)
    match popularity:
        case "distinct":
            return [names[i % len(names)] for i in range(count)]
        case "uniform":
            used = names[: math.ceil(math.sqrt(count))]
            return [used[i % len(used)] for i in rng.permutation(count)]
        case "skewed":
            shares = SKEW ** -np.arange(len(names), dtype=float)
            return [names[i] for i in rng.choice(len(names), count, p=shares / shares.sum())]
        case "identical":
            return [names[0]] * count
    raise ValueError(f"popularity must be one of {', '.join(POPULARITIES)}, not {popularity!r}")
