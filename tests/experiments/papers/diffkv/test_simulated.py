"""DiffKV and its baselines on simulated GPUs: bytes and memory recounted, and small runs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.lib.program import Refused
from experiments.papers.diffkv import (
    fig14_memory_management,
    fig15a_kernel_speed,
    fig15b_batch_latency,
    fig16_latency_over_rate,
    fig17_throughput,
)
from experiments.papers.diffkv.fig17_throughput import Case, simulate
from experiments.papers.diffkv.gpu import RECORDED, SERVERS
from experiments.study import Run


def test_memory_for_keys_and_values_is_what_weights_and_activations_leave():
    """Activations are those of the model's whole context, and ECC leaves 45 GiB of an L40."""
    server = SERVERS["qwq-32b"]
    parameters = 32.76e9  # from the model card
    activations = 2 * 40960 * (3 * 27648 / 2 + 4 * 5120)
    room = 2 * (0.9 * 45 * 2**30 - activations) - 2 * parameters
    assert server.kv_tokens("l40") == pytest.approx(room / (64 * 8 * 2 * 128 * 2), rel=0.01)


def test_a_kernel_is_faster_by_the_bytes_that_it_does_not_read(tmp_path):
    flags = fig15a_kernel_speed.KernelFlags(tokens=(512, 4096))
    study = fig15a_kernel_speed.STUDY
    rows = list(study.measure(flags, Run(tmp_path)))
    by = {(row.format, row.tokens): row for row in rows}
    tokens, queries = 8 * 8 * 4096, 2 * 2 * 8 * 32 * 128
    assert by["vllm", 4096].bytes == tokens * 2 * 2 * 128 + queries
    # A token has a scale and a zero point of keys and of values, and a score that is read and
    # written.
    k8v8 = by["K8V8", 4096]
    assert k8v8.bytes == pytest.approx(tokens * (2 * (128 + 4) + 8) + queries, rel=0.05)
    assert study.report(study.flags(), rows)["holds"] is not None


def test_launches_are_indexed_reads_and_scans_with_what_they_touch():
    """Elementwise work is fused, and an indexed array counts only the entries that the indices
    name."""
    table, at = jnp.zeros((1000, 8)), jnp.zeros(4, jnp.int32)

    def program(table, at):
        ends = jnp.cumsum(at)
        rows = table.at[at + ends].get(mode="promise_in_bounds")
        return table.at[at].set(2 * rows, mode="drop")

    found = fig14_memory_management.traffic(jax.jit(program), table, at)
    indices, rows = 4 * 4, 4 * 4 * 8
    assert found == [2 * 4 * 4, indices + 2 * rows, indices + 3 * rows]


def test_a_batch_is_its_prompts_and_its_steps(tmp_path):
    study = fig15b_batch_latency.STUDY
    flags = fig15b_batch_latency.BatchFlags(models=("llama-3-8b",), tokens=(256,))
    rows = {row.system: row for row in study.measure(flags, Run(tmp_path))
            if not row.knob}  # fmt: skip
    vllm = rows["vllm"]
    # 95 steps follow the step of the prompts, each about as long as the last one. Products bound
    # the step of the prompts.
    prompts_s = 2 * 8.03e9 * 8 * 160 / 181e12
    steps_s = 95 * vllm.step_ms / 1e3
    assert steps_s + prompts_s < vllm.seconds < steps_s + 2 * prompts_s
    weights_s = 2 * 8.03e9 / 864e9
    assert weights_s < vllm.step_ms / 1e3 < 3 * weights_s
    again = rows[fig15b_batch_latency.BY_QUERY_HEAD]
    read_ms = 1e3 * 32 * 8 * 8 * 255 * 2 * 2 * 128 / (0.775 * 864e9)
    assert again.step_ms - vllm.step_ms == pytest.approx(3 * read_ms, rel=0.05)
    assert rows["diffkv"].attention_ms != vllm.attention_ms


@pytest.mark.sweep  # 12,000 steps in simulated time
def test_diffkv_runs_larger_batches_in_the_same_memory():
    case = Case("qwq-32b", "vllm", "l40", "vllm", 1.0, 1.0, RECORDED, 0, 8192, 1)
    vllm = simulate(case)
    diffkv = simulate(dataclasses.replace(case, system="diffkv"))
    assert diffkv.batch > vllm.batch
    flags = fig17_throughput.ThroughputFlags(models=("qwq-32b",), systems=("vllm", "diffkv"))
    numbers = fig17_throughput.values(flags, [vllm, diffkv])
    assert numbers["batch_diffkv_qwq-32b"] == diffkv.batch


def test_latency_is_lower_at_every_rate_with_every_model():
    found = {
        f"latency_over_vllm_{model}_{load:g}": 0.95
        for model in fig16_latency_over_rate.MODELS
        for load in fig16_latency_over_rate.LOADS
    }
    name = next(iter(found))
    holds = fig16_latency_over_rate.holds
    assert holds(found) and holds(found | {f"{name}_attention_0.8": 1.1})
    assert not holds(found | {name: 1.0})
    with pytest.raises(KeyError):  # a missing number leaves the claim undecided
        holds({name: 0.95})


@pytest.mark.slow  # four engines in simulated time
def test_latency_grows_with_the_rate():
    flags = fig16_latency_over_rate.RateFlags(
        models=("llama-3-8b",), loads=(0.25, 4.0), most_output=32, requests=400
    )
    plain = [case for case in fig16_latency_over_rate.cases(flags) if not case.knob]
    rows = list(map(fig16_latency_over_rate.simulate, plain))
    ms = {(row.system, row.load): row.ms_per_token for row in rows}
    for system in ("vllm", "diffkv"):
        assert 0 < ms[system, 0.25] < ms[system, 4.0]
    numbers = fig16_latency_over_rate.values(flags, rows)
    ratio = ms["diffkv", 4.0] / ms["vllm", 4.0]
    assert numbers["latency_over_vllm_llama-3-8b_4"] == ratio


@pytest.mark.parametrize(
    "study, fields, told",
    [
        (fig16_latency_over_rate, {"most_output": 900_000}, "max_model_len"),
        (fig17_throughput, {"most_output": 2_000_000}, "max_num_batched_tokens"),
        (fig17_throughput, {"recorded": "pyproject.toml"}, "pyproject.toml"),
    ],
)
def test_what_no_engine_can_serve_is_refused_before_any_run(tmp_path, study, fields, told):
    flags = dataclasses.replace(study.STUDY.at("quick"), **fields)
    with pytest.raises(Refused, match=told):
        study.STUDY.write(flags, tmp_path)
