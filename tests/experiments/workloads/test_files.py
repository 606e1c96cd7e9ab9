"""Loaders on tiny files, and every bad file."""

import json

import pytest

from experiments.workloads import files, workloads
from experiments.workloads.workloads import Vocabulary, WorkloadConfig
from tests.experiments.conftest import TINY
from tests.experiments.workloads.conftest import load

# Prompts


def test_json_lines_carry_answers_limits_and_stops(file, vocabulary):
    lines = [
        {"prompt": "?A", "answer": "12345;", "max_tokens": 6, "stop": ";", "task": "needle"},
        {"prompt": "Once upon a time"},
    ]
    path = file("p.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = load(f"prompts:{path}", vocabulary, max_tokens=7)
    assert (first.prompt, first.answer, first.max_tokens) == ("?A", "12345;", 6)
    assert (first.stop, first.task) == ((";",), "needle")
    assert (second.max_tokens, second.answer, second.stop) == (7, None, ())
    assert not first.ignore_eos


def test_plain_text_is_a_prompt_a_line(file, vocabulary):
    path = file("p.txt", "one\n\n two three\nfour\n")
    assert [r.prompt for r in load(f"prompts:{path}", vocabulary)] == ["one", " two three", "four"]
    assert len(load(f"prompts:{path}", vocabulary, num_requests=2)) == 2


def test_default_max_tokens_yields_to_the_context(file, tokenizer):
    path = file("p.txt", "a" * 10)
    short = Vocabulary(tokenizer, TINY.vocab_size, 16)
    assert load(f"prompts:{path}", short)[0].max_tokens == 16 - 11  # 10 characters and BOS


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "p.jsonl:1: not JSON .Expecting property name .*: column 2"),
        ("\n[1]", "p.jsonl:2: expected an object, found .1."),
        ("{}", "p.jsonl:1: the object lacks 'prompt', found {}"),
        ('{"prompt": 3}', "p.jsonl:1: prompt must be a text, not 3"),
        ('{"prompt": "a"} {}', "p.jsonl:1: not JSON .more than one value: column 17"),
        ('{"prompt": "a", "prompt": "b"}', "p.jsonl:1: the object has 'prompt' twice"),
        (r'{"prompt": "a\ud800b"}', r"p.jsonl:1: .ud800 is half a surrogate pair"),
        (r'{"prompt": "a", "stop": ["\uDFFF"]}', r"p.jsonl:1: .udfff is half a surrogate pair"),
        ('{"prompt": ' + 100_000 * "[", "p.jsonl:1: JSON that is nested too deep"),
        ('{"prompt": ' + 900 * "[" + "1" + 900 * "]" + "}", "p.jsonl:1: prompt must be a text"),
        ('{"prompt": "a", "max_tokens": ' + 5000 * "1" + "}", "p.jsonl:1: the number '111.* large"),
        ('{"prompt": "a", "max_tokens": 1e400}', "p.jsonl:1: the number '1e400' is too large"),
        ('{"prompt": "a", "max_tokens": NaN}', "p.jsonl:1: NaN is no JSON number"),
        ('{"prompt": "a", "max_tokens": -Infinity}', "p.jsonl:1: -Infinity is no JSON number"),
        ('{"prompt": "a", "max_tokens": 2147483648}', "1: max_tokens must be .* below 2\\^31"),
        ('{"prompt": "a", "max_tokens": 3.0}', "1: max_tokens must be a positive integer"),
        ('{"prompt": "a", "stop": "</s>"}', "p.jsonl:1: stop string '</s>' is a special token"),
        ('{"prompt": "a", "promt": "b"}', "unknown \\['promt'\\]; allowed: \\['answer'"),
        ('{"prompt": "a", "max_tokens": 0}', "positive integer below 2.31, not 0"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a positive integer"),
        ('{"prompt": "a", "stop": [1]}', "stop must be"),
        ('{"prompt": "a", "stop": ""}', "stop must be"),
        ('{"prompt": "a", "answer": 5}', "answer must be a text, not 5"),
        (
            '{"prompt": "a", "max_tokens": 1023}',
            "2 prompt tokens and 1023 new ones exceed the 1024",
        ),
        (json.dumps({"prompt": "a" * 2000}), "p.jsonl:1: 2001 prompt tokens and 1 new"),
        ("", "holds no prompt"),
    ],
)
def test_bad_prompt_lines_are_named(file, vocabulary, line, complaint):
    path = file("p.jsonl", line)
    with pytest.raises(ValueError, match=complaint):
        load(f"prompts:{path}", vocabulary)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path, vocabulary, name):
    prompts = ["a\u2028b", "c\x85d", "e\x0b\x0c\x1cf\u2029", "g\rh"]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) if name == "p.jsonl" else p
             for p in prompts]  # fmt: skip
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [r.prompt for r in load(f"prompts:{path}", vocabulary)] == prompts


def test_what_json_may_say_is_accepted(file, vocabulary):
    entry = r'{"prompt": "\ud83d\ude00\u0000\u2028", "stop": ["\u0085"], "answer": null}'
    (request,) = load(f"prompts:{file('p.jsonl', entry)}", vocabulary)
    assert (request.prompt, request.stop) == ("\U0001f600\0\u2028", ("\x85",))


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"\xff\xfea\0", "p.txt:1: not UTF-8 text .invalid start byte"),
        ("a\nb".encode("utf-16-be"), "p.txt:1: not UTF-8 text .it holds a NUL"),
        (b"a\nb\n\xe9\n", "p.txt:3: not UTF-8 text"),
        (b"\xef\xbb\xbfa\n\xe9\n", "p.txt:2: not UTF-8 text"),
        (b"a\nb\0\n", "p.txt:2: not UTF-8 text"),
        (b"a\n\xed\xa0\x80", "p.txt:2: not UTF-8 text"),
        (b"", "p.txt holds no prompt"),
        (b"\n \n", "p.txt holds no prompt"),
    ],
)
def test_what_is_no_text_is_named_by_line(tmp_path, vocabulary, content, complaint):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        load(f"prompts:{path}", vocabulary)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"^{path}: cannot be read: "):
            list(files.read_prompts(str(path)))


# Data sets


def chat(*turns: tuple[str, object]) -> dict:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


CHAT = json.dumps(chat())


def test_sharegpt_takes_the_first_answered_human_turn_and_its_lengths(file, vocabulary):
    data = [
        chat(("gpt", "hello there"), ("human", "aaaaa"), ("gpt", "bbbbbbb"), ("human", "no")),
        chat(("human", "alone")),
        chat(("human", "aaaaa"), ("gpt", "b")),  # 2 tokens with BOS: too short
        chat(("human", "aaaaa"), ("gpt", "b" * 1020)),  # exceeds the context
        chat(),
    ]
    config = WorkloadConfig(f"sharegpt:{file('s.json', data)}")
    workload = workloads.load(config, vocabulary)
    (request,) = workload.requests
    assert (request.prompt, request.max_tokens, request.ignore_eos) == ("aaaaa", 8, True)
    assert workload.notes["pairs_filtered"] == 2


def test_alpaca_joins_instruction_and_input(file, vocabulary):
    data = [{"instruction": "Add.", "input": "1+1", "output": "two, I say"}]
    (request,) = load(f"alpaca:{file('a.json', data)}", vocabulary)
    assert request.prompt == "Add.\n1+1"


@pytest.mark.parametrize(
    "kind, data, complaint",
    [
        ("sharegpt", "nonsense", "d.json:1: not a JSON list"),
        ("sharegpt", "", "d.json:1: not a JSON list"),
        ("sharegpt", {}, "d.json:1: not a JSON list"),
        ("sharegpt", f'[{CHAT},\n{{"a": 1]', "d.json:2, entry 1: not JSON .Expecting ',' del"),
        ("sharegpt", f"[{CHAT} {{}}]", "d.json:1, entry 0: not JSON .no ',' or ']' follows"),
        ("sharegpt", f"[{CHAT},]", "d.json:1, entry 1: not JSON .Expecting value"),
        ("sharegpt", f"[{CHAT}", "d.json:1, entry 0: not JSON .no ',' or ']' follows"),
        ("sharegpt", "[]\n[]", "d.json:2: not JSON .something follows the list"),
        ("sharegpt", "[" + 100_000 * "[", "d.json:1, entry 0: JSON that is nested too deep"),
        ("sharegpt", [{"text": "a"}], "d.json:1, entry 0: expected .*conversations"),
        ("sharegpt", [chat(), chat(("human", 3))], "1, entry 1, turn 0: value must be a text"),
        ("sharegpt", [chat(("human", "\ud800"))], "d.json:1, entry 0: .ud800 is half a surr"),
        ("sharegpt", [{"conversations": [3]}], "1, entry 0, turn 0: expected an object, found 3"),
        ("sharegpt", [], "none of 0 pairs"),
        ("sharegpt", [chat(("human", "a"), ("gpt", "b"))], "none of 1 pairs has at least 4 tokens"),
        ("alpaca", [{"instruction": "a"}], "d.json:1, entry 0: the object lacks 'input'"),
        (
            "alpaca",
            [{"instruction": "a", "input": None, "output": "b"}],
            "d.json:1, entry 0: input must be a text, not None",
        ),
    ],
)
def test_bad_data_sets_are_refused(file, vocabulary, kind, data, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(f"{kind}:{file('d.json', data)}", vocabulary)


# Traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,12,3
2023-11-16 18:17:04.9799600,800,300
"""
HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
PROCESSED = HEADER + "5.0,374,44\n6.5,12,3\n6.0,800,300\n"


@pytest.mark.parametrize("text", [AZURE, PROCESSED])
def test_trace_keeps_lengths_and_arrivals(file, tokenizer, text):
    long = Vocabulary(tokenizer, TINY.vocab_size, 2000)
    requests = load(f"trace:{file('t.csv', text)}", long, time_scale=0.5)
    assert [len(r.prompt) for r in requests] == [374, 800, 12]
    assert [r.max_tokens for r in requests] == [44, 300, 3]
    assert [r.arrival_s for r in requests] == pytest.approx([0, 0.5, 0.75])
    assert all(r.ignore_eos for r in requests)
    assert len(load(f"trace:{file('t.csv', text)}", long, num_requests=1)) == 1


def test_overlong_rows_are_refused_clipped_or_dropped(file, vocabulary):
    path = file("t.csv", PROCESSED)
    with pytest.raises(ValueError, match=r"1 of 3 requests exceed the 1024 .* longest has 1100"):
        load(f"trace:{path}", vocabulary)
    clipped = load(f"trace:{path}", vocabulary, overlong="clip")
    assert [(len(r.prompt), r.max_tokens) for r in clipped] == [(374, 44), (724, 300), (12, 3)]
    dropped = load(f"trace:{path}", vocabulary, overlong="drop")
    assert [len(r.prompt) for r in dropped] == [374, 12]


@pytest.mark.parametrize("prompt, output", [(5000, 7), (7, 5000), (600, 600), (5000, 5000)])
def test_clipped_requests_fill_the_context(prompt, output):
    new_prompt, new_output = workloads._clip(prompt, output, 1000)
    assert new_prompt + new_output == 1000
    assert 1 <= new_prompt <= prompt and 1 <= new_output <= output


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "t.csv:1: has columns \\(none\\); expected TIMESTAMP,ContextTokens"),
        ("time,in,out\n1,2,3\n", "t.csv:1: has columns time,in,out; expected"),
        (HEADER.strip() + ",arrived_at\n0,1,1,0\n", "t.csv:1: has columns .*, each once"),
        (HEADER, "holds no request"),
        (HEADER + "0,5,x\n", "t.csv:2: cannot read .'0', '5', 'x'. as"),
        (HEADER + "0,5\n", "t.csv:2: a row needs 3 values"),
        (HEADER + "0,5,1,1\n", "t.csv:2: a row needs 3 values"),
        (HEADER + "0,5,1\n0,5,0\n", "t.csv:3: .* from 1 to"),
        (HEADER + "0,5,2147483648\n", "t.csv:2: .* from 1 to"),
        (HEADER + "0,5," + 5000 * "9", "t.csv:2: cannot read"),
        (HEADER + "nan,5,1\n", "t.csv:2: .* an arrival within"),
        (HEADER + "-inf,5,1\n", "t.csv:2: .* an arrival within"),
        (HEADER + "1e308,5,1\n", "t.csv:2: .* an arrival within"),
        (HEADER + "0,5,1\n-1e308,5,1\n", "t.csv:3: .* an arrival within"),
        (HEADER + "-1e9,5,1\n1e9,5,1\n", "t.csv, --time_scale=1.0: the last .* at 2e.09 s"),
        (HEADER + '"0,5,1\n', "t.csv:2: not CSV .unexpected end of data"),
        (HEADER + "0," + 200_000 * "1" + ",1\n", "t.csv:2: not CSV .field larger"),
        (AZURE + "0001-01-01,5,1\n", "t.csv:5: "),
        (AZURE + "2023-02-30 00:00:00,5,1\n", "t.csv:5: cannot read"),
    ],
)
def test_bad_traces_are_refused(file, vocabulary, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(f"trace:{file('t.csv', text)}", vocabulary)


def test_a_trace_refuses_a_request_rate(file):
    with pytest.raises(ValueError, match="--time_scale, not --request_rate"):
        WorkloadConfig(f"trace:{file('t.csv', AZURE)}", request_rate=3.0)
