"""The adapters that a program serves, and measures of their loads from a run's events."""

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib import random_adapters
from experiments.lib.typed_flags import flag
from experiments.workloads import popularity
from models.config import ModelConfig
from paged.adapters.known import KnownAdapters
from paged.config import EngineConfig
from paged.requests.adapter import Adapter


def adapters_flag() -> str:
    """A field of `Flags`, for `asked_for`."""
    return flag(
        "",
        "a folder with a folder for each LoRA adapter, as PEFT writes it (adapter_config.json and "
        "weights), whose name is the adapter's; or a number of random adapters of rank "
        f"{random_adapters.RANK}, which are written to --output_dir; empty for none",
        path=True,
    )


def popularity_flag(default: str) -> str:
    """A field of `Flags`, for `popularity.assign`."""
    text = "how requests choose among the adapters (Punica §7)"
    return flag(default, text, choices=popularity.POPULARITIES)


def asked_for(
    given: str, model: ModelConfig, config: EngineConfig, dtype: str, output_dir: Path | None
) -> list[Adapter]:
    """The adapters of --adapters, each loaded and checked.

    output_dir: folder for random adapters; None to return random adapters without weights.
    Raises ValueError for an adapter that `KnownAdapters.read` refuses, and for 0 random adapters.
    """
    known = KnownAdapters(model, config, dtype)
    if not given.isdecimal():
        found = popularity.folders(given) if given else {}
        return [known.read(name, folder) for name, folder in found.items()]
    if not int(given):
        raise ValueError("--adapters=0: at least one, or empty for none")
    names = [f"lora-{i:03}" for i in range(int(given))]
    random = [Adapter(name, "", name, random_adapters.RANK) for name in names]
    known.check(random[0])
    if output_dir is None:
        return random
    root = output_dir / "adapters"
    return [
        known.read(name, random_adapters.write(root / name, model, config.seed + i))
        for i, name in enumerate(names)
    ]


def measure(events: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Measures of requests with an adapter; None if there are none.

    requests: requests with an adapter.
    used: number of different adapters in these requests.
    loads: adapter loads.
    hit_rate: 1 - loads / started requests with an adapter.
    load_s: mean seconds of a load.
    hidden: share of the load time in which the device ran steps.
    most_overtaken: see `most_overtaken`.
    """
    named = {e["request_id"] for e in events if e["event"] == "arrival" and e["adapter"]}
    if not named:
        return None
    started = named & {e["request_id"] for e in events if e["event"] == "admit"}
    began: dict[tuple[str, str], float] = {}
    spans: list[tuple[float, float]] = []
    for event in events:
        if event["event"] == "load":
            began[event["adapter"], event["content_hash"]] = event["time_s"]
        elif event["event"] == "loaded":
            start = began[event["adapter"], event["content_hash"]]
            spans.append((start, event["time_s"]))
    seconds = sum(end - start for start, end in spans)
    loads = sum(event["event"] == "load" for event in events)
    return {
        "requests": len(named),
        "used": len({e["adapter"] for e in events if e["event"] == "arrival"} - {None}),
        "loads": loads,
        "hit_rate": max(0.0, 1 - loads / len(started)) if started else 0.0,
        "load_s": seconds / max(1, len(spans)),
        "hidden": _busy_within(events, spans) / seconds if seconds else 1.0,
        "most_overtaken": most_overtaken(events),
    }


def _busy_within(
    events: Sequence[Mapping[str, Any]], spans: Sequence[tuple[float, float]]
) -> float:
    """Seconds within these (start, end) spans in which a step ran on the device."""
    steps = [(e["time_s"] - e["device_s"], e["time_s"]) for e in events if e["event"] == "step"]
    times = np.maximum.accumulate(np.array([[0.0, 0.0], *steps]).ravel())
    busy = np.cumsum(np.diff(times, prepend=0.0) * (np.arange(len(times)) % 2))  # up to each time
    within = np.diff(np.interp(np.array(spans), times, busy))
    return float(within.sum())


def most_overtaken(events: Sequence[Mapping[str, Any]]) -> int:
    """The largest number of later arrivals that were admitted before a request with an adapter."""
    arrivals = [e for e in events if e["event"] == "arrival"]
    order = {event["request_id"]: i for i, event in enumerate(arrivals)}
    started = list(dict.fromkeys(e["request_id"] for e in events if e["event"] == "admit"))
    before: list[int] = []  # arrival numbers of the requests admitted so far, sorted
    most = 0
    for request_id in started:
        number = order[request_id]
        if arrivals[number]["adapter"]:
            most = max(most, len(before) - bisect.bisect(before, number))
        bisect.insort(before, number)
    return most


def line(numbers: Mapping[str, float] | None) -> str:
    """The line on adapters below `report.table`; empty for None."""
    if numbers is None:
        return ""
    return (
        f"\nadapters      {numbers['used']} in {numbers['requests']} requests; {numbers['loads']} "
        f"loads of {1e3 * numbers['load_s']:,.1f} ms on average, {numbers['hidden']:.0%} of it "
        f"beside steps, hit rate {numbers['hit_rate']:.2f}"
    )
