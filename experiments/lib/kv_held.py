"""KV memory of sequences, and KV bytes read per generated token, under policies that keep or read
less than all tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged.engine import Engine
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.vllm.layout import VLLMLayout
from paged.kv_cache.work import Heads, Layout

DENSE_ITEMSIZE = 2  # bytes of a 16-bit number
READS = ("decode", "selection")  # parts of `Layout.work`


@dataclass(frozen=True)
class Held:
    """Means over the steps of a sequence. Baseline: the vllm policy in 16 bits at the same page
    size.

    fraction: bytes of the sequence's pages, free places included, over the baseline's.
    high, low: shares of the sequence's tokens kept in high and in low precision, over all heads.
        Under a policy of one precision, low is 0.
    top: share of the sequence's tokens kept in a third precision above `high`.
    read: bytes of attention and page selection (`Layout.work`) in steps that compute one token of
        the sequence, over the baseline's; None without such a step. Decode steps of several tokens
        (`multi_step`) are left out.
    """

    fraction: float
    high: float
    low: float
    top: float = 0.0
    read: float | None = None


def of_sequences(engine: Engine) -> list[Held]:
    """`Held` of each sequence that ran at least one step in the engine's events, in order of
    admission. A sequence that is preempted and admitted again counts twice. Empty under a policy
    whose `Layout` has no method `stored`, such as vllm."""
    config, declared = engine.config, policy_of(engine.config.policy).layout
    P, shards = config.page_size, config.tensor_parallel
    sharded = ShardedModel.split(engine.model, shards, engine.executor.dtype)
    if declared is None or not hasattr(layout := declared(config, sharded), "stored"):
        return []
    windows = sharded.shard.attention.windows
    dense = VLLMLayout(Heads.of(sharded.shard, sharded.dtype), DENSE_ITEMSIZE, windows)
    dense_page = P * sharded.kv_token_bytes("float16")
    owners: dict[int, int] = {}  # slot -> index of the sequence
    rows: dict[int, tuple] = {}  # step -> owners, slots, lengths after, whether one token
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
                generates = np.asarray(event["counts"])[known] == 1
                rows[event["step"]] = [owners[s] for s in slots.tolist()], slots, ends, generates
            case "step" if event["step"] in rows:
                of_rows, slots, ends, generates = rows.pop(event["step"])
                held, kept = layout.stored(event["report"], slots, ends)
                fractions = held / (-(-ends // P) * dense_page)
                read = _read_by(layout, ends, kept * ends[:, None])
                read = np.where(generates, read / _read_by(dense, ends), np.nan)
                for owner, fraction, of_levels, of_all in zip(
                    of_rows, fractions, kept, read, strict=True
                ):
                    *top, high, low = of_levels if len(of_levels) > 1 else (*of_levels, 0.0)
                    samples[owner].append((fraction, high, low, sum(top), of_all))
    return [_mean(np.array(each)) for each in samples if each]


def _read_by(layout: Layout, contexts: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """[n] bytes of a layer's attention and page selection for one generated token. kept:
    [n, I] tokens of each precision."""
    ones = np.ones((len(contexts), 1), np.int64)
    held = None if kept is None else kept[:, None]
    work = layout.work(contexts[:, None], ones, held)
    parts = [np.broadcast_to(work[p].bytes, len(ones)) for p in READS if p in work]
    return np.sum(parts, axis=0)


def _mean(samples: np.ndarray) -> Held:
    """The means of samples [n, 5]: fraction, high, low, top, read. In a step that did not compute
    exactly one token, read is nan."""
    read = samples[~np.isnan(samples[:, -1]), -1]
    fraction, high, low, top = samples[:, :-1].mean(0).tolist()
    return Held(fraction, high, low, top, float(read.mean()) if len(read) else None)


def mean(all_held: Sequence[Held]) -> Held | None:
    """The mean over sequences, with equal weights; None if there are none."""
    if not all_held:
        return None
    return _mean(np.array([dataclasses.astuple(each) for each in all_held], float))
