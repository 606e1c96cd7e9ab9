"""Gates of a model's KV heads: heads below a quantile stream (LServe §3.3, DuoAttention).

A gate is in [0, 1]. Retrieval heads have gates near 1 and stay dense. DuoAttention publishes gates
as `full_attention_heads.tsv`, one line for each layer. Our gates are JSON files beside their model:
{"weights_sha256": HASH, "gates": [[...], ...]}.
"""

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from models.config import ModelConfig
from paged.checks import described, is_real, shown
from paged.kv_cache.made_for import made_for, read

Gates = tuple[tuple[float, ...], ...]  # [L][K]
PAPERS_SHARE = 0.5  # streaming heads / all KV heads
ROUNDING = 0.01  # largest bfloat16 error of a gate near 1


def checked_gates(gates) -> Gates:
    """The gates as tuples, which compare and hash by value. gates: rows of numbers, or an array.
    Raises ValueError unless all rows have the same length and all numbers are from 0 to 1."""
    try:
        rows = [list(row) if not isinstance(row, str | dict) else [row] for row in gates]
    except TypeError:
        rows = []
    if not rows or len({len(row) for row in rows}) > 1 or not all(rows):
        raise ValueError(f"gates must be a row of numbers for each layer, not {shown(gates)}")
    for layer, row in enumerate(rows):
        for head, gate in enumerate(row):
            if not is_real(gate) or not 0 <= gate <= 1:
                raise ValueError(
                    "gates must be a row of numbers for each layer, from 0 to 1, not "
                    f"{shown(gate)} of layer {layer}, head {head}"
                )
    return tuple(tuple(map(float, row)) for row in rows)


def read_gates(path: str, weights_hash: Callable[[], str]) -> Gates:
    """The gates in a file. weights_hash: returns the SHA-256 of the served weights.

    Raises ValueError, with the path, if the file has no gates, or is JSON for other weights.
    """
    if not path.lower().endswith(".json"):
        return read(path, lambda text: checked_gates(_table(text)))
    return read(
        path, lambda text: checked_gates(*made_for(json.loads(text), weights_hash, "gates"))
    )


def _table(text: str) -> list[list[float]]:
    """The numbers [L, K] of a tab-separated file, without comments. Trained gates outside [0, 1] by
    a rounding error are clipped, as in DuoAttention's loader. `checked_gates` rejects larger
    errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # loadtxt warns if a file is empty
        gates = np.loadtxt(io.StringIO(text), ndmin=2)
    clipped = np.clip(gates, 0, 1)
    return np.where(np.abs(gates - clipped) <= ROUNDING, clipped, gates).tolist()


def streaming_heads(gates: Gates, share: float) -> np.ndarray:
    """[L, K] bool: the `share` of all heads, rounded, with the lowest gates. Among heads with equal
    gates, heads of lower layers stream first, then lower heads of a layer."""
    flat = np.array(gates).reshape(-1)
    count = int(share * len(flat) + 0.5)
    streams = np.zeros(len(flat), bool)
    streams[np.argsort(flat, kind="stable")[:count]] = True
    return streams.reshape(len(gates), -1)


@dataclass(frozen=True)
class GatedOptions:
    """Options of a policy whose heads may stream.

    Raises ValueError for invalid gates, and for a share of streaming heads without gates.
    """

    streaming_share: float | None = described(
        None,
        f"share of KV heads that stream, lowest gates first; {PAPERS_SHARE} if gates are "
        "given, and refused without them",
        least=0,
        most=1,
    )
    gates: Gates = field(
        default=(),
        metadata={
            "help": "file of a gate for each KV head: full_attention_heads.tsv of DuoAttention, or "
            "JSON; without one no head streams",
            "read": read_gates,
        },
    )

    def __post_init__(self):
        # An event log restores a tuple as a list. An array has no truth value.
        given = not isinstance(self.gates, tuple | list) or len(self.gates) > 0
        object.__setattr__(self, "gates", checked_gates(self.gates) if given else ())
        if given and self.streaming_share is None:
            object.__setattr__(self, "streaming_share", PAPERS_SHARE)
        if not given and self.streaming_share is not None:
            raise ValueError(
                f"streaming_share ({shown(self.streaming_share)}) needs gates: without them no "
                "head streams"
            )

    def streams(self, model: ModelConfig) -> np.ndarray:
        """[L, K] bool: whether each KV head of the whole model streams."""
        if not self.gates:
            return np.zeros((model.num_layers, model.num_kv_heads), bool)
        return streaming_heads(self.gates, self.streaming_share or 0)

    def check_gates(self, model: ModelConfig) -> None:
        """Raises ValueError if the gates are not [L, K] of the model."""
        shape = model.num_layers, model.num_kv_heads
        if self.gates and (len(self.gates), len(self.gates[0])) != shape:
            raise ValueError(
                f"gates are of {len(self.gates)} layers of {len(self.gates[0])} KV heads, but "
                f"the model has {shape[0]} of {shape[1]}"
            )


def by_shard(of_heads: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """Each shard's part of `of_heads`, [L, K] by KV head or [L, H] by query head. With more shards
    than heads, several shards have the same part."""
    groups = np.split(of_heads, min(num_shards, of_heads.shape[1]), axis=1)
    return [group for group in groups for _ in range(num_shards // len(groups))]


def dense_first(streams: np.ndarray, num_shards: int) -> np.ndarray:
    """[L, K], the head at each place. Each layer has a run of K / num_shards heads for each shard,
    dense heads first. With more shards than heads, several shards share a run of one head. A
    layer's dense heads are spread evenly over the runs. If the division leaves a remainder, the
    remaining dense heads of successive layers go to the runs in turn."""
    L, K = streams.shape
    num_groups = min(num_shards, K)
    size, order, next_odd = K // num_groups, np.empty((L, K), int), 0
    for layer in range(L):
        dense, streaming = (np.flatnonzero(x).tolist() for x in (~streams[layer], streams[layer]))
        each, odd = divmod(len(dense), num_groups)
        row: list[int] = []
        for group in range(num_groups):
            count = each + ((group - next_odd) % num_groups < odd)
            row += dense[:count] + streaming[: size - count]
            del dense[:count], streaming[: size - count]
        order[layer] = row
        next_odd = (next_odd + odd) % num_groups
    return order
