"""The committed adapters of the bundled model: in one batch, each tenant's answers are its own.

Nothing else uses the seed of these prompts: no adapter was trained, stopped or chosen by them.
"""

import dataclasses
import random

import pytest

from experiments.lib import report
from experiments.tasks import answer_formats, tasks
from experiments.workloads import popularity, tenants
from models import checkpoint, load_tokenizer
from models.hub import BUNDLED
from paged import Engine, EngineConfig, SamplingParams
from paged.adapters.known import KnownAdapters
from tests.paged.tiny import padded
from tests.sweeps import swept

FOLDERS = popularity.folders(BUNDLED / "adapters")
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=128, max_prefills_per_step=4, max_model_len=288,
    kv_cache_tokens=4096, prefix_caching=True, adapter_slots=3, max_adapter_rank=16,
)  # fmt: skip
SEED = 11


@pytest.fixture(scope="module")
def bundled():
    return checkpoint.load("bundled")


def serve(bundled, prompts: int, changes: dict):
    """The engine, and (tenant, prompt, answer) for all tenants and the base model, which get the
    same questions in random order."""
    config, params = bundled
    engine_config = dataclasses.replace(CONFIG, **changes)
    engine = padded(Engine.from_model(params, config, engine_config, load_tokenizer("bundled")))
    for name, folder in FOLDERS.items():
        engine.add_adapter(name, folder)
    asked: list[tuple[str | None, tasks.TaskPrompt]] = []
    for task in answer_formats.TASKS:
        for prompt in tasks.make_prompts(task, 256, prompts, SEED):
            asked += [(name, answer_formats.asked(name, prompt)) for name in FOLDERS]
            asked.append((None, prompt))
    random.Random(0).shuffle(asked)
    how = [SamplingParams(max_tokens=p.max_tokens, stop=p.stop) for _, p in asked]
    outputs = engine.generate([p.prompt for _, p in asked], how, [name for name, _ in asked])
    return engine, [(*each, output.text) for each, output in zip(asked, outputs, strict=True)]


def test_the_adapters_are_of_these_weights():
    known = KnownAdapters(checkpoint.load_config("bundled"), CONFIG)
    adapters = [known.read(name, folder) for name, folder in FOLDERS.items()]
    assert tenants.formats(adapters, "bundled") == {name: name for name in FOLDERS}
    assert len(adapters) >= 8 and len({adapter.rank for adapter in adapters}) >= 3
    files = (file for folder in FOLDERS.values() for file in folder.iterdir())
    assert sum(file.stat().st_size for file in files) < 2_500_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    swept([pytest.param({"multi_step": 4}, id="multi-step"), pytest.param({}, id="one step")], 1),
)
def test_each_tenant_gets_its_own_answers(bundled, changes):
    engine, answered = serve(bundled, 4, changes)
    exact = [report.is_exact(text, prompt.answer, prompt.stop) for _, prompt, text in answered]
    # An adapter errs now and then, but its wrong answers are never another adapter's.
    assert sum(exact) >= 0.9 * len(exact)
    for (name, prompt, text), right in zip(answered, exact):
        others = {
            p.answer[:-1]
            for other, p, _ in answered
            if p.prompt == prompt.prompt and other not in (name, None)
        }
        assert right or text not in others, (name, text, prompt.answer)
    loads = [event for event in engine.events if event["event"] == "load"]
    assert len(loads) > CONFIG.adapter_slots and any(event["evicted"] for event in loads)
