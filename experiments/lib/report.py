"""Report on a serving run: throughput, latency, KV memory and answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.workloads.workloads import Request
from paged.metrics import Metrics, RequestRecord, StepRecord
from paged.requests.sequence import RequestOutput

COMPLETE = ("eos", "length", "stop")
MEMORY = ("token_states", "reserved", "internal", "external")  # vLLM §3.1, Fig. 2


@dataclass(frozen=True)
class Answered:
    """A request and its output. exact: whether the output is the request's reference answer; None
    without a reference answer."""

    request: Request
    output: RequestOutput
    exact: bool | None


def is_exact(text: str, answer: str, stop: Sequence[str]) -> bool:
    """Whether a text is the answer. Stop strings are removed from the answer's end, because the
    engine cuts them from the text."""
    for string in stop:
        answer = answer.removesuffix(string)
    return text == answer


def score(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> list[Answered]:
    """Pair requests with their outputs, given in the same order."""
    return [
        Answered(
            request,
            output,
            None if request.answer is None else is_exact(output.text, request.answer, request.stop),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def answers_exact(answered: Sequence[Answered]) -> dict[str, tuple[int, int]]:
    """task -> (exact answers, prompts with an answer). A prompt's default task is `needle`."""
    counts: dict[str, tuple[int, int]] = {}
    for item in answered:
        if item.exact is not None:
            task = item.request.task or "needle"
            exact, total = counts.get(task, (0, 0))
            counts[task] = (exact + item.exact, total + 1)
    return counts


def output_line(item: Answered) -> dict[str, Any]:
    """One line of outputs.jsonl."""
    return {
        "request_id": item.output.request_id,
        "task": item.request.task,
        "adapter": item.request.adapter,
        "prompt_tokens": len(item.output.prompt_tokens),
        "tokens": item.output.tokens,
        "text": item.output.text,
        "others": [asdict(sequence) for sequence in item.output.sequences[1:]],
        "answer": item.request.answer,
        "exact": item.exact,
        "finish_reason": item.output.finish_reason,
    }


def describe_requests(answered: Sequence[Answered]) -> dict[str, Any]:
    """The served workload; without means if nothing was served."""
    if not answered:
        return {"requests": 0}
    return {
        "requests": len(answered),
        "mean_prompt_tokens": np.mean([len(item.output.prompt_tokens) for item in answered]),
        "mean_output_tokens": np.mean([len(item.output.tokens) for item in answered]),
        "last_arrival_s": max(item.request.arrival_s for item in answered),
    }


def ttft_s(record: RequestRecord) -> float | None:
    """Time to the first token, from arrival."""
    return None if record.first_token_s is None else record.first_token_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first, by the mean length of the request's sequences."""
    length = record.output_tokens / record.sequences
    if record.first_token_s is None or length < 2:
        return None
    return (record.finish_s - record.first_token_s) / (length - 1)


def normalised_latency_s(record: RequestRecord) -> float | None:
    """End-to-end latency over the mean length of the request's sequences (vLLM §6.1). Its mean is
    the paper's key metric."""
    if not record.output_tokens:
        return None
    return (record.finish_s - record.arrival_s) / (record.output_tokens / record.sequences)


def complete(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Requests that ran to their end. Latencies are computed over these requests alone."""
    return [record for record in records if record.finish_reason in COMPLETE]


def present(values) -> list[float]:
    return [value for value in values if value is not None]


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p90, p99 (linear interpolation) and max; None if there are no values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": np.mean(values), "p50": p50, "p90": p90, "p99": p99, "max": np.max(values)}


def measure(metrics: Metrics) -> dict[str, Any]:
    """Measurements of the run for report.json, as nested dicts; in seconds unless named ms."""
    steps, records = metrics.steps, complete(metrics.requests)
    start = min((r.arrival_s for r in metrics.requests), default=0.0)
    duration = max((r.finish_s for r in metrics.requests), default=start) - start
    prompt_tokens = sum(r.prompt_tokens for r in records)
    output_tokens = sum(r.output_tokens for r in records)

    def per_second(count: float) -> float | None:
        return count / duration if duration > 0 else None

    return {
        "requests": {
            "complete": len(records),
            "finish_reasons": dict(Counter(r.finish_reason for r in metrics.requests)),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        },
        "throughput": {
            "duration_s": duration,
            "output_tokens_per_s": per_second(output_tokens),
            "total_tokens_per_s": per_second(prompt_tokens + output_tokens),
            "requests_per_s": per_second(len(records)),
        },
        "latency_s": {
            "ttft": distribution(present(map(ttft_s, records))),
            "tpot": distribution(present(map(tpot_s, records))),
            "normalised": distribution(present(map(normalised_latency_s, records))),
            "end_to_end": distribution([r.finish_s - r.arrival_s for r in records]),
        },
        "kv_memory": kv_memory(steps),
        "batch": {
            "mean_running": _time_mean(steps, [s.num_running for s in steps]),
            "max_running": max((s.num_running for s in steps), default=0),
            "max_waiting": max((s.num_waiting for s in steps), default=0),
            "mean_tokens_per_step": float(
                np.mean([s.prefill_tokens + s.decode_tokens for s in steps] or [0])
            ),
        },
        "steps": len(steps),
        "prefix_cache": {
            "hit_tokens": sum(r.cached_tokens for r in metrics.requests),
            "prefill_tokens": sum(s.prefill_tokens for s in steps),
        },
        "preemptions": sum(s.preemptions for s in steps),
        "compilations_warmup": metrics.compilations_warmup,
        "compilations_after_warmup": metrics.compilations_after_warmup,
        "host_ms_per_step": distribution([1e3 * s.host_s for s in steps]),
        "device_ms_per_step": distribution([1e3 * s.device_s for s in steps]),
    }


def kv_memory(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Shares of the allocated KV memory by use (vLLM Fig. 2), and share of the pool allocated.

    A share is a ratio of two averages over steps, weighted by device time. Idle time is excluded.

    saved_by_sharing: memory saved by shared blocks, over the memory needed without sharing (§6.3).
    """
    slots = {name: _time_mean(steps, [getattr(s, f"kv_{name}") for s in steps]) for name in MEMORY}
    allocated = sum(slots.values())
    capacity = max((allocated_slots(s) + s.kv_free for s in steps), default=0)
    peak = max((allocated_slots(s) for s in steps), default=0)
    shared = _time_mean(steps, [s.kv_shared for s in steps])
    shares = {f"{name}_fraction": slots[name] / allocated if allocated else 0.0 for name in MEMORY}
    return {
        **shares,
        "waste_fraction": shares["internal_fraction"] + shares["external_fraction"],
        "saved_by_sharing": shared / (shared + allocated) if allocated else 0.0,
        "mean_allocated_tokens": allocated,
        "peak_allocated_tokens": peak,
        "capacity_tokens": capacity,
        "allocated_fraction": allocated / capacity if capacity else 0.0,
    }


def hit_fraction(prefix_cache: dict[str, int]) -> float:
    """Share of the prompt tokens that were in the prefix cache and not prefilled."""
    total = prefix_cache["hit_tokens"] + prefix_cache["prefill_tokens"]
    return prefix_cache["hit_tokens"] / total if total else 0.0


def allocated_slots(step: StepRecord) -> int:
    """Token slots of all allocated pages."""
    return sum(getattr(step, f"kv_{name}") for name in MEMORY)


def _time_mean(steps: Sequence[StepRecord], values: Sequence[float]) -> float:
    if not steps:
        return 0.0
    weights = np.array([s.device_s for s in steps])
    return float(np.average(values, weights=weights if weights.sum() > 0 else None))


def summary(measured: dict[str, Any], answers: dict[str, tuple[int, int]]) -> dict[str, float]:
    """The flat numbers of summary.json, without unmeasured values.

    answers_exact: share of exact answers to `needle` prompts.
    answers_exact_<task>: the same for another task.
    """
    memory, batch = measured["kv_memory"], measured["batch"]
    numbers = {
        "requests_complete": measured["requests"]["complete"],
        **measured["throughput"],
        **{f"kv_{name}_fraction": memory[f"{name}_fraction"] for name in MEMORY},
        "kv_waste_fraction": memory["waste_fraction"],
        "kv_allocated_fraction": memory["allocated_fraction"],
        "mean_running": batch["mean_running"],
        "preemptions": measured["preemptions"],
        "prefix_cache_hit_fraction": hit_fraction(measured["prefix_cache"]),
        "compilations_warmup": measured["compilations_warmup"],
        "compilations_after_warmup": measured["compilations_after_warmup"],
    }
    for name in ("host_ms_per_step", "device_ms_per_step"):
        numbers[name] = (measured[name] or {}).get("mean")
    for name, values in measured["latency_s"].items():
        for statistic, value in (values or {}).items():
            numbers[f"{name}_{statistic}_s"] = value
    for task, (exact, total) in answers.items():
        numbers["answers_exact" if task == "needle" else f"answers_exact_{task}"] = exact / total
    return {name: value for name, value in numbers.items() if value is not None}


def request_row(record: RequestRecord, adapter: str | None = None) -> dict[str, Any]:
    """One line of requests.csv; times in seconds. adapter: the request's adapter."""
    latencies = {
        "ttft_s": ttft_s(record),
        "tpot_s": tpot_s(record),
        "normalised_latency_s": normalised_latency_s(record),
    }
    return asdict(record) | {"adapter": adapter} | latencies


def table(measured: dict[str, Any], answers: dict[str, tuple[int, int]], hardware: str) -> str:
    """The measurements as text for one screen."""
    flow, memory, batch = measured["throughput"], measured["kv_memory"], measured["batch"]
    requests = measured["requests"]
    lines = [
        f"{requests['complete']} requests ({requests['prompt_tokens']:,} tokens in, "
        f"{requests['output_tokens']:,} out) in {flow['duration_s']:.1f} s on {hardware}",
        f"throughput    {flow['output_tokens_per_s'] or 0:,.0f} output tokens/s, "
        f"{flow['total_tokens_per_s'] or 0:,.0f} tokens/s in and out, "
        f"{flow['requests_per_s'] or 0:.2f} requests/s",
        f"{'latency (ms)':14}{'mean':>20}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    names = {"ttft": "first token", "tpot": "per output token", "normalised": "normalised"}
    for key, name in names.items():
        if values := measured["latency_s"][key]:
            numbers = (f"{1e3 * values[p]:>10,.1f}" for p in ("mean", "p50", "p90", "p99"))
            lines.append(f"  {name:22}" + "".join(numbers))
    lines += [
        "KV memory     "
        + ", ".join(f"{memory[f'{n}_fraction']:.1%} {n.replace('_', ' ')}" for n in MEMORY)
        + f"; peak {memory['peak_allocated_tokens']:,} of {memory['capacity_tokens']:,} tokens",
        f"batch         {batch['mean_running']:.1f} requests running on average, "
        f"{batch['max_running']} at most; {measured['preemptions']} preemptions",
    ]
    if memory["saved_by_sharing"]:
        lines.append(f"sharing       saves {memory['saved_by_sharing']:.1%} of the KV memory")
    if measured["prefix_cache"]["hit_tokens"]:
        lines.append(
            f"prefix cache  {hit_fraction(measured['prefix_cache']):.1%} of prompt tokens, "
            f"{measured['prefix_cache']['hit_tokens']:,} that were not prefilled"
        )
    if measured["steps"]:
        host, device = measured["host_ms_per_step"], measured["device_ms_per_step"]
        lines.append(
            f"step          {host['mean']:.2f} ms host, {device['mean']:.2f} ms device on average "
            f"over {measured['steps']:,} steps"
        )
    lines.append(
        f"compilations  {measured['compilations_warmup']} at warm-up, "
        f"{measured['compilations_after_warmup']} after"
    )
    if answers:
        shares = (f"{task} {exact}/{total}" for task, (exact, total) in sorted(answers.items()))
        lines.append("exact answers " + ", ".join(shares))
    return "\n".join(lines)


def show(answered: Sequence[Answered], per_task: int = 3, width: int = 60) -> str:
    """The ends of a few text prompts of each task, and the generated texts."""
    marks = {True: "right", False: "WRONG", None: "-"}
    shown: Counter[str] = Counter()
    lines = []
    for item in sorted(answered, key=lambda item: item.request.task or ""):
        task = item.request.task or "prompt"
        if isinstance(item.request.prompt, str) and shown[task] < per_task:
            shown[task] += 1
            prompt, text = item.request.prompt[-width:], item.output.text[: 4 * width]
            expected = f", expected {item.request.answer!r}" if item.exact is False else ""
            lines.append(f"{task:9} {marks[item.exact]:6} …{prompt!r} → {text!r}{expected}")
    return "\n".join(lines)
