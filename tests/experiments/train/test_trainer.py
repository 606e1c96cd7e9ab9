import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.train import bundled, trainer
from experiments.train.trainer import Options, Trainer
from models import checkpoint, load_tokenizer
from models.config import ModelConfig

ROOT = Path(__file__).parents[3]
CONFIG = ModelConfig(
    model_type="qwen3", vocab_size=512, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=2, num_kv_heads=1, head_dim=16, qk_norm=True, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
OPTIONS = Options(
    tokens=64 * 64 * 40,
    lengths="0:64=1",
    mix="0:copy=1",
    batch_tokens=2048,
    corpus_characters=20_000,
)


@pytest.mark.slow
def test_training_reduces_the_loss(tmp_path):
    trainer = Trainer(CONFIG, OPTIONS, tmp_path)
    losses = [trainer.advance()[1] for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(512), rel=0.1)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    lengths, mix = "0:64=1;8000:64=.5,100=.5", "0:needles=1;3000:needles=.2,count=.8"
    options = replace(
        OPTIONS, lengths=lengths, mix=mix, jump_from=3000, qk_gain=1.75, filler_weight=0.15
    )
    whole, first = (Trainer(CONFIG, options, tmp_path / name) for name in ("whole", "parts"))
    for _ in range(8):
        whole.advance()
    for _ in range(4):
        first.advance()
    first.save()
    second = Trainer(CONFIG, options, tmp_path / "parts")
    assert second.step == 4
    for _ in range(4):
        second.advance()
    assert (second.step, second.tokens) == (whole.step, whole.tokens)
    one, two = (jax.tree.leaves((t.params, t.state)) for t in (whole, second))
    for a, b in zip(one, two):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def short_run(folder: Path) -> Trainer:
    return Trainer(CONFIG, replace(OPTIONS, tokens=2048 * 12), folder)


@pytest.mark.slow  # starts a process
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    whole = short_run(tmp_path / "whole")
    whole.run()
    folder = tmp_path / "killed"
    code = (
        "import sys, pathlib; from tests.experiments.train.test_trainer import short_run;"
        "short_run(pathlib.Path(sys.argv[1])).run(checkpoint_seconds=0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT) as child:
        seen = set[int]()
        while len(seen) < 3:  # checkpoints
            with suppress(FileNotFoundError):
                seen.add((folder / trainer.CHECKPOINT).stat().st_mtime_ns)
            assert child.poll() is None, "the run ended before it was killed"
            time.sleep(0.001)
        child.kill()
    resumed = short_run(folder)
    assert 0 < resumed.step < whole.step
    resumed.run()
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens)
    one, two = (jax.tree.leaves((t.params, t.state)) for t in (whole, resumed))
    for a, b in zip(one, two):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_run_stops_at_the_budget_and_the_export_loads(tmp_path):
    trainer = Trainer(CONFIG, replace(OPTIONS, tokens=5000), tmp_path / "run")
    trainer.run(evaluate_every=4000, evaluation_prompts=1)
    assert trainer.tokens >= 5000 and (tmp_path / "run" / "checkpoint.npz").exists()
    assert any("exact_match" in row for row in trainer.log)
    assert json.loads(json.dumps(trainer.log)) == trainer.log
    bundled.export(tmp_path / "model", CONFIG, trainer.params)
    config, loaded = checkpoint.load(tmp_path / "model")
    assert config == CONFIG
    for a, b in zip(jax.tree.leaves(trainer.params), jax.tree.leaves(loaded)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert load_tokenizer(tmp_path / "model")("a;")["input_ids"][0] == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    Trainer(CONFIG, OPTIONS, tmp_path).save()
    with pytest.raises(ValueError, match="another model"):
        Trainer(CONFIG.replace(num_layers=1), OPTIONS, tmp_path)


@pytest.mark.parametrize("changed", [{"seed": 2}, {"qk_gain": 2.0}, {"corpus_characters": 30_000}])
def test_a_run_does_not_go_on_from_another_runs_beginning(tmp_path, changed):
    began = Trainer(CONFIG, OPTIONS, tmp_path)
    began.record(dict(step=0, tokens=0, options=asdict(OPTIONS)))
    began.save()
    Trainer(CONFIG, replace(OPTIONS, tokens=128, rates="0:.5"), tmp_path)
    with pytest.raises(ValueError, match=f"began with {next(iter(changed))} .*, not"):
        Trainer(CONFIG, replace(OPTIONS, **changed), tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04torn", b"{}", b"\x93NUMPY"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    (tmp_path / trainer.CHECKPOINT).write_bytes(content)
    with pytest.raises(ValueError, match="is no checkpoint of a training run"):
        Trainer(CONFIG, OPTIONS, tmp_path)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("lengths", "abc"), ("lengths", "5:128=1"), ("lengths", "0:128=0"), ("lengths", "0:8=1"),
        ("lengths", "0:128=1;900:256=1;300:512=1"), ("mix", "0:foo=1"), ("mix", "0:needles=-1"),
        ("mix", "0:needles"), ("rates", "abc"), ("rates", "1:2:3"), ("rates", "0:nan"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_followed_is_refused(name, schedule):
    with pytest.raises(ValueError, match=f"{name} must be a schedule from token 0 on"):
        replace(OPTIONS, **{name: schedule})


def test_the_judge_has_64_kv_heads_and_schedules_that_hold(tmp_path):
    program = "from dataclasses import replace; from experiments.train import bundled; "
    program += "replace(bundled.PROGRAM, main=lambda flags, output: print(repr(flags))).run()"
    arguments = ["--flagfile=configs/judge_training.flags", f"--output_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    names = {"BundledFlags": bundled.BundledFlags, "Options": Options}
    flags = eval(done.stdout, names)
    options, config = flags.training, flags.config
    assert config.num_layers * config.num_kv_heads == 64 and config.num_heads == 16
    count = sum(
        x.size
        for x in jax.tree.leaves(
            jax.eval_shape(
                lambda key: trainer.initialise(config, key, options.qk_gain), jax.random.key(0)
            )
        )
    )
    assert 6e6 < count < 10e6
    for tokens in range(0, int(options.tokens), 500_000):
        for schedule in (options.mix, options.lengths):
            assert sum(trainer.shares_at(schedule, tokens).values()) == pytest.approx(1.0)
    assert max(map(int, trainer.shares_at(options.lengths, options.tokens))) == 4096


def test_initial_gains_and_the_weight_of_filler_are_those_of_the_options(tmp_path):
    with pytest.raises(ValueError, match=r"filler_weight must be at least 0 and below 0\.25"):
        replace(OPTIONS, filler_weight=0.25)
    options = replace(OPTIONS, mix="0:needles=1", qk_gain=2, filler_weight=0.125)
    new = Trainer(CONFIG, options, tmp_path)
    assert (new.params["layers"][1]["q_norm"] == 2).all()
    weights = new.data.batch(0, 64, 4, {"needles": 1.0}).weights
    assert set(np.unique(weights[weights < 1])) == {0, 0.125}


def test_schedule():
    lengths = "0:128=1;5e3:256=.8,512=.2"
    assert trainer.shares_at(lengths, 4999) == {"128": 1.0}
    assert trainer.shares_at(lengths, 5000) == {"256": 0.8, "512": 0.2}
    rates = "0:1;5e3:1;1e4:.1"
    assert trainer.rate_at(0, 0, rates) == pytest.approx(1 / 50)
    assert trainer.rate_at(1000, 5000, rates) == 1.0
    assert trainer.rate_at(1000, 7500, rates) == pytest.approx(0.55)
    assert trainer.rate_at(1000, 11_000, rates) == pytest.approx(0.1)
    for schedule in (bundled.OPTIONS.mix, bundled.OPTIONS.lengths):
        for tokens in range(0, 18_000_000, 500_000):
            assert sum(trainer.shares_at(schedule, tokens).values()) == pytest.approx(1.0)
