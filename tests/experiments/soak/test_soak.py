"""A short soak: it notices each fault, and it ends with an error if a mechanism that its flags name
cannot happen or has not happened."""

import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.policies import SOAKED
from experiments.soak import __main__ as soak
from experiments.soak.checks import Asked, Violation
from experiments.soak.comparison import compare, smallest_lead
from experiments.soak.mechanisms import check_mechanisms, named_mechanisms, observe
from experiments.soak.operations import OPERATIONS, abort, submit
from experiments.soak.users import SAMPLING, Users, reference_config
from models import llama
from models import params as parameters
from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from tests.experiments.conftest import TINY
from tests.paged.hashing_executor import HashingExecutor, TwinLoads
from tests.paged.tiny import padded
from tests.paged.twin_cases import ADAPTERS

ROOT = Path(__file__).parents[3]
CONFIG = EngineConfig(
    max_num_seqs=6, max_num_batched_tokens=32, max_prefills_per_step=3, max_model_len=96,
    page_size=4, kv_cache_tokens=200, prefix_caching=True,
)  # fmt: skip
# The device's hashing twin reports no log-probabilities of prompts.
PARAMETERS = {name: values for name, values in SAMPLING.items() if name != "prompt_logprobs"}
# With a repetition penalty, the twin itself asserts that pages equal sampling's history.
WITHOUT_HISTORY = {name: values for name, values in PARAMETERS.items() if "penalty" not in name}

GATES = ((0.0, 1.0), (1.0, 0.0))
NO_GATES: dict[str, Any] = {"gates": (), "streaming_share": None}
LSERVE = replace(
    CONFIG, policy="lserve", preemption_mode="swap", kv_cache_tokens=400,
    policy_options={
        "gates": GATES, "streaming_share": 0.5, "budget": 16, "logical_page": 4, "sink": 4,
        "local": 8,
    },
)  # fmt: skip
DIFFKV = replace(
    CONFIG, policy="diffkv", prefix_caching=False, preemption_mode="swap", chunked_prefill=False,
    page_size=8, max_num_batched_tokens=96,
    policy_options={"window": 8, "low": "K4V4", "alpha_h": 1.2, "alpha_l": 0.9},
)  # fmt: skip


def twin(config: EngineConfig) -> HashingExecutor:
    executor = HashingExecutor(config, eos_rate=0.03)
    if config.adapter_slots:
        executor.adapters = TwinLoads(executor)
    return executor


def make_users(
    tokenizer, engine_class=Engine, seed=0, sampling=PARAMETERS, config=CONFIG, interrupts=0.0
) -> Users:
    """Users of an engine on a twin of the device, whose tokens depend on everything in a request's
    pages."""
    alone = reference_config(config)
    engine = engine_class(TINY, config, twin(config), tokenizer)
    reference = Engine(TINY, alone, twin(alone), tokenizer)
    for adapter in ADAPTERS if config.adapter_slots else ():
        engine.add_known_adapter(adapter)
        reference.add_known_adapter(adapter)
    return Users(engine, reference, seed, 0.3, sampling=sampling, interrupts=interrupts)


def run(users: Users, steps=300, drain_every=100, operations=OPERATIONS):
    return soak.run(
        users, steps=steps, drain_every=drain_every, operations=operations, progress=False
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "admit_after_swap": "resumed", "page_size": 3},
        {"preemption_mode": "auto", "multi_step": 3},
        {"preemption_mode": "swap", "run_ahead": False, "page_size": 8},
        {"preemption_mode": "auto", "adapter_slots": 2, "adapter_pages": 6},
    ],
)
def test_nothing_is_lost_in_a_cache_that_is_too_small(tokenizer, changes):
    users = make_users(tokenizer, config=replace(CONFIG, **changes))
    samples, steps, error = run(users, steps=500)
    assert error is None and steps == 500
    numbers = soak.summary(users, samples, steps, error)
    # Every mechanism that the checks are about has happened.
    for name in (
        "aborted", "cached_tokens", "closed", "compared", "ended_abort", "ended_eos",
        "ended_length", "ended_stop", "preemptions", "refused", "parallel_samples",
        "beam_searches", "copied_blocks",
    ):  # fmt: skip
        assert numbers[name] > 0, name
    swaps = changes["preemption_mode"] != "recompute"
    assert (numbers["swapped_out"] >= numbers["swapped_in"] > 0) == swaps
    assert (numbers["adapted"] > 0) == ("adapter_slots" in changes)
    assert numbers["pinned_prefixes"] == 2 and numbers["near_ties"] == 0
    assert all(numbers[kind] == 0 for kind in soak.KINDS)
    ended = sum(count for name, count in numbers.items() if name.startswith("ended_"))
    assert numbers["requests"] == ended + numbers["closed"] == users.counts["requests"]
    assert max(s.waiting for s in samples) > 0
    assert not users.asked and not users.streams and not users.engine.events


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_real_interrupts_lose_and_double_nothing(tokenizer, preemption_mode):
    config = replace(CONFIG, preemption_mode=preemption_mode)
    users = make_users(tokenizer, config=config, interrupts=0.2)
    samples, steps, error = run(users, steps=400, drain_every=50)
    assert error is None and steps == 400
    numbers = soak.summary(users, samples, steps, error)
    assert numbers["interrupted"] > 15 and numbers["ended_error"] > 15
    assert numbers["compared"] > 15 and not users.asked and not users.streams


def test_a_seed_repeats_a_run(tokenizer):
    digests = []
    for seed in (0, 0, 1):
        users = make_users(tokenizer, seed=seed)
        assert run(users, steps=100)[2] is None
        digests.append(users.digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_stopped_run_has_its_samples(tokenizer):
    users = make_users(tokenizer)
    samples, steps, error = soak.run(
        users, steps=300, progress=False, stop_requested=lambda: users.counts["requests"] > 20
    )
    assert error is None and 0 < steps < 300
    assert samples[-1].step == steps and samples[-1].requests > 20


class Deaf(Engine):
    """Loses the first output of each step, once more than 20 requests have ended."""

    def step(self):
        outputs = super().step()
        return outputs[1:] if len(self.metrics.requests) > 20 else outputs


class Stammering(Engine):
    def step(self):
        return [output for output in super().step() for _ in range(2)]


class Idle(Engine):
    def step(self):
        return [] if len(self.metrics.steps) > 50 else super().step()


class Starving(Engine):
    """Serves the latest request first: the oldest waits for as long as others arrive."""

    def step(self):
        waiting = self.scheduler.waiting
        self.scheduler.waiting = deque(sorted(waiting, key=lambda group: -group.order))
        return super().step()


class Careless(Engine):
    """Logs an arrival before it checks the request."""

    def add_request(self, prompt, *args, **kwargs):
        self.events.append({"event": "arrival"})
        return super().add_request(prompt, *args, **kwargs)


class Lenient(Engine):
    def abort(self, request_id):
        return super().abort(request_id) if request_id in self.requests.unfinished else None


class Unranked(Engine):
    """Returns the worst sequence first."""

    def step(self):
        outputs = super().step()
        return [replace(o, sequences=o.sequences[::-1]) for o in outputs]


class Forgetful(Engine):
    """Keeps dropped requests on the list of requests to abort."""

    def _settle(self):
        dropped = list(self.requests.dropped)
        super()._settle()
        self.requests.dropped.extend(dropped)


@pytest.mark.parametrize(
    "engine_class, kind, drain_every",
    [
        (Deaf, "lost", 1500),
        (Stammering, "doubled", 1500),
        (Idle, "stuck", 1500),
        (Starving, "stuck", 1500),
        (Careless, "leaked_state", 1500),
        (Lenient, "accepted", 1500),
        (Unranked, "wrong_output", 1500),
        (Forgetful, "leaked_state", 100),  # it shows when all requests have ended
    ],
)
def test_an_engine_with_a_fault_is_found_out(tokenizer, engine_class, kind, drain_every):
    users = make_users(tokenizer, engine_class)
    # Requests arrive without end and none is aborted: only the fault can stop an output.
    operations = {**OPERATIONS, "submit": (1.0, submit), "abort": (0.0, abort)}
    samples, steps, error = run(users, 1500, drain_every, operations)
    assert isinstance(error, Violation) and error.kind == kind, error
    numbers = soak.summary(users, samples, steps, error)
    assert [name for name in soak.KINDS if numbers[name]] == [kind]


def take_a_block(users: Users, rng) -> None:
    if VLLMHost.of(users.engine.host_policy).pool.can_allocate(1):
        VLLMHost.of(users.engine.host_policy).pool.allocate(1)


def give_a_block_back_twice(users: Users, rng) -> None:
    pool = VLLMHost.of(users.engine.host_policy).pool
    # Others still hold this block: the engine's own assertions may notice any other block first.
    if pool.refcounts.max() > 1:
        pool.release(np.array([pool.refcounts.argmax()], np.int32))


def swallow_outputs(users: Users, rng) -> None:
    users.engine.step()


def write_over_a_page(users: Users, rng) -> None:
    assert isinstance(users.engine.executor, HashingExecutor)
    users.engine.executor._memory[1:] = 5


def take_a_host_block(users: Users, rng) -> None:
    VLLMHost.of(users.engine.host_policy).host_pool.allocate(1)


def write_over_what_is_swapped(users: Users, rng) -> None:
    assert isinstance(users.engine.executor, HashingExecutor)
    users.engine.executor._host_memory[1:] = 5


def share_what_is_written(users, rng):
    apply = HashingExecutor.apply

    def without_copies(moves):
        apply(users.engine.executor, replace(moves, copies={}))

    users.engine.executor.apply = without_copies


def hold_a_sequence(users: Users, rng) -> None:
    slots = users.engine.scheduler.slots
    slots.held[slots.active] = True


@pytest.mark.parametrize(
    "fault, kind",
    [
        (take_a_block, "leaked_blocks"),
        (take_a_host_block, "leaked_blocks"),
        (write_over_what_is_swapped, "mismatched"),
        (share_what_is_written, "mismatched"),
        (hold_a_sequence, "leaked_state"),
        (give_a_block_back_twice, "leaked_blocks"),
        (swallow_outputs, "lost"),
        (write_over_a_page, "mismatched"),
    ],
)
def test_a_fault_in_between_is_found_out(tokenizer, fault, kind):
    config = replace(CONFIG, preemption_mode="swap")
    users = make_users(tokenizer, sampling=WITHOUT_HISTORY, config=config)
    error = run(users, steps=2000, operations={**OPERATIONS, "fault": (0.1, fault)})[2]
    assert isinstance(error, Violation) and error.kind == kind, error


def test_what_differs_beside_the_tokens_is_told(tokenizer):
    """Log-probabilities that differ by more than the tolerance are reported, though the tokens are
    equal."""
    users = make_users(tokenizer)
    how = SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True, seed=1)
    (output,) = users.reference.generate([[5, 6, 7]], how)
    assert compare(output, Asked([5, 6, 7], how, True), users.reference) == (None, 0)
    (sequence,) = output.sequences
    moved = [replace(p, logprob=p.logprob - 0.25) for p in sequence.logprobs or ()]
    other = replace(output, sequences=[replace(sequence, logprobs=moved)])
    wrong, _ = compare(other, Asked([5, 6, 7], how, True), users.reference)
    assert wrong is not None and "log-probabilities (0.25 apart)" in wrong


def test_a_beam_search_is_decided_by_its_closest_cut(tokenizer):
    engine = make_users(tokenizer).engine

    def lead(*logprobs: float) -> float:
        step = {"candidates": np.array([[5, 6, 7]]), "candidate_logprobs": np.array([logprobs])}
        sampling = SamplingParams(max_tokens=1, beam_width=2)
        return smallest_lead([step], Asked([5], sampling, alone=True), engine)

    assert lead(-1.0, -1.5, -1.75) == 0.25
    assert lead(-1.0, -1.125, -3.0) == 0.125  # the order of the returned beams
    assert lead(-1.0, -1.5, -1.5) == 0


def test_memory_that_grows_is_a_violation():
    at = dict.fromkeys(
        ("running", "waiting", "blocks_used", "blocks_idle", "blocks_swapped", "requests",
         "output_tokens"), 0,
    )  # fmt: skip

    def judge(mib_a_step: float, arrays_a_step: float, minutes: float = 10):
        samples = [
            soak.Sample(i, minutes * i / 100, 500 + mib_a_step * i, int(9 + arrays_a_step * i),
                        **at, at_rest=True)
            for i in range(100)
        ]  # fmt: skip
        numbers = soak.growth(samples)
        return numbers, soak.check_growth(numbers, 10.0)

    numbers, error = judge(0.1, 0)
    assert numbers["rss_slope_mib_per_hour"] == pytest.approx(0.1 * 600)
    assert "rss_slope_mib_per_hour" not in judge(0.1, 0, minutes=0.2)[0]
    assert numbers["rss_first_mib"] == 502.5 and error is None
    assert "resident memory grew by 14.8 MiB" in str(judge(0.2, 0)[1])
    assert "more JAX arrays" in str(judge(0, 0.5)[1])


def test_an_engine_without_room_for_the_requests_is_refused(tokenizer):
    config = EngineConfig(max_model_len=96, page_size=4, kv_cache_tokens=96)
    engine = Engine(TINY, config, HashingExecutor(config), tokenizer)
    with pytest.raises(ValueError, match=r"kv_cache_tokens \(96\) must hold max_model_len \(96\)"):
        Users(engine, engine, 0, 1.0)
    config = EngineConfig(max_model_len=40)
    engine = Engine(TINY, config, HashingExecutor(config), tokenizer)
    with pytest.raises(ValueError, match="max_model_len must be at least 48, not 40"):
        Users(engine, engine, 0, 1.0)


def changed(config: EngineConfig, **options: Any) -> EngineConfig:
    """The configuration with other options of its policy."""
    return replace(config, policy_options=replace(config.policy_options, **options))


PINNING = changed(
    replace(DIFFKV, chunked_prefill=True, kv_cache_tokens=1000), pins=1, prompt_tile=8
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(LSERVE, budget=4096, **NO_GATES),
            r"no selection .*--lserve_budget \(4096\)",
        ),
        (changed(LSERVE, sparse_from=96), "no selection of pages can happen"),
        (changed(LSERVE, dense_layers=2), "no selection of pages can happen"),
        (changed(LSERVE, local=96), "no move of a streaming window can happen .*--lserve_sink"),
        (changed(LSERVE, minference_from=8, minference_budget=96), "no sparsely prefilled prompt"),
        (changed(PINNING, prompt_tile=32), "no pin of a prefix .* a third, 32 tokens"),
        (
            changed(
                replace(LSERVE, max_num_batched_tokens=128),
                minference_from=32,
                minference_budget=16,
            ),
            "no pin of a prefix .* a third, 32 tokens",
        ),
        (replace(CONFIG, adapter_slots=6), r"no eviction .*more --adapters than --adapter_slots"),
    ],
)
def test_what_cannot_happen_is_refused_before_it_is_soaked(tokenizer, config, message):
    with pytest.raises(ValueError, match=message):
        named_mechanisms(make_users(tokenizer, config=config))


def test_flags_and_options_name_what_must_happen(tokenizer):
    def named(config: EngineConfig) -> set[str]:
        return {each.count for each in named_mechanisms(make_users(tokenizer, config=config))}

    users = {"ended_stop", "ended_abort", "closed", "refused", "compared"}
    groups, swaps = {"parallel_samples", "beam_searches"}, {"swapped_out", "swapped_in"}
    prefixes = {"cached_tokens", "pinned_prefixes"}
    always = users | groups | {"preemptions"}
    assert named(replace(CONFIG, max_num_seqs=1)) == users | prefixes
    assert named(replace(CONFIG, preemption_mode="recompute")) == always | prefixes
    assert named(CONFIG) == always | prefixes | swaps
    assert named(replace(CONFIG, adapter_slots=2)) == named(CONFIG) | {"adapters_evicted"}
    always |= swaps
    selection = {"selecting", "reusing"}
    assert named(LSERVE) == always | prefixes | selection | {"streaming"}
    duo_attention, quest = changed(LSERVE, budget=4096), changed(LSERVE, **NO_GATES, reuse=1)
    assert named(duo_attention) == always | prefixes | {"streaming"}
    assert named(quest) == always | prefixes | {"selecting"}
    compression = {"demoted", "dropped"}
    assert named(DIFFKV) == named(replace(DIFFKV, preemption_mode="auto")) == always | compression
    assert named(PINNING) == always | compression | prefixes
    streaming = {"gates": GATES, "streaming_share": 0.5, "sink": 4, "local": 8, "read_pages": 3}
    of_heads = {"streaming", "selecting"}
    assert named(changed(DIFFKV, **streaming)) == always | compression | of_heads
    assert named(changed(DIFFKV, alpha_h=0.0, alpha_l=0.0)) == always  # INT8
    kivi = {"prompt_rule": "kivi", "generation_rule": "kivi", "key_group": 8, "window": 16}
    assert named(changed(DIFFKV, **kivi, top="")) == always | {"demoted"}


@pytest.mark.parametrize("changes", [{"kv_cache_tokens": 4000}, {}])
def test_what_has_not_happened_ends_a_soak(tokenizer, changes):
    config = replace(CONFIG, adapter_slots=2, **changes)
    users = make_users(tokenizer, config=config)
    named = named_mechanisms(users)
    assert run(users, steps=400)[2] is None
    missing = check_mechanisms(named, users.counts)
    if not changes:
        assert missing is None
        return
    assert isinstance(missing, Violation) and missing.kind == "unexercised"
    assert "no preemption happened: needs a smaller --kv_cache_tokens" in str(missing)


@pytest.mark.slow  # compiles three policies
@pytest.mark.parametrize(
    "config",
    [
        LSERVE,
        changed(DIFFKV, gates=GATES, streaming_share=0.5, sink=4, local=8, read_pages=3),
        PINNING,
    ],
    ids=["lserve", "diffkv", "diffkv_pins"],
)
def test_the_device_shows_what_has_happened(tokenizer, config):
    params = parameters.init(llama.declare(TINY), jax.random.key(0))
    engine = padded(Engine.from_model(params, TINY, config, tokenizer))
    users = Users(engine, engine, 0, check_share=0.0)
    observe(users)
    of_policy = [each.count for each in SOAKED[config.policy].named(engine)]
    assert not any(users.counts[name] for name in of_policy)
    assert run(users, steps=100)[2] is None
    assert all(users.counts[name] > 0 for name in of_policy)
    assert users.counts["pinned_prefixes"] == users.most_pins
    assert not users.most_pins or users.counts["cached_tokens"] > 0


def program(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.soak", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_program_soaks_a_model_with_every_sampling_parameter(tiny_folder, tmp_path):
    done = program(
        f"--model={tiny_folder}", f"--output_dir={tmp_path}",
        "--steps=200", "--drain_every=100", "--check_share=0.3", "--max_model_len=96",
        "--kv_cache_tokens=176", "--max_num_seqs=8", "--max_num_batched_tokens=64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing lost" in done.stdout and "soaking" in done.stderr
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["steps"] == 200 and numbers["compilations_after_warmup"] == 0
    assert numbers["compared"] > 3 and numbers["lost"] == numbers["mismatched"] == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["violation"] is None and report["flags"]["engine"]["max_model_len"] == 96
    assert report["versions"]["jax"]
    assert (tmp_path / "samples.csv").read_text().count("\n") == 1 + 5
    assert (tmp_path / "soak.png").stat().st_size > 10_000
