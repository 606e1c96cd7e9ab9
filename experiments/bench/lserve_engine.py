"""Whole engines over long contexts: dense, LServe, and its presets (LServe §4.3, 4.4, 5.5).

One request at a time on a small random model of Llama-3-8B's head shapes. Prompts are prefilled as
any are, in chunks; then all engines decode in turns from the same context.

    dense    the dense policy
    static   DuoAttention: half of the KV heads stream, the others read all
    dynamic  selected pages, no head streams
    lserve   both
    quest    flat pages of 16 tokens, selected by each query head at each token; its first two
             layers, which Quest leaves dense, are not spared here: the model has no more
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm

from experiments.bench.lserve_layer import Reads, config_of, lserve, systems
from models import llama
from models import params as parameters
from models.config import ModelConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator.roofline import step_cost
from pallas_kernels.specs import Cost, Rates

MODEL = ModelConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position_embeddings=2**20,
)  # fmt: skip
SYSTEMS = ("dense", "static", "dynamic", "lserve", "quest")
UNTIMED = 2  # steps of a turn: another engine's last step may still run beside the first ones
STEPS = 8  # timed steps of a turn: two selections with the paper's reuse of 4


@dataclass(frozen=True)
class Run:
    """prefill_s: from a request to its first token, once. token_ms: of a decode step, host work
    included; the median over turns. floor_ms: of what the token cannot do without, weights and what
    heads read. kv_bytes: in use while it decodes."""

    system: str
    context: int
    prefill_s: float
    token_ms: float
    floor_ms: float
    kv_bytes: int


def answer_tokens(turns: int) -> int:
    """What a request is asked for."""
    return turns * (UNTIMED + STEPS) + 8


def engines(
    names: Sequence[str], model: ModelConfig, longest: int, chunk: int, seed: int
) -> dict[str, Engine]:
    params = parameters.init(llama.declare(model), jax.random.key(seed))
    quest = lserve(select_per="query_head", reuse=1)
    found = {}
    for name in names:
        page_size = 16 if name == "quest" else 64
        system = quest if name == "quest" else systems(model)[name]
        config = config_of(system, longest, chunk=chunk, page_size=page_size)
        found[name] = Engine.from_model(params, model, config)
    return found


def run(
    names: Sequence[str], contexts: Sequence[int], chunk: int, turns: int, seed: int, rates: Rates,
    model: ModelConfig = MODEL, progress: bool = True,
) -> list[Run]:  # fmt: skip
    """All systems at all contexts, whole chunks each, shortest first. Programs are compiled by a
    short request before."""
    tokens = answer_tokens(turns)
    found = engines(names, model, max(contexts) + tokens, chunk, seed)
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for engine in found.values():
        engine.generate(
            [rng.integers(0, model.vocab_size, chunk).tolist()],
            SamplingParams(max_tokens=4, ignore_eos=True),
        )
    runs = []
    with tqdm(total=len(contexts) * len(found), unit=" systems", disable=not progress) as bar:
        for context in contexts:
            prompt = rng.integers(0, model.vocab_size, context).tolist()
            prefill_s, ids = {}, {}
            for name, engine in found.items():
                bar.set_postfix_str(f"{name} {context}")
                began = time.perf_counter()
                ids[name] = engine.add_request(prompt, sampling, stream=True)
                while not engine.step():
                    pass
                prefill_s[name] = time.perf_counter() - began
                bar.update()
            token_ms: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(turns):
                for name, engine in found.items():
                    token_ms[name].append(_turn_ms(engine))
            for name, engine in found.items():
                held = engine.metrics.steps[-1].kv_bytes
                median = float(np.median(token_ms[name]))
                floor_ms = 1e3 * rates.floor_s(_token_cost(engine, context))
                runs.append(Run(name, context, prefill_s[name], median, floor_ms, held))
                engine.abort(ids[name])
                while engine.has_unfinished():
                    engine.step()
    return runs


def _token_cost(engine: Engine, context: int) -> Cost:
    """Heads of a group that select different pages may agree, so theirs is the least."""
    rest = step_cost(engine.model, [1])
    read = Reads.of(engine.model, engine.config).decode(context)
    L = engine.model.num_layers
    return Cost(rest.bytes + L * read.bytes, rest.flops + L * read.flops)


def _turn_ms(engine: Engine) -> float:
    for _ in range(UNTIMED):
        engine.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return 1e3 * (time.perf_counter() - began) / STEPS
