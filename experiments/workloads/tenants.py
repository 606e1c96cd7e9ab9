"""Expected answers of adapters from `experiments.train.lora`, and their accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.lib.report import Answered
from experiments.tasks import answer_formats
from experiments.workloads.workloads import Request
from models import checkpoint
from models.hub import read_json
from paged.requests.adapter import Adapter

RECORD = "training.json"  # beside an adapter's weights


def formats(adapters: Sequence[Adapter], model: str) -> dict[str, str]:
    """The answer format of each adapter with a training record, by name of the adapter.

    Raises ValueError for an invalid record, or for an adapter trained on other base weights.
    """
    records = {a.name: Path(a.folder) / RECORD for a in adapters if a.folder}
    trained = {name: path for name, path in records.items() if path.is_file()}
    weights_hash = checkpoint.weights_hash(model) if trained else ""

    def read(record: dict) -> str:
        name, base = record.get("answer_format"), record.get("base_weights_sha256")
        if not isinstance(name, str) or name not in answer_formats.FORMATS:
            known = ", ".join(answer_formats.FORMATS)
            raise ValueError(f"answer_format must be one of {known}, not {name!r}")
        if base != weights_hash:
            raise ValueError(
                f"this adapter is of a model whose weights have the hash {base}, but those of "
                f"{model} have {weights_hash}: train it again with `python -m "
                f"experiments.train.lora --model={model} --adapters={name}:{record.get('rank')}`"
            )
        return name

    return {name: read_json(path, read) for name, path in trained.items()}


def addressed(
    requests: Sequence[Request], names: Sequence[str], formats: Mapping[str, str]
) -> list[Request]:
    """The requests with their adapters, and with answers in the adapters' formats.

    names: each request's adapter.
    formats: answer format by adapter.

    A request of a task that its adapter was not trained on loses its answer. A request without a
    task, or with an adapter without a format, keeps its answer.
    """
    return [_addressed(r, name, formats.get(name)) for r, name in zip(requests, names, strict=True)]


def _addressed(request: Request, name: str, format: str | None) -> Request:
    request = replace(request, adapter=name)
    if format is None or request.task is None:
        return request
    if request.task not in answer_formats.TASKS or request.answer is None:
        return replace(request, answer=None)
    assert isinstance(request.prompt, str)
    text = answer_formats.answer(format, request.prompt, request.answer)
    return replace(request, answer=text, max_tokens=len(text), stop=(text[-1],))


def answers_exact(answered: Sequence[Answered]) -> dict[str, str]:
    """adapter -> 'exact answers/requests that expect one'."""
    judged: dict[str, list[bool]] = {}
    for item in answered:
        if item.request.adapter is not None and item.exact is not None:
            judged.setdefault(item.request.adapter, []).append(item.exact)
    return {name: f"{sum(exact)}/{len(exact)}" for name, exact in sorted(judged.items())}


def line(exact: Mapping[str, str]) -> str:
    """The line on adapters' answers below `report.table`; empty if there are none."""
    if not exact:
        return ""
    shares = ", ".join(f"{name} {share}" for name, share in exact.items())
    return f"\nof adapters   {shares}"
