"""Sampling parameters: how a request is decoded."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from paged import checks
from paged.checks import described, is_real, is_text, is_whole, refusal, shown

MAX_SEQUENCES = 2**16  # sequences that run at once, of one request or of many


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded.

    Reported log-probabilities are natural logarithms from the model's own logits, before
    temperature, penalties and bias. A simulated device reports none. A beam search equals
    transformers' `generate` with num_beams, length_penalty and early_stopping, and returns its n
    best hypotheses.

    Raises ValueError for values of the wrong type or outside their range.
    """

    max_tokens: int = described(64, "tokens to generate at most", least=1, below=2**31)
    temperature: float = described(0.0, "0 is greedy")
    top_k: int = described(
        0, "sample among the k most probable tokens; 0 is off", least=0, below=2**31
    )
    top_p: float = described(
        1.0,
        "sample among the most probable tokens of this total probability; 1 is off",
        above=0,
        most=1,
    )
    min_p: float = described(
        0.0,
        "leave out tokens less probable than this times the most probable one; 0 is off",
        least=0,
        most=1,
    )
    repetition_penalty: float = described(
        1.0,
        "divides positive logits, and multiplies negative ones, of tokens that the prompt or the "
        "output holds; 1 is off",
        least=0.01,
        most=100,
    )
    presence_penalty: float = described(
        0.0,
        "subtracted from the logits of tokens that the output holds; 0 is off",
        least=-2,
        most=2,
    )
    frequency_penalty: float = described(
        0.0,
        "subtracted from a token's logit for each time that the output holds it; 0 is off",
        least=-2,
        most=2,
    )
    logit_bias: Mapping[int, float] = dataclasses.field(
        default_factory=dict, hash=False, metadata={"help": "token → what is added to its logit"}
    )
    seed: int | None = described(
        None,
        "makes the request's tokens repeatable whatever else runs; None: the engine draws one, "
        "another for each request",
        least=0,
        below=2**32,
    )
    forced_output: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"help": "tokens that the output begins with, whatever is sampled"}
    )
    stop: tuple[str, ...] = described((), "strings that end the output and are cut from it")
    stop_token_ids: tuple[int, ...] = described(
        (), "tokens that end the output and stay in it, though not in its text"
    )
    ignore_eos: bool = described(False, "whether to generate to max_tokens, past ends of sequence")
    logprobs: int | None = described(
        None,
        "report the log-probability of each generated token, and of this many best alternatives "
        f"(0 to {MAX_LOGPROBS}); None: report nothing",
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = described(
        None,
        "report the log-probability of each prompt token, and of this many best alternatives "
        f"(0 to {MAX_LOGPROBS}); None: report nothing",
        least=0,
        most=MAX_LOGPROBS,
    )
    n: int = described(
        1,
        "sequences of each request: sampled ones, or the best of a beam search",
        least=1,
        most=MAX_SEQUENCES,
    )
    best_of: int | None = described(
        None,
        "sequences to sample, of which the n with the highest cumulative log-probability are "
        "returned; None: n",
    )
    beam_width: int = described(
        1, "beams of a search instead of sampling; 1 is off", least=1, most=MAX_LOGPROBS - 1
    )
    length_penalty: float = described(
        1.0, "exponent of a beam's length; above 0 it favours long outputs", least=-10, most=10
    )
    early_stopping: bool | Literal["never"] = described(
        False, "when a beam search ends: False, True or 'never', as in transformers"
    )

    def __post_init__(self):
        checks.make_plain(self)
        self._copy_collections()
        checks.require_bounds(self)
        checks.require(self, {
            "temperature": (
                self.temperature == 0 or self.temperature >= checks.SMALLEST,
                f"0 (greedy) or at least {checks.SMALLEST:.3g}",
            ),
            "best_of": (
                self.best_of is None or self.n <= self.best_of <= MAX_SEQUENCES,
                f"at least n ({self.n}) and at most {MAX_SEQUENCES}",
            ),
        })  # fmt: skip
        if self.is_beam_search:
            self._check_beam_search()
            return
        if self.num_sequences > 1 and self.temperature == 0:
            raise ValueError("n and best_of above 1 need a temperature above 0, or beam_width")
        for name, default in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name} ({value!r}) needs a beam search: beam_width above 1")

    def _check_beam_search(self) -> None:
        if self.n > self.beam_width:
            raise ValueError(f"n ({self.n}) must be at most beam_width ({self.beam_width})")
        plain = SamplingParams()
        for name in ("best_of", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                     "presence_penalty", "frequency_penalty", "logit_bias", "stop",
                     "stop_token_ids", "logprobs", "forced_output"):  # fmt: skip
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"beam search does not take {name} ({getattr(self, name)!r})")

    def _copy_collections(self) -> None:
        """Check collections and copy them, so that callers cannot change them later."""
        stop, bias = self.stop, self.logit_bias
        if not isinstance(stop, tuple | list) or not all(is_text(s) and s for s in stop):
            raise refusal("stop", "a tuple of non-empty strings", stop)
        object.__setattr__(self, "stop", tuple(map(str, stop)))
        for name in ("stop_token_ids", "forced_output"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple | list) or not all(map(is_whole, ids)):
                raise refusal(name, "a tuple of token ids", ids)
            object.__setattr__(self, name, tuple(map(int, ids)))
        if self.forced_output and len(self.forced_output) > self.max_tokens:
            raise ValueError(
                f"forced_output has {len(self.forced_output)} tokens, more than max_tokens "
                f"({self.max_tokens})"
            )
        if not isinstance(bias, Mapping):
            raise refusal("logit_bias", "a map of token ids to numbers", bias)
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias may name {MAX_LOGIT_BIAS} tokens, not {len(bias)}")
        for token, value in bias.items():
            if not is_whole(token) or not is_real(value) or abs(value) > 100:
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, not "
                    f"{shown(token)} to {shown(value)}"
                )
        object.__setattr__(self, "logit_bias", {int(t): float(v) for t, v in bias.items()})

    @property
    def uses_history(self) -> bool:
        """Whether sampling needs the sequence's tokens, for penalties or forced output."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0) or bool(self.forced_output)

    @property
    def is_beam_search(self) -> bool:
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """The most sequences of the request that run at once."""
        return self.beam_width if self.is_beam_search else self.best_of or self.n

    @property
    def ranks(self) -> bool:
        """Whether more sequences are sampled than returned."""
        return self.num_sequences > self.n and not self.is_beam_search


def changed_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    named = ((name, getattr(sampling, name)) for name in vars(_default()))
    return {name: value for name, value in named if value != getattr(_default(), name)}


@functools.cache
def _default() -> SamplingParams:
    return SamplingParams()
