"""What sequences hold of KV memory while they run, where the device owns the pages (DiffKV)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel


@dataclass(frozen=True)
class Held:
    """A sequence, and the means over its steps. fraction: the bytes of its pages, all that lies in
    them and what is empty included, over those of the 16-bit pages, of as many tokens each as one
    of high precision, that its tokens would fill. high, low: shares of its tokens that are kept in
    high and in low precision, over all heads."""

    fraction: float
    high: float
    low: float


def of_sequences(engine: Engine) -> list[Held]:
    """Those that the engine's events tell of, in the order in which they were admitted, with at
    least one whole step. None where the policy makes no reports of pages that sequences hold."""
    layout = getattr(engine.host_policy, "layout", None)
    if engine.config.policy != "diffkv" or layout is None:
        return []
    P = engine.config.page_size
    sharded = ShardedModel.split(engine.model, engine.config.tensor_parallel)
    dense_page = P * sharded.kv_token_bytes("float16")
    heads = layout.all_heads * sharded.num_shards
    owners: dict[int, int] = {}  # by slot
    rows: dict[int, tuple] = {}  # by step: owners, slots and lengths at its end
    samples: list[list[tuple[float, float, float]]] = []
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
                held = np.asarray(event["report"]["held"]).sum(0)[slots] * layout.page_bytes
                kept = np.asarray(event["report"]["kept"]).sum(0)[slots] / (heads * ends[:, None])
                fractions = held / (-(-ends // P) * dense_page)
                for owner, fraction, (high, low) in zip(of_rows, fractions, kept, strict=True):
                    samples[owner].append((fraction, high, low))
    return [Held(*map(float, np.mean(each, axis=0))) for each in samples if each]


def mean(all_held: Sequence[Held]) -> Held | None:
    """Of sequences, each of which counts alike; None of none."""
    if not all_held:
        return None
    values = np.array([[each.fraction, each.high, each.low] for each in all_held])
    return Held(*map(float, values.mean(0)))
