"""What sequences hold of KV memory while they run, of policies that keep less than all (DiffKV,
LServe)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel


@dataclass(frozen=True)
class Held:
    """A sequence, and the means over its steps. fraction: the bytes of its pages, all that lies in
    them and what is empty included, over those of the 16-bit pages, of as many tokens each as one
    of the highest precision, that its tokens would fill. high, low: shares of its tokens that are
    kept in high and in low precision, over all heads, and top: in a third one above them."""

    fraction: float
    high: float
    low: float
    top: float = 0.0


# Of sequences with these slots and tokens: the bytes that they hold, and the shares of tokens, over
# all heads, that are kept in each precision, the highest first.
Measure = Callable[[Mapping[str, Any], np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def of_sequences(engine: Engine) -> list[Held]:
    """Those that the engine's events tell of, in the order in which they were admitted, with at
    least one whole step. None where sequences keep all of their tokens as they are."""
    policies = {"diffkv": _as_reported, "lserve": _of_pools}
    layout = getattr(engine.host_policy, "layout", None)
    if engine.config.policy not in policies or layout is None:
        return []
    P, shards = engine.config.page_size, engine.config.tensor_parallel
    sharded = ShardedModel.split(engine.model, shards, engine.executor.dtype)
    dense_page = P * sharded.kv_token_bytes("float16")
    measure: Measure = policies[engine.config.policy](engine, layout, sharded)
    owners: dict[int, int] = {}  # by slot
    rows: dict[int, tuple] = {}  # by step: owners, slots and lengths at its end
    samples: list[list[tuple[float, ...]]] = []
    for event in engine.events:
        match event["event"]:
            case "admit":
                for slot in event["slots"]:
                    owners[slot] = len(samples)
                    samples.append([])
            case "schedule":
                slots = np.asarray(event["slots"])
                ends = np.asarray(event["starts"]) + np.asarray(event["counts"])
                known = [slot in owners for slot in slots.tolist()]
                slots, ends = slots[known], ends[known]
                rows[event["step"]] = [owners[slot] for slot in slots.tolist()], slots, ends
            case "step" if event["step"] in rows:
                of_rows, slots, ends = rows.pop(event["step"])
                held, kept = measure(event, slots, ends)
                fractions = held / (-(-ends // P) * dense_page)
                for owner, fraction, of_levels in zip(of_rows, fractions, kept, strict=True):
                    *top, high, low = of_levels
                    samples[owner].append((fraction, high, low, *top))
    return [Held(*map(float, np.mean(each, axis=0))) for each in samples if each]


def _as_reported(engine: Engine, layout: Any, sharded: ShardedModel) -> Measure:
    """DiffKV's device tells what it has kept."""
    heads = layout.all_heads * sharded.num_shards

    def measure(event, slots, ends):
        held = np.asarray(event["report"]["held"]).sum(0)[slots] * layout.page_bytes
        return held, np.asarray(event["report"]["kept"]).sum(0)[slots] / (heads * ends[:, None])

    return measure


def _of_pools(engine: Engine, layout: Any, sharded: ShardedModel) -> Measure:
    """LServe's dense heads keep all tokens, and its streaming heads a window of pages."""
    dense, streaming = layout.unit_bytes(sharded, engine.config.kv_dtype)
    dense_heads, streaming_heads = layout.most_heads

    def measure(event, slots, ends):
        pages = -(-ends // layout.page_size)
        window = np.minimum(pages, layout.window)
        held = dense_heads * pages + streaming_heads * window
        kept = held / ((dense_heads + streaming_heads) * pages)
        return pages * dense + window * streaming, np.stack([kept, np.zeros_like(kept)], -1)

    return measure


def mean(all_held: Sequence[Held]) -> Held | None:
    """Of sequences, each of which counts alike; None of none."""
    if not all_held:
        return None
    values = np.array([dataclasses.astuple(each) for each in all_held])
    return Held(*map(float, values.mean(0)))
