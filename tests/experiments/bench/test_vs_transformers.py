"""The race against transformers: its workload, its numbers and, where torch is, a short run."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.bench import race, vs_transformers
from experiments.bench.race import Contestant, Row
from experiments.bench.vs_transformers import TransformersFlags
from paged.engine import EngineConfig
from paged.metrics import StepRecord

ROOT = Path(__file__).parents[3]
ENGINE = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_prefills_per_step=4, page_size=4,
    kv_cache_tokens=256, max_model_len=32,
)  # fmt: skip
FLAGS = TransformersFlags(
    models=("bundled",), batches=(1, 3), prompt_tokens=(4, 12), output_tokens=6, repeats=2,
    engine=ENGINE,
)  # fmt: skip


def test_prompts_are_ragged_seeded_and_within_their_span():
    prompts = race.make_prompts(50, 300, (4, 12), seed=1)
    assert {len(prompt) for prompt in prompts} == set(range(4, 13))
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    assert prompts == race.make_prompts(50, 300, (4, 12), seed=1)
    assert prompts != race.make_prompts(50, 300, (4, 12), seed=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "--models must name at least one"),
        ({"models": ("gpt",)}, "each one of bundled, 100m"),
        ({"batches": ()}, "--batches"),
        ({"batches": (0, 4)}, "--batches"),
        ({"prompt_tokens": (5, 4)}, r"the shortest and the longest, not \(5, 4\)"),
        ({"prompt_tokens": (32,)}, "the shortest and the longest"),
        ({"prompt_tokens": (0, 4)}, "--prompt_tokens"),
        ({"output_tokens": 3}, "--output_tokens must be at least 4, not 3"),
        ({"repeats": 0}, "--repeats must be at least 1, not 0"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FLAGS, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": (64,)}, r"a batch of 64 exceeds max_num_seqs \(4\)"),
        ({"models": ("100m",), "output_tokens": 9000}, "exceed 100m's context of"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        vs_transformers.check(replace(FLAGS, **change))


def test_equal_share_counts_tokens_by_place():
    assert race.equal_share([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0
    assert race.equal_share([[1, 2], [4, 3]], [[1, 2], [3, 4]]) == 0.5


def test_speedups_are_ratios_of_median_rates_at_the_largest_batch():
    seconds = {"ours": [1.0, 9.0, 2.0], "static": [4.0, 4.0, 0.1], "continuous": [20.0, 10.0, 30.0]}
    rows = [
        Row(
            "bundled", batch, system, repeat, batch * times[repeat], 0.0, 100 * batch, equal, batch,
            *((3e-3, 3e-4, 2e-3) if system == "ours" else (None, None, None)),
        )
        for batch in (1, 8)
        for system, times in seconds.items()
        for repeat, equal in enumerate([1.0, 1.0, 0.7])
    ]  # fmt: skip
    rows[0] = replace(rows[0], seconds=1e-9)  # an outlier at batch 1, which changes no median
    numbers = vs_transformers.values(FLAGS, rows)
    assert numbers["tokens_per_s_ours_bundled_8"] == 50
    assert numbers["tokens_per_s_continuous_bundled_1"] == 5
    assert numbers["speedup_static_bundled"] == 2
    assert numbers["speedup_continuous_bundled"] == 10
    assert numbers["equal_continuous_bundled"] == pytest.approx(0.9)
    assert numbers["step_over_floor_bundled"] == pytest.approx(1.5)
    assert numbers["host_share_bundled"] == pytest.approx(0.1)
    assert "speedup_ours_bundled" not in numbers
    assert vs_transformers.STUDY.report(FLAGS, rows)["holds"] is True
    alone = [row for row in rows if row.system == "ours"]
    assert vs_transformers.STUDY.report(FLAGS, alone)["holds"] is None


def record(time_s, prefill_tokens, decode_tokens, num_running):
    return StepRecord(
        0, time_s, 1.0, 0.0, prefill_tokens, decode_tokens, num_running, 0, 0, 0, 0, 0, 0, 0
    )


def test_step_times_are_of_steps_that_decode_the_whole_batch_after_another_such():
    steps = [
        record(1.0, 40, 0, 4),
        record(2.0, 0, 4, 4),  # follows a prefill
        record(4.0, 0, 4, 4),
        record(12.0, 0, 16, 4),  # four tokens of each
        record(13.0, 0, 3, 3),  # one sequence has ended
        record(99.0, 0, 4, 4),  # the next batch
        record(102.0, 0, 4, 4),
    ]
    assert race.decode_times(steps, 4) == ([2.0, 2.0, 3.0], [1.0, 0.25, 1.0])


def test_systems_take_turns_after_a_warm_up_and_must_give_what_was_asked():
    calls = []

    def system(name, offset):
        def run(prompts, output_tokens):
            calls.append((len(prompts), name))
            return [[prompt[0] + offset] * output_tokens for prompt in prompts]

        return run

    systems = {
        "ours": Contestant(system("ours", 0), 3),
        "static": Contestant(system("static", 1), 3, same_as="ours"),
    }
    rows = list(race.race("bundled", systems, [[1], [2], [3]], 6, 2))
    assert calls == [(3, "ours"), (3, "static")] * 3
    assert [(row.system, row.repeat, row.equal) for row in rows] == [
        ("ours", 0, 1.0), ("static", 0, 0.0), ("ours", 1, 1.0), ("static", 1, 0.0),
    ]  # fmt: skip
    assert {row.output_tokens for row in rows} == {18}
    assert all(row.seconds > 0 and row.step_s is None for row in rows)
    systems["static"] = Contestant(lambda prompts, output_tokens: [[1]] * len(prompts), 3)
    with pytest.raises(RuntimeError, match=r"static gave outputs of \[1, 1, 1\] tokens"):
        list(race.race("bundled", systems, [[1], [2], [3]], 6, 2))


def test_a_thin_slice_of_the_race(tiny_folder):
    """transformers reads the same folder and returns the same tokens, in either way of batching."""
    pytest.importorskip("torch", reason="needs torch: make test-parity")
    rows = list(vs_transformers.race_model("bundled", tiny_folder, FLAGS))
    assert [(row.batch, row.system) for row in rows] == [
        (batch, system) for batch in (1, 3) for _ in range(2)
        for system in ("ours", "static", "continuous")
    ]  # fmt: skip
    # Near-ties of random weights change a few tokens; a wrong mask or position changes nearly all.
    assert min(row.equal for row in rows) > 0.8
    ours = [row for row in rows if row.system == "ours"]
    assert all(min(row.step_s or 0, row.host_s or 0, row.floor_s or 0) > 0 for row in ours)
    assert vs_transformers.STUDY.report(FLAGS, rows)["values"]
