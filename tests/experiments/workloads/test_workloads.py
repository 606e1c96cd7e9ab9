"""Synthetic lengths against the published means, tasks, arrivals, and every bad flag."""

import math

import numpy as np
import pytest

from experiments.workloads import synthetic_lengths, workloads
from experiments.workloads.workloads import Vocabulary, WorkloadConfig
from tests.experiments.conftest import TINY
from tests.experiments.workloads.conftest import load

# Synthetic lengths


@pytest.mark.parametrize("dataset", ["sharegpt", "alpaca"])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_synthetic_means_are_the_published_ones(dataset, sigma):
    pairs, _ = synthetic_lengths.draw(50_000, dataset, sigma, 2048, seed=3)
    lengths = np.array(pairs)
    np.testing.assert_allclose(
        lengths.mean(0), synthetic_lengths.PUBLISHED_MEANS[dataset], rtol=0.03
    )
    assert lengths.min() >= 1 and lengths.sum(1).max() <= 2048


def test_unreachable_means_are_lowered_and_said(vocabulary):
    pairs, notes = synthetic_lengths.draw(20_000, "sharegpt", 1.0, 256, seed=0)
    lengths = np.array(pairs)
    assert lengths.sum(1).max() <= 256
    assert notes["published_mean_prompt_tokens"] == 161.31
    assert notes["target_mean_prompt_tokens"] == 64
    target = notes["target_mean_prompt_tokens"], notes["target_mean_output_tokens"]
    np.testing.assert_allclose(lengths.mean(0), target, rtol=0.03)


def test_synthetic_prompts_are_ordinary_tokens(vocabulary, tokenizer):
    requests = load("alpaca", vocabulary, num_requests=200)
    tokens = {token for r in requests for token in r.prompt}
    assert tokens.isdisjoint(tokenizer.all_special_ids)
    assert max(tokens) < TINY.vocab_size and len(tokens) > 400
    assert all(isinstance(token, int) for token in tokens)


def test_a_length_divisor_scales_the_means_and_the_context(tokenizer):
    long = Vocabulary(tokenizer, TINY.vocab_size, 2048)
    config = WorkloadConfig("sharegpt", num_requests=20_000, length_divisor=8, length_sigma=0.5)
    requests = workloads.load(config, long).requests
    lengths = np.array([(len(r.prompt), r.max_tokens) for r in requests])
    published = np.array(synthetic_lengths.PUBLISHED_MEANS["sharegpt"])
    np.testing.assert_allclose(lengths.mean(0), published / 8, rtol=0.03)
    assert lengths.min() >= 1 and lengths.sum(1).max() <= 2048 / 8


@pytest.mark.parametrize("shots, divisor, prefix", [(1, 1, 80), (5, 1, 341), (5, 4, 85)])
def test_translations_share_their_prefix_and_nothing_more(vocabulary, shots, divisor, prefix):
    requests = load(
        "translation", vocabulary, num_requests=300, num_shots=shots, length_divisor=divisor
    )
    beginnings = {tuple(r.prompt[:prefix]) for r in requests}
    assert len(beginnings) == 1
    assert len({r.prompt[prefix] for r in requests}) > 100
    lengths = np.array([(len(r.prompt) - prefix, r.max_tokens) for r in requests])
    assert lengths.min() >= 1 and lengths.sum(1).max() + prefix <= min(1024, 2048 / divisor)
    np.testing.assert_allclose(lengths.mean(0), np.array([30, 40]) / divisor, rtol=0.2)
    assert all(r.ignore_eos for r in requests)


def test_a_prefix_that_leaves_no_room_is_refused(tokenizer):
    short = Vocabulary(tokenizer, TINY.vocab_size, 342)
    with pytest.raises(ValueError, match=r"341 tokens leaves no room .* context of 342"):
        load("translation", short, num_shots=5)


@pytest.mark.parametrize("divisor, half", [(1, 1024), (4, 256)])
def test_chats_are_cut_to_half_of_the_context(tokenizer, divisor, half):
    long = Vocabulary(tokenizer, TINY.vocab_size, 2048)
    requests = load("chatbot", long, num_requests=500, length_divisor=divisor)
    prompts = np.array([len(r.prompt) for r in requests])
    outputs = np.array([r.max_tokens for r in requests])
    # Most prompts (vLLM §6.5), but few outputs, are as long as half of the context allows.
    assert prompts.max() == half and (prompts == half).mean() > 0.5
    assert outputs.max() <= half and (outputs == half).mean() < 0.1
    assert outputs.mean() == pytest.approx(337.99 / divisor, rel=0.15)


# Tasks


def test_tasks_share_the_requests_and_bring_answers(vocabulary):
    spec = "tasks:needle,story"
    requests = load(spec, vocabulary, num_requests=5, context_length=300)
    assert sorted(r.task for r in requests) == ["needle"] * 3 + ["story"] * 2
    for request in requests:
        assert (request.answer is None) == (request.task == "story")
        assert vocabulary.count(request.prompt) + request.max_tokens <= 300


@pytest.mark.parametrize("names", ["nonsense", "needle,", ""])
def test_unknown_tasks_are_refused(vocabulary, names):
    with pytest.raises(ValueError):
        load(f"tasks:{names}", vocabulary)


# Arrivals, seeds and flags


def test_arrivals_are_poisson_or_all_at_once():
    arrivals = workloads.poisson_arrivals(20_000, 4.0, seed=0)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)
    assert not workloads.poisson_arrivals(10, math.inf, seed=0).any()


@pytest.mark.parametrize("spec", ["sharegpt", "translation", "chatbot", "tasks:needle"])
def test_a_workload_is_a_function_of_its_seed(vocabulary, spec):
    def make(seed, **options):
        options = {"request_rate": 2.0, "num_requests": 8, "context_length": 300} | options
        return load(spec, vocabulary, seed=seed, **options)

    assert make(1) == make(1)
    assert make(1) != make(2)
    # The rate changes the arrivals, not the prompts.
    assert [r.prompt for r in make(1)] == [r.prompt for r in make(1, request_rate=9.0)]


@pytest.mark.parametrize(
    "spec, options, complaint",
    [
        ("chat", {}, "--workload must be prompts:FILE, .* not 'chat'"),
        ("prompts", {}, "lacks its source"),
        ("trace:", {}, "lacks its source"),
        ("prompts:/nowhere/p.txt", {}, "there is no file '/nowhere/p.txt'"),
        ("sharegpt:/nowhere/s.json", {}, "there is no file"),
        ("sharegpt", {"num_requests": 0}, "--num_requests must be at least 1, not 0"),
        ("sharegpt", {"max_tokens": -1}, "--max_tokens must be at least 1, not -1"),
        ("sharegpt", {"request_rate": 0.0}, "--request_rate must be positive or inf, not 0.0"),
        ("sharegpt", {"request_rate": math.nan}, "--request_rate"),
        ("sharegpt", {"context_length": 0}, "--context_length must be at least 1, not 0"),
        ("sharegpt", {"time_scale": -1.0}, "--time_scale must be finite and at least 0, not -1"),
        ("sharegpt", {"length_sigma": 9.0}, "--length_sigma must be from 0 to 3, not 9.0"),
        ("sharegpt", {"overlong": "cut"}, "--overlong must be error, clip or drop, not 'cut'"),
        ("sharegpt", {"seed": -1}, "--seed"),
        ("sharegpt", {"length_divisor": 0}, "--length_divisor must be from 1 to 512, not 0"),
        ("translation", {"num_shots": 3}, "--num_shots must be 1 or 5, not 3"),
        ("translation:wmt16.json", {}, "--workload=translation is synthetic and takes no source"),
    ],
)
def test_bad_flags_are_refused_when_the_config_is_made(spec, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        WorkloadConfig(spec, **options)


@pytest.mark.parametrize("rate", [1e-12, 1e-320])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_arrivals_that_no_clock_reaches_are_refused(vocabulary, rate):
    with pytest.raises(ValueError, match=f"--request_rate={rate}: the last request arrives at"):
        load("sharegpt", vocabulary, num_requests=9, request_rate=rate)
