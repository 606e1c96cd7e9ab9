"""Random requests for engines over the twin of the device, and the outputs they must return."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from paged.engine import EngineConfig
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from tests.paged.hashing_executor import (
    FIRST,
    VOCAB,
    beam_search,
    generate,
    logprob_of,
    tag_of,
)

LONGEST = 96
EARLY_STOPPING: list[bool | Literal["never"]] = [True, False, "never"]


def tokens(start: int, n: int) -> list[int]:
    """n tokens; another start gives other tokens."""
    return [FIRST + (start + 7 * i) % (VOCAB - FIRST) for i in range(n)]


SHARED = tokens(0, 40), tokens(29, 40)  # common beginnings of prompts
ADAPTERS = [
    Adapter(f"a{i}", "", f"content {i}", rank) for i, rank in enumerate((1, 64, 16, 20, 8, 48))
]


@dataclass(frozen=True)
class Call:
    """A request.

    arrival: the step before which the request arrives.
    abort_after: steps from its arrival until it is aborted, if it is unfinished then.
    adapter: its index in ADAPTERS; ignored in a configuration without adapter slots.
    """

    arrival: int
    prompt: list[int]
    how: SamplingParams
    stream: bool = False
    abort_after: int | None = None
    adapter: int | None = None


@st.composite
def configs(draw) -> EngineConfig:
    chunked = draw(st.sampled_from([False, True, True]))
    slots = draw(st.integers(1, 10))
    most = draw(st.sampled_from([96, 17, 7, 6]))
    adapter_slots = draw(st.sampled_from([0, 0, 1, 2, 4]))
    return EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(most, slots) if chunked else LONGEST + 4,
        max_prefills_per_step=draw(st.sampled_from([1, 2, 8])),
        max_model_len=draw(st.sampled_from([90, LONGEST])),
        chunked_prefill=chunked,
        page_size=draw(st.sampled_from([1, 2, 3, 4, 16])),
        kv_cache_tokens=draw(st.sampled_from([1000, 160, 130, 112])),
        watermark=draw(st.sampled_from([0, 0, 0, 0.01, 0.2, 0.9])),
        run_ahead=draw(st.sampled_from([False, True, True, True])),
        multi_step=draw(st.sampled_from([1, 1, 2, 3, 8])),
        prefix_caching=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["auto", "recompute", "swap"])),
        admit_after_swap=draw(st.sampled_from(["completed", "resumed"])),
        adapter_slots=adapter_slots,
        adapter_pages=draw(st.sampled_from([0, 4, 6])) if adapter_slots else 0,
        max_overtakes=draw(st.sampled_from([0, 1, 3, 32])),
    )


@st.composite
def hows(draw, most: int) -> SamplingParams:
    """Sampling parameters of a request with at most `most` sequences."""
    lengths = st.sampled_from([st.just(1), st.integers(1, 40), st.integers(20, 40)])
    plain: dict[str, Any] = {
        "max_tokens": draw(draw(lengths)),
        "seed": draw(st.integers(0, 99)),
        "ignore_eos": draw(st.sampled_from([False, False, True])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
    }
    kind = draw(st.sampled_from(["one", "parallel", "beam"])) if most > 1 else "one"
    if kind == "beam":
        width = draw(st.integers(2, most))
        return SamplingParams(
            beam_width=width,
            n=draw(st.integers(1, width)),
            length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
            early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
            **plain,
        )
    plain |= {
        "repetition_penalty": draw(st.sampled_from([1, 2])),
        "stop_token_ids": draw(st.sampled_from([(), (), (5, 6, 30)])),
    }
    if kind == "parallel":
        best_of = draw(st.integers(1, most))
        n = draw(st.integers(1, best_of))
        return SamplingParams(temperature=1, best_of=best_of, n=n, **plain)
    return SamplingParams(**plain)


@st.composite
def cases(draw) -> tuple[EngineConfig, list[Call]]:
    config = draw(configs())
    last = draw(st.sampled_from([0, 10, 30]))
    calls = []
    for _ in range(draw(st.integers(1, 20))):
        beginning = draw(st.sampled_from(SHARED))[: draw(st.sampled_from([0, 0, 7, 20, 40]))]
        own = draw(st.integers(0, VOCAB - FIRST - 1)), draw(st.sampled_from([1, 1, 2, 2, 10, 40]))
        calls.append(
            Call(
                draw(st.integers(0, last)),
                beginning + tokens(*own),
                draw(hows(min(config.max_num_seqs, 4))),
                stream=draw(st.sampled_from([False, False, True])),
                abort_after=draw(st.sampled_from([None] * 9 + [0, 5, 25])),
                adapter=draw(st.sampled_from([None, *range(len(ADAPTERS))])),
            )
        )
    return config, calls


def expected_outputs(
    prompt, how: SamplingParams, limit: int, eos_rate: float, adapter: Adapter | None = None
) -> list[list[int]]:
    """The sequences that a request must return."""
    if adapter is not None:
        return expected_outputs([tag_of(adapter), *prompt], how, limit + 1, eos_rate)
    if how.is_beam_search:
        return beam_search(prompt, how, limit)
    assert how.seed is not None
    group = SequenceGroup("", 0, np.array(prompt), how, how.seed, limit)
    outputs = []
    for sequence in group.sequences:
        tokens = generate(prompt, sequence.seed, limit, eos_rate, how.ignore_eos)
        stops = [i for i, token in enumerate(tokens) if token in how.stop_token_ids]
        outputs.append(tokens[: stops[0] + 1] if stops else tokens)
    if how.ranks:
        scores = [
            sum(logprob_of([*prompt, *output[:i]], token) for i, token in enumerate(output))
            for output in outputs
        ]
        outputs = [outputs[i] for i in np.argsort(-np.array(scores), kind="stable")]
    return outputs[: how.n]
