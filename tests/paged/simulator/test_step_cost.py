"""The clock of simulated GPUs: a step takes the sum of its parts, recounted here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache.moves import Moves
from paged.kv_cache.work import kv_bytes_of_token
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.layer import adapters_s, head_ops, layer_ops
from paged.simulator.step_cost import StepCost
from paged.step_inputs import StepInputs

LLAMA = checkpoint.load_config("configs/models/llama-2-7b")
SMALL = ModelConfig(num_layers=3, vocab_size=64, max_position_embeddings=256)


KNOBS = ("host", "attention_knob", "host_knob")


def declared(model=LLAMA, gpu: str = "a100-80", **fields: Any) -> StepCost:
    clock = {name: fields.pop(name) for name in KNOBS if name in fields}
    return StepCost.declare(model, EngineConfig(**fields), gpu, **clock)


def timed(config: EngineConfig, prompts, max_tokens: int, ranks: Sequence[int] = ()):
    """The clock, (contexts, new tokens) of each step, seconds of each step, and simulated time.

    ranks: the rank of each prompt's adapter.
    """
    clock = StepCost.declare(SMALL, config, "a100-40")
    steps: list[tuple[list[int], list[int]]] = []
    seconds: list[float] = []

    def recorded(inputs: StepInputs) -> float:
        new = np.bincount(inputs.token_rows, minlength=len(inputs.lengths) + 1)[:-1]
        rows = np.flatnonzero(new)
        steps.append((np.asarray(inputs.lengths)[rows].tolist(), new[rows].tolist()))
        seconds.append(clock(inputs))
        return seconds[-1]

    executor = SimulatedExecutor(recorded, vocab_size=64, first_token=3, adapter_page_s=1e-6)
    clock = clock.with_adapters(executor.adapters.pages)
    engine = Engine(SMALL, config, executor)
    names = [f"a{i}" for i in range(len(ranks))]
    for name, rank in zip(names, ranks):
        engine.add_known_adapter(Adapter(name, "", "random", rank))
    how = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.generate(prompts, how, names or None)
    return clock, steps, seconds, engine.executor.clock.now()


def test_a_step_is_its_layers_its_attention_and_its_head():
    """Chunks and decodes count, padding does not."""
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, run_ahead=False
    )
    clock, steps, seconds, now = timed(config, [[5] * 11, [6] * 2], 2)
    assert steps == [([8], [8]), ([11, 2], [3, 2]), ([12, 3], [1, 1])]
    for (contexts, new), found, sampled in zip(steps, seconds, (0, 2, 2), strict=True):
        ops = layer_ops(clock.model, sum(new)).values()
        layer = sum(clock.costs.op_s(op) for op in ops)
        work = clock.layout.work(np.array(contexts), np.array(new))
        layer += sum(clock.costs.part_s(part) for part in work.values())
        head = head_ops(clock.model, sum(new), sampled).values()
        expected = 3 * layer + sum(clock.costs.op_s(op) for op in head)
        assert found == pytest.approx(expected)
    assert now == pytest.approx(sum(seconds))


@pytest.mark.parametrize(("ranks", "pages"), [((16, 16), 2), ((16, 64), 5)])
def test_adapters_add_their_pages_and_launches(ranks, pages):
    config = EngineConfig(max_num_seqs=4, max_model_len=64, adapter_slots=4)
    clock, steps, seconds, _ = timed(config, [[5] * 3, [6] * 3], 9, ranks)
    both = max(i for i, (_, new) in enumerate(steps) if new == [1, 1])
    plain = clock.dense_s(2, 2) + float(clock.attention_s(np.array(steps[both][0]), np.ones(2)))
    added = 3 * adapters_s(clock.costs, clock.model, pages=pages, tokens=2)
    assert seconds[both] == pytest.approx(plain + added)


def test_an_executor_tells_its_clock_the_pages_of_adapters():
    config = EngineConfig(
        max_num_seqs=4, max_model_len=64, adapter_slots=4, max_adapter_rank=64, run_ahead=False
    )
    clock = StepCost.declare(SMALL, config, "a100-40")
    executor = SimulatedExecutor(clock, vocab_size=64, first_token=3, adapter_page_s=1e-6)
    engine = Engine(SMALL, config, executor)
    engine.add_known_adapter(Adapter("b", "", "random", 64))
    engine.generate([[5] * 3], SamplingParams(max_tokens=9, ignore_eos=True), ["b"])
    last = engine.metrics.steps[-1]
    plain = clock.dense_s(1, 1) + float(clock.attention_s(np.array([11]), np.ones(1)))
    added = 3 * adapters_s(clock.costs, clock.model, pages=4, tokens=1)
    assert last.device_s == pytest.approx(plain + added)


def test_swaps_take_pcies_time_and_copies_the_memorys():
    """A swapped block takes two copies a layer, each with a start time. Shards split the bytes."""
    clock = declared(tensor_parallel=2, kv_cache_tokens=4096)
    ((pool, declared_pool),) = clock.pools.items()
    unit = declared_pool.unit_bytes
    assert unit == clock.model.shard.num_layers * 16 * kv_bytes_of_token(LLAMA, "float16")
    costs, layers = clock.costs, clock.model.shard.num_layers
    out = clock.moves_s(Moves(exports={pool: [(1, 1), (2, 2), (3, 3)]}))
    assert out == pytest.approx(
        3 * 2 * layers * costs.assumed.copy_start_s + 3 * unit / 2 / (0.8 * 32e9)
    )
    assert clock.moves_s(Moves(imports={pool: [(1, 1), (2, 2), (3, 3)]})) == out
    copied = clock.moves_s(Moves(copies={pool: [(1, 2)]}))
    assert costs.fitted.start_s < copied < out / 10
    assert clock.moves_s(Moves(released=[3])) == 0.0


def test_small_units_are_swapped_a_call_at_a_time():
    """A DiffKV page belongs to one head. 157 pages of 16 tokens in K8V4 fill an array of half a
    MiB, which one launch gathers and one copy moves over PCIe."""
    clock = declared(
        policy="diffkv", chunked_prefill=False, max_num_batched_tokens=4096, tensor_parallel=2
    )
    costs, (pool,) = clock.costs, clock.pools
    unit = 16 * (128 + 64 + 8 + 8)  # keys, values, two scales and zero points; score, position
    of_call = 2**19 // unit
    bytes_ = of_call * unit
    launch_s = costs.fitted.start_s + 2 * bytes_ / (costs.fitted.memory * costs.machine.bandwidth)
    of_copy_s = costs.assumed.copy_start_s + bytes_ / (0.8 * costs.machine.pcie)
    for count, calls in ((1, 1), (of_call, 1), (of_call + 1, 2)):
        pairs = [(i, i) for i in range(count)]
        for moves in (Moves(exports={pool: pairs}), Moves(imports={pool: pairs})):
            assert clock.moves_s(moves) == pytest.approx(calls * (launch_s + of_copy_s))


def test_a_run_that_swaps_takes_longer_by_its_swaps():
    config = EngineConfig(
        max_num_seqs=4, max_model_len=64, kv_cache_tokens=80, page_size=8, preemption_mode="swap",
        max_num_batched_tokens=64,
    )  # fmt: skip
    clock, executors = StepCost.declare(SMALL, config, "a100-40"), []
    for cost in (clock, clock.__call__):  # the second has no `moves_s`
        executors.append(SimulatedExecutor(cost, vocab_size=64, first_token=3))
        engine = Engine(SMALL, config, executors[-1])
        how = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.generate([[5] * 9, [6] * 9, [7] * 9], how)
    schedules = [event["moves"] for event in engine.events if event["event"] == "schedule"]
    moved = [Moves(**{name: moves.get(name, {}) for name in ("exports", "imports", "copies")})
             for moves in schedules]  # fmt: skip
    swaps_s = sum(clock.moves_s(each) for each in moved)
    assert swaps_s > 0
    ends = [executor.clock.now() for executor in executors]
    assert ends[0] - ends[1] == pytest.approx(swaps_s)


@pytest.mark.parametrize("pins", [0, 1])  # Pinned prefixes have a pool of their own.
def test_forks_under_diffkv_copy_the_parents_pages(pins):
    config = EngineConfig(
        policy="diffkv", page_size=8, max_model_len=64, kv_cache_tokens=512,
        chunked_prefill=pins > 0, policy_options={"pins": pins},
    )  # fmt: skip
    copied: list[Mapping[str, int]] = []

    class Recorded(StepCost):
        def copies_s(self, units: Mapping[str, int]) -> float:
            copied.append(units)
            return super().copies_s(units)

    clock = Recorded.declare(SMALL, config, "a100-40")
    executor = SimulatedExecutor(clock, vocab_size=64, first_token=3, dtype="float16")
    engine = Engine(SMALL, config, executor)
    engine.generate([[5] * 41], SamplingParams(n=3, temperature=1.0, max_tokens=2))
    # Two children copy the parent's pages after the prefill, at 41 tokens. The parent has as many
    # pages at its end.
    pages = 2 * executor.report()["held"][0, 0]
    assert [units for units in copied if any(units.values())] == [{"pages": pages}]
    bytes_ = pages * clock.pools["pages"].unit_bytes
    assert clock.copies_s({"pages": pages}) == clock.costs.launch_s(2 * bytes_)


@pytest.mark.parametrize("policy", ["vllm", "orca_max", "lserve", "diffkv"])
def test_decodes_at_once_are_decodes_one_by_one(policy):
    whole: dict[str, Any] = {"chunked_prefill": False, "max_num_batched_tokens": 2048}
    clock = declared(policy=policy, **(whole if policy == "diffkv" else {}))
    contexts = np.array([40, 900]) + np.arange(20)[:, None]
    at_once = clock.decodes_s(contexts, np.array([0, -1]))
    alone = [float(clock.decodes_s(row[None], np.array([0, -1]))[0]) for row in contexts]
    assert at_once.tolist() == alone
    assert (np.diff(clock.decodes_s(contexts[::4], np.array([-1, -1]))) > 0).all()


def test_a_policy_is_simulated_by_its_modules_name_too():
    contexts, none = np.full((1, 4), 1000), np.full(4, -1)
    named = declared(policy="paged.kv_cache.vllm:VLLM").decodes_s(contexts, none)
    assert named.tolist() == declared(policy="vllm").decodes_s(contexts, none).tolist()


def test_what_changes_a_step():
    contexts, none = np.full((1, 32), 1000), np.full(32, -1)
    whole = declared().decodes_s(contexts, none)[0]
    # An A100 reads 13 GB of weights and 17 GB of keys and values in 8 and in 11 ms.
    kv_s = 32 * kv_bytes_of_token(LLAMA, "float16") * 32_000 / (2039e9 * 0.775)
    assert whole == pytest.approx(8e-3 + kv_s, rel=0.15)
    assert declared(attention_knob=1.2).decodes_s(contexts, none)[0] - whole == pytest.approx(
        0.2 * (kv_s + 32 * 10e-6), rel=0.03
    )
    half = declared(tensor_parallel=2).decodes_s(contexts, none)[0]
    assert whole / 2 + 64 * 46e-6 < half < whole
    assert declared(quantization="w8a8").decodes_s(contexts, none)[0] < whole
    assert declared(gpu="h200").decodes_s(contexts, none)[0] < whole / 1.8
    with_lora = declared(host="punica").decodes_s(np.full((1, 32), 210), np.arange(32) // 6)[0]
    assert with_lora == pytest.approx(30e-3, rel=0.02)  # Punica §5.2
    assert declared(host="vllm").decodes_s(contexts, none)[0] == pytest.approx(whole + 13.7e-3)
    eight = [declared(host=host, host_knob=0.5, tensor_parallel=8) for host in ("vllm", "none")]
    slow, fast = (float(cost.decodes_s(contexts, none)[0]) for cost in eight)
    assert slow - fast == pytest.approx(0.5 * 28.7e-3, rel=0.01)


def test_a_changed_copy_computes_anew():
    contexts, none = np.full((1, 32), 1000), np.full(32, -1)
    on_a100, on_h100 = declared(), declared(gpu="h100")
    on_a100.decodes_s(contexts, none)
    changed = replace(on_a100, costs=on_h100.costs)
    assert changed.decodes_s(contexts, none) == on_h100.decodes_s(contexts, none)


def test_the_host_works_once_for_several_iterations():
    ends = {}
    for host in ("none", "punica"):
        for iterations in (1, 4):
            config = EngineConfig(max_model_len=64, multi_step=iterations)
            cost = StepCost.declare(SMALL, config, "a100-40", host=host)
            engine = Engine(SMALL, config, SimulatedExecutor(cost, vocab_size=64, first_token=3))
            engine.generate([[5] * 9], SamplingParams(max_tokens=33, ignore_eos=True))
            ends[host, iterations] = engine.executor.clock.now()
    host_s = {n: ends["punica", n] - ends["none", n] for n in (1, 4)}
    # A prefill and 32 iterations; run-ahead begins one step more than it needs.
    assert host_s[1] / host_s[4] == pytest.approx(33 / 9, rel=0.15)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match=r"unknown host 'orca': .* 'none', 'punica', 'vllm'"):
        declared(host="orca")
    with pytest.raises(ValueError, match="16 bits: dtype float16, not float32"):
        StepCost.declare(LLAMA, EngineConfig(), "a100-80", "float32")
    with pytest.raises(ValueError, match="1, 2, 4 and 8 GPUs, not 16"):
        declared(tensor_parallel=16)
