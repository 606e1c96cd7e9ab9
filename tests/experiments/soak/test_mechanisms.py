"""A soak ends with an error where what its flags name cannot happen, or has not happened."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from experiments.soak.checks import Violation
from experiments.soak.mechanisms import check_mechanisms, named_mechanisms, observe
from experiments.soak.users import Users
from models import llama
from models import params as parameters
from paged.engine import Engine, EngineConfig
from tests.experiments.conftest import TINY
from tests.experiments.soak.test_soak import CONFIG, make_users, run
from tests.paged.tiny import padded

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


def changed(config: EngineConfig, **options: Any) -> EngineConfig:
    """The configuration with other options of its policy."""
    return replace(config, policy_options=replace(config.policy_options, **options))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(LSERVE, budget=4096, **NO_GATES),
            r"no selection .*--lserve_budget \(4096\)",
        ),
        (changed(LSERVE, sparse_from=96), "no selection of pages can happen"),
        (changed(LSERVE, dense_layers=2), "no selection of pages can happen"),
        (changed(LSERVE, local=96), "no window of a head that streams can happen .*--lserve_sink"),
        (changed(LSERVE, minference_from=8, minference_budget=96), "no sparsely prefilled prompt"),
        (replace(CONFIG, adapter_slots=6), r"no eviction .*more --adapters than --adapter_slots"),
    ],
)
def test_what_cannot_happen_is_refused_before_it_is_soaked(tokenizer, config, message):
    with pytest.raises(ValueError, match=message):
        named_mechanisms(make_users(tokenizer, config=config))


def test_each_policy_names_what_its_options_ask_for(tokenizer):
    def counts(config: EngineConfig) -> list[str]:
        return [each.count for each in named_mechanisms(make_users(tokenizer, config=config))]

    assert counts(LSERVE) == ["compared", "swapped_out", "cached_tokens", "selecting", "streaming"]
    assert counts(changed(LSERVE, budget=4096))[3:] == ["streaming"]  # DuoAttention
    assert counts(changed(LSERVE, **NO_GATES))[3:] == ["selecting"]  # Quest
    assert counts(DIFFKV)[2:] == ["demoted", "dropped"]
    assert counts(changed(DIFFKV, alpha_h=0.0, alpha_l=0.0))[2:] == []  # INT8
    assert counts(replace(CONFIG, adapter_slots=2))[1:] == [
        "preemptions", "cached_tokens", "adapters_evicted",
    ]  # fmt: skip


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


@pytest.mark.slow  # compiles two policies
@pytest.mark.parametrize("config", [LSERVE, DIFFKV], ids=["lserve", "diffkv"])
def test_the_device_shows_what_has_happened(tokenizer, config):
    params = parameters.init(llama.declare(TINY), jax.random.key(0))
    engine = padded(Engine.from_model(params, TINY, config, tokenizer))
    users = Users(engine, engine, 0, check_share=0.0)
    observe(users)
    of_policy = [each.count for each in named_mechanisms(users)][-2:]
    assert not any(users.counts[name] for name in of_policy)
    assert run(users, steps=100)[2] is None
    assert all(users.counts[name] > 0 for name in of_policy)
