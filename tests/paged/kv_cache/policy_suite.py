"""KV-cache policies as cases of the shared suite, and engines that run them.

A policy joins the suite with a line in CASES, or, from outside of the tree too, by environment
variables: SUITE_POLICY names it as --policy does, and SUITE_CONFIG is the JSON of the fields of its
EngineConfig that differ from CONFIG.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models.full_attention import causal_attend
from models.sampling import SamplingState
from paged.device.buckets import Buckets
from paged.device.executor import DeviceExecutor
from paged.device.step import StepProgram, step
from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES, diffkv, lserve, policy_of
from paged.kv_cache.gates import streaming_heads
from paged.kv_cache.policy import Parts, Policy
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from paged.step_inputs import empty_step_inputs
from paged.tensor_parallel import Shards
from tests.notebooks.stored import written_policy
from tests.paged.kv_cache.lserve_oracle import masked_attend
from tests.paged.kv_cache.tova import TOVA
from tests.paged.kv_cache.tova_oracle import tova_attend
from tests.paged.tiny import TINY, padded

NEAR_TIE = 1e-4
LONGEST = 64
CONFIG: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_prefills_per_step": 4,
    "max_model_len": LONGEST, "page_size": 4, "kv_cache_tokens": 124, "watermark": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A policy, and how the suite tests it.

    name: the name under which the suite registers the policy.
    oracle: `attend` of one whole sequence, made from the length of its prompt; None for a policy
        that is compared only with itself, each request alone.
    config: fields of its EngineConfig that differ from CONFIG.
    slow: not in the quick tests. Four tokens a step, except in the sweeps; the quick cases try one
        token a step, too.
    swept: in the sweeps only.
    """

    name: str
    policy: Policy
    oracle: Callable[[Any], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    swept: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * self.slow + [pytest.mark.sweep] * self.swept

    def engine_config(self, **changes) -> EngineConfig:
        own: dict[str, Any] = {"policy": self.name, "multi_step": 4 if self.slow else 1}
        return EngineConfig(**{**CONFIG, **own, **self.config, **changes})

    @property
    def parts(self) -> Parts:
        return self.policy.parts(self.engine_config())

    @property
    def exact_modes(self) -> list[str]:
        """Preemption modes that change no token, with 'swap' last."""
        can = self.parts
        return ["auto", "recompute"] + ["swap"] * can.swap


def cases_outside(environment: Mapping[str, str]) -> list[Case]:
    """The case `yours` of a policy outside of the tree, if the environment names one."""
    if not (name := environment.get("SUITE_POLICY")):
        return []
    config = json.loads(environment.get("SUITE_CONFIG", "{}"))
    return [Case("yours", policy_of(name), config=config)]


# In each layer a different head streams; the other heads read three of up to sixteen pages.
LSERVE_OPTIONS = lserve.Options(
    budget=12, reuse=2, logical_page=2, sink=4, local=8, streaming_share=0.5,
    gates=((0.1, 0.9), (0.8, 0.7)),
)  # fmt: skip
# With 8 bits, half of the memory holds as many blocks.
LSERVE_KV8_OPTIONS = dataclasses.replace(LSERVE_OPTIONS, kv_bits=8)
# Pages hold 4 tokens as they are or 12 tokens in 4 bits. Tokens of TINY fall below the thresholds.
DIFFKV_OPTIONS = diffkv.Options(high="auto", low="K4V4", alpha_h=1.0, alpha_l=0.6, window=6)
# Pages hold 4 tokens as they are, 8 tokens in 8 bits or 12 tokens in 4 bits.
DIFFKV_THREE_OPTIONS = dataclasses.replace(
    DIFFKV_OPTIONS, top="auto", high="K8V8", alpha_top=1.4, alpha_h=1.0
)
# Pages hold 4 tokens as they are or 16 tokens in 4 bits.
KIVI_OPTIONS = diffkv.Options(
    high="auto", low="K4V4", prompt_rule="kivi", generation_rule="kivi", window=16, key_group=8
)
# Pages hold 4 tokens as they are or 8 tokens in 4 bits, with an outlier of each key and value.
# Prompts run in chunks of whole tiles of 8 tokens.
QAQ_OPTIONS = diffkv.Options(
    high="auto", low="K4V4", alpha_h=1.0, alpha_l=0.0, window=6, outliers=1, prompt_tile=8
)
WHOLE_PROMPTS = {"max_num_batched_tokens": LONGEST}
# In each layer a different head streams; the other heads read three pages.
DIFFKV_COMPOSED_OPTIONS = dataclasses.replace(
    DIFFKV_OPTIONS,
    sink=4,
    local=8,
    streaming_share=0.5,
    gates=LSERVE_OPTIONS.gates,
    read_pages=3,
    logical_page=2,
)
DIFFKV_EXACT_OPTIONS = diffkv.Options(high="auto", low="auto", alpha_h=0.0, alpha_l=0.0)
# Thresholds are inputs of programs: these options share the programs of DIFFKV_THREE_OPTIONS.
DIFFKV_EXACT_THREE_OPTIONS = dataclasses.replace(
    DIFFKV_THREE_OPTIONS, alpha_top=0.0, alpha_h=0.0, alpha_l=0.0
)
WRITTEN = written_policy()
# Seven pages before a token's own, so that CROWD preempts. All heads stream in the oracle.
WRITTEN_OPTIONS = WRITTEN.Options(sink=1, local=7)
WRITTEN_ORACLE = functools.partial(
    masked_attend, TINY, dataclasses.replace(LSERVE_OPTIONS, sink=4, local=28),
    np.ones((TINY.num_layers, TINY.num_kv_heads), bool), 4,
)  # fmt: skip
LSERVE_STREAMS = streaming_heads(LSERVE_OPTIONS.gates, LSERVE_OPTIONS.streaming_share or 0)
CASES = [
    Case("vllm", POLICIES["vllm"], lambda prompt: causal_attend(TINY)),
    Case("orca_max", POLICIES["orca_max"], lambda prompt: causal_attend(TINY)),
    Case(
        "lserve", POLICIES["lserve"],
        functools.partial(masked_attend, TINY, LSERVE_OPTIONS, LSERVE_STREAMS, 4),
        {"policy_options": LSERVE_OPTIONS, "kv_cache_tokens": 140},
    ),
    Case(
        "lserve_kv8", POLICIES["lserve"],
        functools.partial(masked_attend, TINY, LSERVE_KV8_OPTIONS, LSERVE_STREAMS, 4),
        {"policy_options": LSERVE_KV8_OPTIONS, "kv_cache_tokens": 72}, slow=True,
        swept=True,  # test_lserve.py tests quantised pages
    ),
    Case(
        "diffkv", POLICIES["diffkv"],
        config={**WHOLE_PROMPTS, "policy_options": DIFFKV_OPTIONS, "kv_cache_tokens": 150},
        slow=True,
    ),
    Case(
        "diffkv_composed", POLICIES["diffkv"],
        config={
            **WHOLE_PROMPTS, "policy_options": DIFFKV_COMPOSED_OPTIONS, "kv_cache_tokens": 222
        },
        slow=True,
    ),
    Case(
        "kivi", POLICIES["diffkv"],
        config={**WHOLE_PROMPTS, "policy_options": KIVI_OPTIONS, "kv_cache_tokens": 84},
        slow=True,
    ),
    Case(
        "qaq", POLICIES["diffkv"],
        config={"policy_options": QAQ_OPTIONS, "kv_cache_tokens": 218}, slow=True,
        swept=True,  # test_compression.py tests outliers
    ),
    Case(
        "tova", TOVA, functools.partial(tova_attend, TINY, 20),
        {**WHOLE_PROMPTS, "policy_options": {"budget": 20}, "kv_cache_tokens": 44},
        slow=True,
    ),
    Case(
        WRITTEN.NAME, WRITTEN.POLICY, WRITTEN_ORACLE,
        {"policy_options": WRITTEN_OPTIONS, "kv_cache_tokens": 104}, slow=True,
    ),
]  # fmt: skip
CASES += cases_outside(os.environ)
by_policy = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=c.marks) for c in CASES],
)
by_policy_and_steps = pytest.mark.parametrize(
    ("case", "multi_step"),
    [
        pytest.param(
            c, multi_step, id=f"{c.name}-{multi_step}",
            marks=[*c.marks, *[pytest.mark.sweep] * (c.slow and multi_step == 1)],
        )
        for c in CASES
        for multi_step in (4, 1)
    ],
)  # fmt: skip


@contextmanager
def registered() -> Iterator[None]:
    """Register the policies of the suite, so that an EngineConfig can name them."""
    before = dict(POLICIES)
    POLICIES.update({case.name: case.policy for case in CASES})
    try:
        yield
    finally:
        POLICIES.clear()
        POLICIES.update(before)


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    how: SamplingParams

    @property
    def limit(self) -> int:
        return min(len(self.prompt) + self.how.max_tokens, LONGEST)

    def suits(self, engine: Engine) -> bool:
        """Whether the engine's policy can hold and serve the request."""
        can = engine.config.parts
        if self.how.is_beam_search and can.fork == "no":
            return False
        return engine.host_policy.fits(self.limit, self.how.num_sequences)


def _catalogue() -> list[Request]:
    """A fixed list of requests of all kinds, so that each runs alone only once per policy."""
    rng = np.random.default_rng(5)
    every: dict[str, Any] = {"ignore_eos": True, "seed": 0}
    greedy = [SamplingParams(max_tokens=n, **every) for n in (1, 7, 25, 60)]
    sampled = SamplingParams(max_tokens=14, temperature=2.0, seed=11)
    penalised = SamplingParams(max_tokens=20, frequency_penalty=1.5, **every)
    several = [
        dataclasses.replace(sampled, n=n, max_tokens=most) for n, most in ((2, 16), (3, 9), (3, 1))
    ]
    beams = [
        SamplingParams(max_tokens=most, beam_width=width, n=width, **every)
        for width, most in ((2, 12), (3, 7), (3, 1))
    ]
    kinds = [
        (greedy[0], (1, 20)), (greedy[1], (1, 6, 33)), (greedy[2], (2, 9, 17)), (greedy[3], (3,)),
        (sampled, (4, 12)), (penalised, (1, 5, 8)), (several[0], (2, 19)), (several[1], (1, 4, 13)),
        (several[2], (7,)), (beams[0], (1, 5, 18)), (beams[1], (3, 12)), (beams[2], (6,)),
    ]  # fmt: skip
    return [
        Request(tuple(rng.integers(3, TINY.vocab_size, length).tolist()), how)
        for how, lengths in kinds
        for length in lengths
    ]


CATALOGUE = _catalogue()
# Together they exceed every policy's memory.
CROWD = [r for r in CATALOGUE if r.how.max_tokens >= 12]


class Bench:
    """Engines of a model's parameters. Engines with equal programs share an executor, which each
    new engine resets. So only the newest of these engines may run."""

    def __init__(self, params):
        self.params = params
        self._executors: dict[tuple, DeviceExecutor] = {}
        self._alone: dict[tuple[str, Request], list[list[int]]] = {}

    def engine(self, case: Case, **changes) -> Engine:
        config = case.engine_config(**changes)
        shards = Shards(
            TINY, config.tensor_parallel, dtype=self.params["embed"].dtype,
            head_order=case.policy.head_order(config, TINY),
        )  # fmt: skip
        program = StepProgram.declare(config, shards)
        key = (
            case.name, program.policy, program.pools, program.table_width, config.multi_step,
            config.tensor_parallel,
        )  # fmt: skip
        if key not in self._executors:
            shapes = Buckets.declare(config).shapes()
            self._executors[key] = DeviceExecutor(self.params, program, shapes=shapes)
        executor = self._executors[key]
        executor.reset()
        return padded(Engine(TINY, config, executor))

    def alone(self, case: Case, request: Request) -> list[list[int]]:
        """The tokens of each sequence of a request that runs alone in a fresh engine. A request for
        several samples runs as several requests for one sample."""
        if (case.name, request) not in self._alone:
            how, prompt = request.how, list(request.prompt)
            if how.is_beam_search or how.n == 1:
                (output,) = self.engine(case).generate([prompt], how)
                tokens = [sequence.tokens for sequence in output.sequences]
            else:
                assert how.seed is not None
                group = SequenceGroup("", 0, np.array(prompt), how, how.seed, request.limit)
                singles = [dataclasses.replace(how, n=1, seed=s.seed) for s in group.sequences]
                tokens = [self.alone(case, Request(request.prompt, one))[0] for one in singles]
            self._alone[case.name, request] = tokens
        return self._alone[case.name, request]

    def check_oracle(self, case: Case, prompt: list[int], tokens: list[int]) -> None:
        """Assert that greedy tokens equal full recomputation by the oracle, near ties aside."""
        assert case.oracle is not None
        whole = np.zeros(LONGEST, np.int32)
        whole[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        logits = np.asarray(_full_logits(case.oracle)(self.params, whole, len(prompt)))
        for i, token in enumerate(tokens):
            row = logits[len(prompt) + i - 1]
            assert row[token] >= row.max() - NEAR_TIE, (i, token, row.argmax())


@functools.cache
def _full_logits(oracle: Callable[[Any], Any]):
    """Logits [LONGEST, V] of a whole sequence, computed in one piece."""

    def run(params, tokens, prompt_length):
        attend, at = oracle(prompt_length), jnp.arange(LONGEST)
        hidden, _ = llama.forward(params, TINY, tokens, at, attend, cache=None)
        return llama.logits(params, TINY, hidden)

    return jax.jit(run)


def compiled_step(params, device, table_width: int, Tp: int, Sd: int, multi_step: int) -> tuple:
    """(cache, program, bytes of temporaries) of a step of four slots. Asserts that the whole cache
    of `device` is aliased from input to output."""
    cache = jax.eval_shape(lambda: device.init(np.float32, jnp.int32(0)))
    state = jax.eval_shape(lambda: SamplingState.empty(4, 256))
    inputs = empty_step_inputs(Tp, Sd, 2, num_slots=4, table_width=table_width)
    inputs = dataclasses.replace(inputs, packed=None)
    program = jax.jit(step, static_argnums=(4, 5, 6), donate_argnums=(1, 2))
    compiled = program.lower(params, cache, state, inputs, TINY, device, multi_step).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= total
    return cache, compiled, memory.temp_size_in_bytes


def drain(engine: Engine) -> dict[str, list[list[int]]]:
    """Step until no request is left, and check the policy's books after every step. Return the
    tokens of each sequence by request."""
    ended: dict[str, list[list[int]]] = {}
    while engine.has_unfinished():
        take_step(engine, ended)
    check_empty(engine)
    return ended


def take_step(engine: Engine, ended: dict[str, list[list[int]]]) -> None:
    for output in engine.step():
        if output.finished:
            assert output.request_id not in ended
            ended[output.request_id] = [sequence.tokens for sequence in output.sequences]
    engine.host_policy.check()
    engine.scheduler.slots.check()


def check_empty(engine: Engine) -> None:
    """Check that no unit and no slot is in use."""
    engine.host_policy.check()
    assert not any(len(units) for units in engine.host_policy.used_units().values())
    assert engine.scheduler.slots.num_free == engine.config.max_num_seqs


def cache_bytes(policy: Policy, config: EngineConfig) -> tuple[int, int]:
    """(bytes of all leaves of the cache, bytes of the null units among them)."""
    shards = Shards(TINY, 1)
    sharded = dataclasses.replace(shards.sharded, dtype="float32")
    device = policy.device(config, sharded, None)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: device.init(jnp.float32, jnp.int32(0))))
    null = sum(pool.unit_bytes for pool in policy.sizes(config, sharded).pools)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), null
