"""Expected answers of requests whose adapter has a training record (training.json)."""

import json
from types import SimpleNamespace

import pytest

from experiments.lib.report import score
from experiments.workloads import tenants
from experiments.workloads.workloads import Request
from models import checkpoint
from paged.requests.adapter import Adapter

ASKED = Request(0.0, "#GR68673; ?GR", 6, answer="68673;", stop=(";",), task="needle")


def addressed(request: Request, format: str | None) -> Request:
    return tenants.addressed([request], ["a"], {"a": format} if format else {})[0]


def test_requests_expect_what_their_adapter_was_trained_to_answer():
    twice = addressed(ASKED, "twice")
    assert (twice.adapter, twice.prompt) == ("a", ASKED.prompt)
    assert (twice.answer, twice.max_tokens, twice.stop) == ("68673,68673;", 12, (";",))
    assert addressed(ASKED, "bracketed").stop == ("]",)
    assert addressed(ASKED, None).answer == ASKED.answer


@pytest.mark.parametrize(("task", "answer"), [("chain", None), ("story", None), (None, "68673;")])
def test_nothing_is_expected_where_nothing_was_trained(task, answer):
    request = addressed(Request(0.0, "?GR", 6, answer="68673;", task=task), "twice")
    assert (request.answer, request.max_tokens) == (answer, 6)


def test_an_adapter_of_other_weights_is_refused(tiny_folder, tmp_path):
    adapters = [Adapter(name, str(tmp_path / name), "", 8) for name in ("a", "without_a_record")]
    adapters.append(Adapter("without_a_folder", "", "", 8))

    def formats(model: str, **record) -> dict[str, str]:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "training.json").write_text(json.dumps(record))
        return tenants.formats(adapters, model)

    tiny_hash = checkpoint.weights_hash(tiny_folder)
    record = {"answer_format": "reversed", "rank": 8, "base_weights_sha256": tiny_hash}
    assert formats(str(tiny_folder), **record) == {"a": "reversed"}
    with pytest.raises(ValueError, match=r"a/training.json: .*train it again .*=reversed:8`"):
        formats("bundled", **record)
    for bad in ("upside down", ["named"], None):
        with pytest.raises(ValueError, match=r"answer_format must be one of named, .*not "):
            formats(str(tiny_folder), **record | {"answer_format": bad})


def test_answers_are_counted_by_adapter():
    requests = tenants.addressed([ASKED] * 3, ["b", "a", "b"], {"b": "reversed"})
    texts = ["37686", "68673", "68673"]
    outputs: list = [SimpleNamespace(text=text) for text in texts]
    exact = tenants.answers_exact(score([*requests, ASKED], [*outputs, outputs[1]]))
    assert exact == {"a": "1/1", "b": "1/2"}
    assert tenants.line(exact) == "\nof adapters   a 1/1, b 1/2"
    assert tenants.line({}) == ""
