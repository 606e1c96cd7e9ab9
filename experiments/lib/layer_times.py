"""Measured times of a layer's ops on a GPU, from CSV files in the form of Vidur's profiles.

A row of MODEL-GPU-layer-times.csv has a tensor-parallel degree, the number of tokens in a batch,
and the median time of each op in milliseconds (columns OP_ms). Several rows may have the same
degree and number of tokens.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.lib import shipped
from models import checkpoint
from paged.kv_cache.policy import ShardedModel
from paged.simulator.cost_model import Op, Product
from paged.simulator.layer import layer_ops

ENDING = "-layer-times.csv"
# Vidur's column names -> our op names. Only one of a layer's two residual sums is measured.
OPS = {
    "input_layernorm": "attention_norm",
    "attn_pre_proj": "qkv",
    "attn_rope": "rope",
    "attn_post_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp_up_proj": "mlp_up",
    "mlp_act": "activation",
    "mlp_down_proj": "mlp_down",
    "add": "mlp_add",
}


@dataclass(frozen=True)
class LayerTimes:
    """Times of a model's layer, split over `shards` GPUs, for n batches.

    tokens: [n] tokens of each batch.
    seconds: [n] times of each op, by our op names.
    ops: the measured ops at the sizes of these batches, by our op names.
    file: name of the file.
    """

    model: str
    shards: int
    tokens: np.ndarray
    seconds: dict[str, np.ndarray]
    ops: dict[str, Op]
    file: str

    @property
    def products(self) -> list[str]:
        return [name for name, op in self.ops.items() if isinstance(op, Product)]

    def thinned(self) -> "LayerTimes":
        """One batch per quarter octave of tokens, because otherwise long batches dominate a fit."""
        _, first = np.unique(np.round(4 * np.log2(self.tokens)), return_index=True)
        seconds = {name: times[first] for name, times in self.seconds.items()}
        return layer_times(self.model, self.shards, self.tokens[first], seconds, self.file)


def layer_times(
    model: str, shards: int, tokens: np.ndarray, seconds: dict[str, np.ndarray], file: str
) -> LayerTimes:
    """The times with their ops. Raises ValueError if the model cannot be split over the GPUs."""
    sharded = ShardedModel.split(checkpoint.load_config(shipped.MODELS / model), shards)
    ops = layer_ops(sharded, tokens)
    measured = {name: ops[name] for name in seconds}
    return LayerTimes(model, shards, tokens, seconds, measured, file)


def read(folder: str | Path, gpu: str) -> tuple[list[LayerTimes], list[str]]:
    """(layer times from the files of one GPU, names of skipped files).

    A file name may give the GPU's family alone: 'a100' for 'a100-80'. Files whose model has no
    configuration in configs/models are skipped.

    Raises ValueError for missing files or columns, for invalid values, and if no file remains. The
    message names the file, and the line of an invalid value.
    """
    if not folder:
        raise ValueError(f"--data must name a folder with files MODEL-{gpu}{ENDING}")
    names = {f"-{gpu}{ENDING}", f"-{gpu.partition('-')[0]}{ENDING}"}
    paths = sorted(Path(folder).glob(f"*{ENDING}"))
    mine = [(path, name) for path in paths for name in names if path.name.endswith(name)]
    if not mine:
        there = ", ".join(path.name for path in paths) or "none"
        raise ValueError(f"{folder} has no MODEL-{gpu}{ENDING}; such files there: {there}")
    known = {_plain(each.name): each.name for each in sorted(shipped.MODELS.iterdir())}
    models = {path: known.get(_plain(path.name.removesuffix(name))) for path, name in mine}
    left_out = [path.name for path, model in models.items() if model is None]
    if len(left_out) == len(models):
        raise ValueError(f"{', '.join(left_out)}: no model among {', '.join(known.values())}")
    measured = [times for path, model in models.items() if model for times in _read(path, model)]
    return measured, left_out


def _plain(name: str) -> str:
    """A model's name without spelling variants: 'Meta-Llama-3-8B' becomes 'llama38b'."""
    return name.lower().removeprefix("meta-").replace("-", "").replace("_", "")


def _read(path: Path, model: str) -> Iterator[LayerTimes]:
    whole = ShardedModel.split(checkpoint.load_config(shipped.MODELS / model))
    has = layer_ops(whole, 1)  # OPT has no rotations
    ops = {theirs: ours for theirs, ours in OPS.items() if ours in has}
    wanted = ["num_tokens", "tensor_parallel", *(f"{name}_ms" for name in ops)]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            names, given = rows.fieldnames or (), list(rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV in UTF-8: {error}") from None
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
    table = np.array([_numbers(path, i, row, wanted) for i, row in enumerate(given, 2)])
    if not len(table):
        raise ValueError(f"{path} has no rows")
    for shards in np.unique(table[:, 1]).astype(int).tolist():
        part = table[table[:, 1] == shards]
        seconds = {ours: part[:, 2 + i] / 1e3 for i, ours in enumerate(ops.values())}
        try:
            yield layer_times(model, shards, part[:, 0], seconds, path.name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _numbers(path: Path, line: int, row: dict[str, str], wanted: list[str]) -> list[float]:
    numbers = []
    for name in wanted:
        try:
            number = float(row[name])
        except (TypeError, ValueError):
            number = math.nan
        whole = name.endswith("_ms") or number.is_integer()
        if not (0 < number < 2**31 and whole):
            raise ValueError(
                f"{path}, line {line}: {name} must be above 0 and below 2^31, not {row[name]!r}"
            )
        numbers.append(number)
    return numbers
