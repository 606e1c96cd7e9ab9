"""What sequences hold of KV memory while they run, under policies that keep less than all."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged.engine import Engine
from paged.kv_cache import policy_of
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


def of_sequences(engine: Engine) -> list[Held]:
    """Those that the engine's events tell of, in the order in which they were admitted, with at
    least one whole step. None where sequences keep all of their tokens as they are."""
    config, declared = engine.config, policy_of(engine.config.policy).layout
    P, shards = config.page_size, config.tensor_parallel
    sharded = ShardedModel.split(engine.model, shards, engine.executor.dtype)
    held_by = getattr(declared and declared(config, sharded), "held", None)
    if held_by is None:
        return []
    dense_page = P * sharded.kv_token_bytes("float16")
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
                held, kept = held_by(event["report"], slots, ends)
                fractions = held / (-(-ends // P) * dense_page)
                for owner, fraction, of_levels in zip(of_rows, fractions, kept, strict=True):
                    *top, high, low = of_levels
                    samples[owner].append((fraction, high, low, *top))
    return [Held(*map(float, np.mean(each, axis=0))) for each in samples if each]


def mean(all_held: Sequence[Held]) -> Held | None:
    """Of sequences, each of which counts alike; None of none."""
    if not all_held:
        return None
    values = np.array([dataclasses.astuple(each) for each in all_held])
    return Held(*map(float, values.mean(0)))
