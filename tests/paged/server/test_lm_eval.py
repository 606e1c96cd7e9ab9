"""EleutherAI's evaluation harness over HTTP against the server. Its results must equal those of one
dense forward pass of the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tasks import tasks
from models import checkpoint, llama
from models.full_attention import causal_attend
from models.hub import BUNDLED
from paged.config import EngineConfig
from paged.engine import Engine
from tests.paged.server.serving import TOKENIZER, Served, served
from tests.paged.tiny import padded

pytest.importorskip("lm_eval", reason="needs the extra lm-eval (make test-lm-eval)")
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

pytestmark = pytest.mark.slow  # the bundled model compiles
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=256, max_prefills_per_step=4, max_model_len=288,
    page_size=16, kv_cache_tokens=2048,
)  # fmt: skip
COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
doc_to_text: "{{prompt}}"
"""
TASKS = {
    "written": """\
task: written
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [";"], max_gen_toks: 8, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "chosen": """\
task: chosen
output_type: multiple_choice
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    """Prompts, each with its answer and two choices: the answer and another question's."""
    prompts = tasks.make_prompts("needle", 256, 4, seed=3)
    answers = [prompt.answer for prompt in prompts]
    return [
        {"prompt": prompt.prompt, "answer": answer.removesuffix(";"), "choices": [answer, other]}
        for prompt, answer, other in zip(prompts, answers, answers[1:] + answers[:1])
    ]


@pytest.fixture(scope="module")
def server():
    model, params = checkpoint.load("bundled", "float32")
    engine = padded(Engine.from_model(params, model, CONFIG, TOKENIZER))
    with served(engine, CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def expected():
    """A function: prompt, continuation → the continuation's log-probability, and whether it is the
    greedy one."""
    model, params = checkpoint.load("bundled", "float32")

    @jax.jit
    def logprobs(tokens):
        attend = causal_attend(model)
        hidden, _ = llama.forward(params, model, tokens, jnp.arange(len(tokens)), attend)
        return jax.nn.log_softmax(llama.logits(params, model, hidden))

    def of(prompt: str, continuation: str) -> tuple[float, bool]:
        begun = TOKENIZER.encode(prompt, add_special_tokens=False)
        tokens = TOKENIZER.encode(prompt + continuation, add_special_tokens=False)
        assert tokens[: len(begun)] == begun
        fixed = np.pad(tokens, (0, CONFIG.max_model_len - len(tokens)))
        rows = np.asarray(logprobs(jnp.asarray(fixed)))[len(begun) - 1 : len(tokens) - 1]
        said = tokens[len(begun) :]
        return float(rows[range(len(said)), said].sum()), rows.argmax(-1).tolist() == said

    return of


def test_tasks(server: Served, questions, expected, tmp_path: Path):
    """The command `lm_eval` sends the text of the end-of-sequence token as a stop string, and the
    server stops at the token."""
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task + COMMON)
    arguments = {
        "model": "bundled", "base_url": f"{server.url}/v1/completions", "tokenizer": BUNDLED,
        "max_length": CONFIG.max_model_len, "num_concurrent": 4, "max_retries": 1,
    }  # fmt: skip
    told = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks", ",".join(TASKS), "--include_path", ".", "--output_path", "told",
            "--log_samples",
        ],
        cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    (results,) = (tmp_path / "told").glob("*/results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert scores["written"]["exact_match,none"] == 1
    assert scores["chosen"]["acc,none"] == 1
    (samples,) = (tmp_path / "told").glob("*/samples_chosen_*.jsonl")
    for sample in map(json.loads, samples.read_text().splitlines()):
        question = sample["doc"]
        for (logprob, greedy), choice in zip(sample["filtered_resps"], question["choices"]):
            wanted, is_greedy = expected(question["prompt"], choice)
            assert float(logprob) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
            assert greedy == str(is_greedy)


class Bare(LocalCompletionsAPI):
    def _create_payload(self, *args, **how) -> dict:
        return super()._create_payload(*args, **how) | {"add_special_tokens": False}


def test_texts_without_special_tokens(server: Served, questions, expected):
    """The harness counts a prompt's tokens without special tokens. If the server added one, the
    harness would sum log-probabilities from one token too early."""
    how = {
        "model": "bundled", "base_url": f"{server.url}/v1/completions", "tokenizer": str(BUNDLED),
        "tokenizer_backend": "huggingface", "tokenized_requests": False, "max_retries": 1,
    }  # fmt: skip
    asked = [(question["prompt"], each) for question in questions for each in question["choices"]]
    requests = [Instance("loglikelihood", {}, arguments, i) for i, arguments in enumerate(asked)]
    wanted = [expected(*arguments) for arguments in asked]
    for told, (logprob, is_greedy) in zip(Bare(**how).loglikelihood(requests), wanted):
        assert told[0] == pytest.approx(logprob, rel=1e-4, abs=1e-4) and told[1] == is_greedy
    for told, (logprob, _) in zip(LocalCompletionsAPI(**how).loglikelihood(requests), wanted):
        assert told[0] != pytest.approx(logprob, rel=1e-2)
