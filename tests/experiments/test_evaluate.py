"""Evaluation: intervals, pairing, and a whole run with a small random model."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import evaluate
from experiments.lib import answers
from experiments.lib.answers import mean_interval
from experiments.lib.reference import Distributions, divergence
from experiments.tasks import files
from models import llama, load_tokenizer
from models import params as parameters
from models.config import ModelConfig
from models.hub import BUNDLED
from paged.engine import Engine, EngineConfig
from tests.models import goldens

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=256, max_prefills_per_step=2, max_model_len=512,
    kv_cache_tokens=2048,
)  # fmt: skip


def test_the_interval_covers_the_mean_of_a_known_distribution():
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        mean, low, high = mean_interval(rng.random(100) < 0.8, seed=i)
        assert low <= mean <= high
        inside += low <= 0.8 <= high
    # Percentile intervals of 100 draws cover a little less than the nominal 95 %.
    assert 175 <= inside <= 200


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(1)
    ours = (rng.random(200) < 0.7).astype(float)
    theirs = np.where(rng.random(200) < 0.05, 1 - ours, ours)
    _, low, high = mean_interval(ours - theirs)
    _, unpaired_low, unpaired_high = mean_interval(ours - rng.permutation(theirs))
    assert high - low < 0.6 * (unpaired_high - unpaired_low)


def _evaluation(rng, exact, shift=0.0):
    """Ten answers of three tokens over a vocabulary of 30, of which a few hold most of the mass.

    shift: added to the logits of token 3.
    """
    logits = 4 * rng.standard_normal((10, 3, 30))
    logits[..., 3] += shift
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    given, along = [], {}
    for i, logp in enumerate(logps):
        answer = answers.Answer(
            "needle", 256, i, float(exact(i)), "1;", "1,\0\n", float(logp[:, 5].mean())
        )
        given.append(answer)
        order = np.argsort(-logp, -1)[:, :20].astype(np.int32)
        tops = np.take_along_axis(logp, order, -1)
        along[answer.key] = Distributions(logp[:, 5], order, tops)
    return answers.Evaluation(given, along), logps


def test_accuracies_against_another_run_are_paired_by_prompt(tmp_path):
    ours, _ = _evaluation(np.random.default_rng(0), lambda i: i % 2 == 0, shift=2.0)
    better, _ = _evaluation(np.random.default_rng(0), lambda i: True)
    evaluate.write(tmp_path, answers.accuracies(better), better, {})
    others = answers.read(str(tmp_path / "prompts.csv"))
    assert others.answers == better.answers
    (row,) = answers.accuracies(ours, others)
    assert row.score == 0.5
    assert row.difference and row.logprob_difference and row.divergence
    mean, low, high = row.difference
    assert mean == -0.5
    assert low < mean < high < 0
    gain = [a.logprob - b.logprob for a, b in zip(ours.answers, better.answers)]
    assert row.logprob_difference[0] == pytest.approx(np.mean(gain))
    assert row.divergence[1] > 0
    (same,) = answers.accuracies(better, others)
    assert same.difference == (0, 0, 0)
    assert same.divergence == (0, 0, 0)
    asked = [SimpleNamespace(prompt="a", answer=answer.expected) for answer in better.answers]
    other_answer = SimpleNamespace(prompt="a", answer="2;")
    as_many = SimpleNamespace(encode=lambda text, **_: [0] * 3 if len(text) > 1 else [])
    answers.require_all(others, {("needle", 256): asked}, as_many)
    for changed, message in (
        ([*asked, asked[0]], "lacks 1 prompts of needle at 256"),
        ([other_answer, *asked[1:]], "had other prompts of needle at 256"),
    ):
        with pytest.raises(ValueError, match=message):
            answers.require_all(others, {("needle", 256): changed}, as_many)
    with pytest.raises(ValueError, match=r"another tokenizer: .* has 3 tokens there and 2 here"):
        answers.require_all(others, {("needle", 256): asked}, load_tokenizer(BUNDLED))
    odd = dataclasses.replace(ours.answers[0], expected="2;")
    with pytest.raises(ValueError, match="had other prompts of needle"):
        answers.accuracies(answers.Evaluation([odd], ours.distributions), others)
    with pytest.raises(ValueError, match=r"accuracy\.csv:1: has columns .* expected task,c"):
        answers.read(str(tmp_path / "accuracy.csv"))
    whole = (tmp_path / "distributions.npz").read_bytes()
    for damaged in (b"PK no", whole[: len(whole) // 2]):
        (tmp_path / "distributions.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"distributions\.npz is not a distributions file"):
            answers.read(str(tmp_path / "prompts.csv"))


def test_several_settings_are_pooled():
    one, _ = _evaluation(np.random.default_rng(0), lambda i: i < 4)
    another = [dataclasses.replace(a, task="vote", score=1.0) for a in one.answers]
    *rows, pooled = answers.accuracies(answers.Evaluation([*one.answers, *another], {}))
    assert [(row.task, row.score) for row in rows] == [("needle", 0.4), ("vote", 1.0)]
    assert (pooled.task, pooled.prompts, pooled.score) == ("all", 20, 0.7)
    assert set(evaluate.summary([*rows, pooled])) >= {"score_needle_256", "score_all"}


def test_divergence_is_that_of_whole_distributions_but_for_what_is_rare():
    ours, q = _evaluation(np.random.default_rng(3), bool)
    theirs, p = _evaluation(np.random.default_rng(3), bool, shift=2.0)
    whole = (np.exp(p) * (p - q)).sum(-1).mean(-1)
    found = [
        divergence(ours.distributions[a.key], theirs.distributions[a.key]) for a in ours.answers
    ]
    assert (np.array(found) <= whole + 1e-9).all()
    np.testing.assert_allclose(np.sum(found), whole.sum(), rtol=0.02)


def test_divergence_of_disjoint_alternatives_is_large_and_still_a_lower_bound():
    q, p = (np.log(np.roll([0.4, 0.4, 0.1, 0.06, 0.03, 0.01], shift)) for shift in (0, 3))
    listed = [
        Distributions(logp[:1], order[None].astype(np.int32), logp[order][None])
        for logp in (q, p)
        if len(order := np.argsort(-logp)[:2])
    ]
    found = divergence(*listed)
    assert 0.8 < found <= (np.exp(p) * (p - q)).sum()


@pytest.mark.parametrize(
    ("names", "contexts", "message"),
    [
        (["needles"], [256], "unknown task 'needles'; allowed: needle"),
        (["story"], [256], "unknown task 'story'"),
        (["needle"], [64], r"from 256 to max_model_len \(512\), not 64"),
        (["needle"], [1024], r"max_model_len \(512\)"),
        ([], [256], "must name at least one"),
    ],
)
def test_bad_settings_are_refused(names, contexts, message):
    with pytest.raises(ValueError, match=message):
        evaluate.settings(names, contexts, CONFIG)


def test_a_setting_that_is_named_twice_is_asked_once():
    pairs = evaluate.settings(["needle", "values", "needle"], [256, 512, 256], CONFIG)
    assert pairs == [("needle", 256), ("needle", 512), ("values", 256), ("values", 512)]


@pytest.mark.slow
def test_a_random_model_is_evaluated_end_to_end(tmp_path):
    """Accuracy comes from the engine's own text: it equals a recount from the written answers."""
    model = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8)
    params = parameters.init(llama.declare(model), jax.random.key(0))
    engine = Engine.from_model(params, model, CONFIG, load_tokenizer(BUNDLED))
    problems = evaluate.own_problems([("needle", 256), ("vote", 256)], 3, 0, engine.tokenizer)
    found = evaluate.evaluate(engine, problems, progress=False)
    rows = answers.accuracies(found)
    evaluate.write(tmp_path, rows, found, {})
    with open(tmp_path / "prompts.csv", newline="") as file:
        written = list(csv.DictReader(file))
    prompts = problems["needle", 256]
    assert [w["expected"] for w in written[:3]] == [p.answer for p in prompts]
    for row in rows[:2]:
        mine = [w for w in written if w["task"] == row.task]
        exact = [w["text"] + ";" == w["expected"] for w in mine]
        assert row.score == sum(exact) / 3
    # The log-probability of the expected answer is the model's own, even where the engine's answer
    # differs.
    tokenizer = engine.tokenizer
    for w, prompt in zip(written[:3], prompts):
        before, both = (
            tokenizer.encode(text) for text in (prompt.prompt, prompt.prompt + prompt.answer)
        )
        logits, _ = goldens.run(model, params, both)
        logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(both) - 1), both[1:]]
        assert float(w["logprob"]) == pytest.approx(logp[len(before) - 1 :].mean(), abs=1e-4)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_problems_of_files(tmp_path):
    """A user's own problems, by task and length, with one answer or several."""
    path = tmp_path / "ruler.jsonl"
    path.write_text(
        '{"prompt": "#ab12345; ?ab", "answer": "12345;", "stop": ";"}\n\n'
        '{"prompt": "a story", "answers": ["one", "two"], "task": "qa", "max_tokens": 300}\n'
    )
    problems = files.read_problems([str(path)], load_tokenizer(BUNDLED), 20, 512)
    assert set(problems) == {("ruler", 64), ("qa", 512)}
    (ruler,), (qa,) = problems.values()
    assert (ruler.max_tokens, qa.max_tokens, qa.answers) == (20, 300, ("one", "two"))
    assert files.exact("12345", ruler) == 1 and files.exact("1234", ruler) == 0
    assert files.contains("It is Two.", qa) == 0.5 and files.f1("the TWO.", qa) == 1
    assert files.f1("two or three", qa) == pytest.approx(0.5) and files.f1("", qa) == 0


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    path, link = tmp_path / "p.jsonl", tmp_path / "link.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}')
    link.symlink_to(path)
    with pytest.raises(ValueError, match=r"--problems names .* twice"):
        files.read_problems([str(path), str(link)], load_tokenizer(BUNDLED), 20, 512)


def test_a_run_of_another_vocabulary_is_refused(tmp_path):
    ours = evaluate.vocabulary_hash("bundled")
    evaluate.check_vocabulary(tmp_path, ours)
    (tmp_path / "report.json").write_text(json.dumps({"vocabulary_sha256": "0"}))
    with pytest.raises(ValueError, match="the same tokenizer"):
        evaluate.check_vocabulary(tmp_path, ours)


def test_records_of_ruler_and_longbench_are_read_as_they_are(tmp_path):
    ruler, longbench = tmp_path / "vt.jsonl", tmp_path / "anything.jsonl"
    record = {"index": 0, "input": "x = 4. Find x.", "outputs": ["x", "y"], "length": 9}
    ruler.write_text(
        f"{json.dumps(record)}\n{json.dumps(record | {'answer_prefix': ' Answer: they are'})}\n"
    )
    record = {
        "input": "Who?", "context": "A cat sat.", "answers": ["a cat"], "length": 5,
        "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "0",
    }  # fmt: skip
    summary = record | {"input": "", "dataset": "gov_report"}
    longbench.write_text(f"{json.dumps(record)}\n{json.dumps(summary)}\n")
    paths = [str(ruler), str(longbench)]
    problems = files.read_problems(paths, load_tokenizer(BUNDLED), 20, 512)
    found = {task: [each.prompt for each in of] for (task, _), of in problems.items()}
    assert found == {
        "vt": ["x = 4. Find x.", "x = 4. Find x. Answer: they are"],
        "hotpotqa": ["A cat sat.\n\nQuestion: Who?\nAnswer:"],
        "gov_report": ["A cat sat.\n\nAnswer:"],
    }
    assert {each.answers for of in problems.values() for each in of} == {("x", "y"), ("a cat",)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", "outputs": "b"}', "an answer or a list of answers, not"),
        ('{"input": 3, "outputs": ["b"]}', "p.jsonl:1: "),
        ('{"context": "a", "input": "b", "answers": ["c"], "dataset": 3}', "task must be a text"),
        ('{"prompt": "a"}', "p.jsonl:1: a problem needs a prompt, and an answer"),
        ('{"prompt": "a", "answers": []}', "an answer or a list of answers, not"),
        ('{"prompt": "a", "answers": ["b", 3]}', "an answer or a list of answers, not"),
        ('{"prompt": "", "answer": "b"}', "needs a prompt"),
        ('{"prompt": "a", "answer": "b", "answers": ["c"]}', '"answer" or "answers", not both'),
        ('{"prompt": "a", "answer": "b", "task": "all"}', "'all' is no name for a task"),
        ('["a"]', "expected an object"),
        ('{"prompt": "a", "answer": "b", "of": 3}', "unknown"),
        ('{"prompt": "a", "answer": "b", "max_tokens": 600}', "more than max_model_len"),
        ("", "holds no problem"),
    ],
)
def test_files_that_hold_no_problems_are_refused(tmp_path, line, message):
    good, bad = tmp_path / "good.jsonl", tmp_path / "p.jsonl"
    good.write_text('{"prompt": "a", "answer": "b"}')
    bad.write_text(line)
    with pytest.raises(ValueError, match=message):
        files.read_problems([str(good), str(bad)], load_tokenizer(BUNDLED), 20, 512)
