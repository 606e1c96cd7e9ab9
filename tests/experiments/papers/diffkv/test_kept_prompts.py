"""Systems that share kept prompts answer as engines that prefill their own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib.presets import PRESETS, WHOLE
from experiments.papers.diffkv import kept_prompts
from paged.device.executor import DeviceExecutor
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY, random_params

ONE = WHOLE | {"max_prefills_per_step": 1, "page_size": 4}
PROMPTS = [list(np.random.default_rng(0).integers(3, 60, n)) for n in (40, 9, 33, 2, 51)]
SMALL = {"kv_cache_tokens": 40, "preemption_mode": "recompute"}
MADE_BY = {"weights": "model"}
HOW = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module")
def params():
    return random_params()


def make(params, name: str, **changes) -> Engine:
    config = PRESETS[name].engine_config(TINY, **ONE | changes)
    return Engine.from_model(params, TINY, config)


def same(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert [each.top.keys() for each in ours.logprobs] == [
            each.top.keys() for each in theirs.logprobs
        ]
        np.testing.assert_allclose(
            [each.logprob for each in ours.logprobs], [each.logprob for each in theirs.logprobs],
            atol=1e-5,
        )  # fmt: skip


@pytest.fixture
def prefilled(monkeypatch) -> list[int]:
    """The lengths of the prompts that were computed."""
    lengths: list[int] = []
    whole = kept_prompts.write

    def write(paths: kept_prompts.Paths, prompt: kept_prompts.Prompt, length: int) -> None:
        lengths.append(length)
        whole(paths, prompt, length)

    monkeypatch.setattr(kept_prompts, "write", write)
    return lengths


@pytest.mark.parametrize(
    "names",
    [
        ("diffkv", "kv_int8"),
        pytest.param(
            ("diffkv_streaming", "diffkv_three", "diffkv_selected"),
            marks=pytest.mark.slow,
            id="others",
        ),
    ],
)
def test_systems_share_prompts_and_answer_as_before(params, tmp_path, prefilled, names):
    """Thresholds, formats, streaming heads and page selection change no prompt. A preempted
    sequence reads its prompt again."""
    for name in names:
        changes = SMALL if name == "kv_int8" else {}
        expected = make(params, name, **changes).generate(PROMPTS, HOW)
        engine = kept_prompts.keep_prompts(make(params, name, **changes), tmp_path, MADE_BY)
        same(engine.generate(PROMPTS, HOW), expected)
        assert sorted(prefilled) == sorted(map(len, PROMPTS)), "only by the first system"
        assert (sum(step.preemptions for step in engine.metrics.steps) > 0) == bool(changes)
    assert len(list(tmp_path.iterdir())) == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    "name",
    ["snapkv", *(pytest.param(n, marks=pytest.mark.slow) for n in ("h2o", "kivi"))],
)
def test_other_scores_have_sums_of_their_own(params, tmp_path, prefilled, name):
    kept_prompts.keep_prompts(make(params, "diffkv"), tmp_path, MADE_BY).generate(PROMPTS, HOW)
    expected = make(params, name).generate(PROMPTS, HOW)
    for _ in range(2):
        engine = kept_prompts.keep_prompts(make(params, name), tmp_path, MADE_BY)
        same(engine.generate(PROMPTS, HOW), expected)
    assert len(prefilled) == 2 * len(PROMPTS)
    assert len(list(tmp_path.iterdir())) == 3 * len(PROMPTS), "keys and values are shared"


def test_bfloat16_and_log_probabilities_of_prompts(params, tmp_path):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    how = replace(HOW, prompt_logprobs=2)
    expected = make(low, "diffkv").generate(PROMPTS, HOW)
    for _ in range(2):
        engine = kept_prompts.keep_prompts(make(low, "diffkv"), tmp_path, MADE_BY)
        found = engine.generate(PROMPTS, HOW)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
    (one,) = engine.generate(PROMPTS[:1], how)
    (other,) = make(low, "diffkv").generate(PROMPTS[:1], how)
    assert one.prompt_logprobs == other.prompt_logprobs


def test_another_model_and_a_damaged_file_are_prefilled(params, tmp_path, prefilled):
    def keep(weights: str) -> Engine:
        made_by = {"weights": weights}
        return kept_prompts.keep_prompts(make(params, "diffkv"), tmp_path, made_by)

    expected = keep("one").generate(PROMPTS, HOW)
    keep("other").generate(PROMPTS, HOW)
    assert len(prefilled) == 2 * len(PROMPTS)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    same(keep("one").generate(PROMPTS, HOW), expected)
    assert len(prefilled) == 3 * len(PROMPTS)


def test_a_file_of_other_arrays_is_written_again(tmp_path):
    paths = tmp_path / "prompt.npz", tmp_path / "prompt_sums.npz"
    keys = np.random.default_rng(1).normal(size=(2, 8, 3, 4)).astype(np.float32)
    prompt = kept_prompts.Prompt(keys, -keys, keys[..., 0], keys[0, 0, 0])
    for path in paths:
        for damage in (
            lambda file: np.savez(file, keys=keys), lambda file: np.save(file, keys),
        ):  # fmt: skip
            with path.open("wb") as file:
                damage(file)
            assert kept_prompts.read(paths, 8, "float32") is None
            kept_prompts.write(paths, prompt, 6)
            found = kept_prompts.read(paths, 8, "float32")
            assert found is not None
            np.testing.assert_array_equal(found.keys[:, :6], keys[:, :6])


def test_without_room_prompts_are_only_computed_again(params, tmp_path, capsys):
    (tmp_path / "prompts").write_text("a file in place of the folder")
    expected = make(params, "diffkv").generate(PROMPTS, HOW)
    engine = kept_prompts.keep_prompts(make(params, "diffkv"), tmp_path / "prompts", MADE_BY)
    same(engine.generate(PROMPTS, HOW), expected)
    assert capsys.readouterr().out.count("Prompts are not kept from here on") == 1


@pytest.mark.parametrize(
    "name, changes",
    [("vllm", {}), ("diffkv", {"max_prefills_per_step": 2}), ("diffkv", {"quantization": "w8a8"})],
)
def test_other_engines_stay_as_they_are(params, tmp_path, name, changes):
    engine = make(params, name, **changes)
    assert isinstance(kept_prompts.keep_prompts(engine, tmp_path, {}).executor, DeviceExecutor)
    assert not kept_prompts.can_keep(engine.config)
