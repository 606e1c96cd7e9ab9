"""Adapters that PEFT saved, served side by side, against PEFT's own greedy tokens."""

import pytest

from paged import Engine, EngineConfig, SamplingParams
from tests.models.goldens import ADAPTER_CASES, adapter_golden, golden
from tests.paged.tiny import padded

pytestmark = pytest.mark.slow  # engines compile; tests/models/test_peft.py compares logits
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=32,
    page_size=4, kv_cache_tokens=128, adapter_slots=1, max_adapter_rank=48,
)  # fmt: skip
CASES = [adapter_golden(case) for case in ADAPTER_CASES]


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(name, marks=[pytest.mark.sweep] * (name != "llama_gqa_tied"))
        for name in sorted({case.checkpoint for case in CASES})
    ],
)
def test_greedy_tokens_are_those_of_peft(checkpoint):
    config, params, _, _ = golden(checkpoint)
    engine = padded(Engine.from_model(params, config, CONFIG))
    asked = []
    for case in CASES:
        if case.checkpoint == checkpoint:
            engine.add_adapter(case.folder.name, case.folder)
            asked += [(case.folder.name, *pair) for pair in zip(case.prompts, case.outputs)]
    names, prompts, expected = zip(*sorted(asked, key=lambda each: each[1].tolist()))
    how = SamplingParams(max_tokens=len(expected[0]), ignore_eos=True)
    outputs = engine.generate([prompt.tolist() for prompt in prompts], how, list(names))
    assert [output.tokens for output in outputs] == [tokens.tolist() for tokens in expected]
