"""Owners of KV blocks at each step of an engine's run, and a small engine for such runs."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from models import checkpoint
from paged.blocks.block_pool import NULL_BLOCK
from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor

BLOCK = 4  # tokens of a block of `engine_of`


def engine_of(**fields: Any) -> Engine:
    """An engine whose executor makes up tokens instead of running the model."""
    model = checkpoint.load_config("bundled")
    config = EngineConfig(**{
        "page_size": BLOCK, "kv_cache_tokens": 12 * BLOCK, "max_num_seqs": 8, "max_model_len": 32,
        "max_num_batched_tokens": 32, "run_ahead": False,
    } | fields)  # fmt: skip
    return Engine(model, config, SimulatedExecutor(vocab_size=model.vocab_size, dtype="float32"))


def sampling(tokens: int = 4, **how: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **how)


@dataclass(frozen=True)
class Owner:
    """One reference to a block.

    request: id of the owning request.
    sequence: index of the owning sequence in its request.
    logical: index of the block in the sequence.
    filled: filled slots of the block. During a prefill the whole prompt counts as filled.
    """

    request: str
    sequence: int
    logical: int
    filled: int


@dataclass(frozen=True)
class Snapshot:
    """The cache after a step was scheduled.

    happened: events of the step, in words.
    refcounts: reference count of each physical block, null block included.
    device, host: owners of each owned block on the device and on the host.
    idle: blocks that only the prefix cache keeps.
    """

    step: int
    happened: list[str]
    refcounts: list[int]
    device: dict[int, list[Owner]]
    idle: list[int]
    host: dict[int, list[Owner]]


def _add(owners: dict[int, list[Owner]], blocks: np.ndarray, request: str, index: int, filled):
    for logical, block in enumerate(blocks.tolist()):
        if block == NULL_BLOCK:  # the sequence no longer holds this block
            continue
        owner = Owner(request, index, logical, int(filled[logical]))
        owners.setdefault(block, []).append(owner)


def take(engine: Engine, step: int, happened: list[str]) -> Snapshot:
    """A snapshot of the current cache of an engine with the vllm policy."""
    policy, scheduler = VLLMHost.of(engine.host_policy), engine.scheduler
    tables = policy.block_tables
    device: dict[int, list[Owner]] = {}
    host: dict[int, list[Owner]] = {}
    for group in scheduler.running:
        for index, sequence in enumerate(group.sequences):
            if (slot := sequence.slot) >= 0:
                blocks = tables.blocks[slot, : tables.num_blocks[slot]]
                _add(device, blocks, group.request_id, index, tables.filled(slot))
    for group in scheduler.waiting:
        if group.swapped is not None:
            indices = [group.sequences.index(sequence) for sequence in group.unfinished]
            rows = zip(indices, group.swapped.blocks, group.swapped.num_tokens, strict=True)
            for index, blocks, tokens in rows:
                first = np.arange(len(blocks)) * tables.page_size
                filled = np.minimum(tokens - first, tables.page_size)
                _add(host, blocks, group.request_id, index, filled)
    cache = policy.pool.cache
    return Snapshot(
        step=step,
        happened=happened,
        refcounts=policy.pool.refcounts.tolist(),
        device=device,
        idle=sorted(cache.idle) if cache else [],
        host=host,
    )


def in_words(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The events of a step of the engine, in words."""
    words = []
    for event in events:
        if event["event"] in ("arrival", "admit", "preempt", "finish"):
            words.append(f"{event['event']} {event['request_id']}")
        elif event["event"] == "schedule":
            moves = {
                name: [pair for pairs in pools.values() for pair in pairs]
                for name, pools in event["moves"].items()
                if isinstance(pools, Mapping)
            }
            for name, verb in (("exports", "swap out"), ("imports", "swap in")):
                if name in moves:
                    words.append(f"{verb} {len(moves[name])} blocks")
            words += [f"copy block {a} to {b}" for a, b in moves.get("copies", ())]
    return words


def run(
    engine: Engine,
    requests: Mapping[str, tuple[list[int], SamplingParams]],
    interval: int,
    progress: bool = True,
) -> list[Snapshot]:
    """Serve the requests and return a snapshot of each step.

    requests: prompt and sampling parameters by request id.
    interval: steps between arrivals; 0 for all requests at once.
    """
    coming, snapshots = deque(requests.items()), list[Snapshot]()
    rounds = 0
    with tqdm(desc="serving", unit="steps", disable=not progress) as bar:
        while coming or engine.has_unfinished():
            seen = len(engine.events)
            while coming and (not interval or rounds % interval == 0):
                name, (prompt, how) = coming.popleft()
                engine.add_request(prompt, how, name)
                if interval:
                    break
            engine.step()
            rounds += 1
            new = engine.events[seen:]
            for event in new:
                if event["event"] == "schedule":
                    snapshots.append(take(engine, event["step"], in_words(new)))
                    bar.update()
    return snapshots
