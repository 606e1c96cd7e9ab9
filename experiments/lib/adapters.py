"""What a run's events say of its adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def measure(events: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """What became of requests that named an adapter; None if none did.

    hit_rate: of those that started, the share for which no load had to begin. load_s: mean seconds
    from the beginning of a load to its arrival.
    """
    named = {e["request_id"] for e in events if e["event"] == "arrival" and e["adapter"]}
    if not named:
        return None
    started = named & {e["request_id"] for e in events if e["event"] == "admit"}
    began: dict[tuple[str, str], float] = {}
    seconds = []
    for event in events:
        if event["event"] == "load":
            began[event["adapter"], event["content_hash"]] = event["time_s"]
        elif event["event"] == "loaded":
            seconds.append(event["time_s"] - began[event["adapter"], event["content_hash"]])
    loads = sum(event["event"] == "load" for event in events)
    return {
        "requests": len(named),
        "used": len({e["adapter"] for e in events if e["event"] == "arrival"} - {None}),
        "loads": loads,
        "hit_rate": max(0.0, 1 - loads / len(started)) if started else 0.0,
        "load_s": float(np.mean(seconds)) if seconds else 0.0,
    }


def line(numbers: Mapping[str, float] | None) -> str:
    """What `report.table` adds of them."""
    if numbers is None:
        return ""
    return (
        f"\nadapters      {numbers['used']} in {numbers['requests']} requests; {numbers['loads']} "
        f"loads of {1e3 * numbers['load_s']:,.1f} ms on average, hit rate {numbers['hit_rate']:.2f}"
    )
