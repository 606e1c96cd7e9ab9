"""The checks that a request must pass before it is queued."""

from collections.abc import Sequence

import numpy as np

from models.config import ModelConfig
from models.sampling import MAX_LOGPROBS
from paged.checks import is_bool, is_real, is_text, refusal, shown
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.host import HostPolicy, Sizes
from paged.requests.sampling_params import SamplingParams

Prompt = str | Sequence[int]
# These types are sequences in Python, but they are neither prompts nor tokens.
_BYTES = (bytes, bytearray, memoryview)


class PromptTooLong(ValueError):
    """The context has no room for a prompt."""


def check_sequence(name: str, items: str, value) -> None:
    """Raise ValueError unless `value` is a list or another sequence of `items`."""
    if not isinstance(value, Sequence) or isinstance(value, (str, *_BYTES)):
        raise refusal(name, f"a list, tuple or other sequence of {items}", value)


def paired(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """(prompt, sampling) for each prompt. A single SamplingParams applies to all prompts.

    Raises ValueError for values that are no sequences, or of unequal lengths.
    """
    check_sequence("prompts", "prompts", prompts)
    sampling = SamplingParams() if sampling is None else sampling
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    check_sequence("sampling", "SamplingParams", sampling)
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(sampling)} sampling parameters")
    return list(zip(prompts, sampling, strict=True))


def each_adapter(adapters: Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    """Each prompt's adapter. Raises ValueError unless `adapters` is a sequence of `count`."""
    if adapters is None:
        return [None] * count
    check_sequence("adapters", "names or None", adapters)
    if len(adapters) != count:
        raise ValueError(f"{count} prompts with {len(adapters)} adapters")
    return adapters


def check_arrival(request_id, arrival_time, stream, cache_salt, now: float) -> None:
    """Raise ValueError for arguments of a wrong type, or an arrival time after `now`, in seconds on
    the engine's clock."""
    if request_id is not None and not is_text(request_id):
        raise refusal("request_id", "a text", request_id)
    if not is_bool(stream):
        raise refusal("stream", "True or False", stream)
    if arrival_time is not None and not is_real(arrival_time):
        raise refusal("arrival_time", "a finite number", arrival_time)
    if arrival_time is not None and arrival_time > now:
        raise ValueError(f"arrival_time {arrival_time} is in the future: it is {now}")
    check_salt(cache_salt)


def check_salt(cache_salt) -> None:
    """Raise ValueError unless the salt is text. Admission hashes it; an error there would end all
    requests."""
    if not is_text(cache_salt):
        raise refusal("cache_salt", "a text", cache_salt)


def token_limit(tokens: np.ndarray, sampling: SamplingParams, config: EngineConfig) -> int:
    """The number of tokens, of prompt and output, at which generation ends."""
    return min(len(tokens) + sampling.max_tokens, config.max_model_len)


def check_model(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ValueError if the model cannot take sequences of `max_model_len` tokens, or if the
    policy cannot serve it."""
    if config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) exceeds the model's max_position_embeddings "
            f"({model.max_position_embeddings})"
        )
    policy_of(config.policy).check(config, model)


def validated_prompt(
    prompt: Prompt,
    sampling: SamplingParams,
    tokenizer,
    model: ModelConfig,
    config: EngineConfig,
    sizes: Sizes | HostPolicy,
) -> np.ndarray:
    """The prompt as token ids [n] int32.

    Raises ValueError for a request that could never run. The message names the wrong value and the
    allowed values.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams, not {sampling!r}")
    check_stop_strings(tokenizer, sampling.stop)
    for name in ("stop_token_ids", "logit_bias", "forced_output"):
        for token in getattr(sampling, name):
            if not 0 <= token < model.vocab_size:
                raise ValueError(
                    f"{name}: token {shown(token)} is outside the vocabulary "
                    f"[0, {model.vocab_size - 1}]"
                )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; pass token ids")
        prompt.encode()  # Raises ValueError for half a surrogate pair; tokenizers do not.
        prompt = tokenizer.encode(prompt)
    tokens = token_ids("a prompt", prompt, model.vocab_size)
    if not len(tokens):
        raise ValueError("the prompt is empty")
    if len(tokens) >= config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens; max_model_len ({config.max_model_len}) "
            f"allows {config.max_model_len - 1}, and one to generate"
        )
    if len(tokens) + len(sampling.forced_output) > config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens and forced_output {len(sampling.forced_output)}; "
            f"max_model_len is {config.max_model_len}"
        )
    count = sampling.num_sequences
    check_group(sampling, model, config)
    if not sizes.fits(token_limit(tokens, sampling, config), count):
        times = f"{count} times " if count > 1 else ""
        raise ValueError(
            f"{times}a prompt of {len(tokens)} tokens and {sampling.max_tokens} to generate exceed "
            f"the cache: kv_cache_tokens ({config.kv_cache_tokens}) in whole pages of "
            f"{config.page_size}, without those of pinned prefixes"
        )
    return tokens


def token_ids(what: str, tokens, vocab_size: int) -> np.ndarray:
    """A list or array as token ids [n] int32. Raises ValueError for other values.

    what: the name of `tokens` in errors.
    """
    # numpy would accept bytes as numbers, and masked tokens as tokens.
    unfit = isinstance(tokens, (*_BYTES, np.ma.MaskedArray))
    ids = np.asarray(tokens)
    # The dtype's kind is compared, because numpy counts time spans among the integers.
    if unfit or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{what} of token ids must be a flat list of integers")
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise ValueError(f"token {bad[0]} is outside the vocabulary [0, {vocab_size - 1}]")
    return ids.astype(np.int32)


def check_group(sampling: SamplingParams, model: ModelConfig, config: EngineConfig) -> None:
    """Raise ValueError if the sequences of a request cannot run together."""
    count = sampling.num_sequences
    if count > config.max_num_seqs:
        raise ValueError(
            f"{count} sequences of a request must run side by side: max_num_seqs is "
            f"{config.max_num_seqs}"
        )
    if sampling.is_beam_search and config.parts.fork == "no":
        raise ValueError(f"policy {config.policy!r} cannot fork a sequence: beam_width")
    # The device returns MAX_LOGPROBS candidates for each beam.
    most = min(MAX_LOGPROBS, model.vocab_size) - len(model.eos_token_ids)
    if sampling.is_beam_search and count > most:
        raise ValueError(
            f"beam_width must be at most {most} with {len(model.eos_token_ids)} end tokens, not "
            f"{count}"
        )


def check_stop_strings(tokenizer, stop: tuple[str, ...]) -> None:
    """Raise ValueError for stop strings that no text can contain, or without a tokenizer."""
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    for string in stop:
        if string in tokenizer.all_special_tokens:
            raise ValueError(
                f"stop string {string!r} is a special token, and those are not part of the text"
            )


def check_pin(prompt: np.ndarray, cache_salt, config: EngineConfig, policy) -> None:
    """Raise ValueError without prefix caching or a free pin, for a prompt that is too short to pin
    or that the policy never shares, and unless the salt is text."""
    can = config.parts
    if not (config.prefix_caching or can.pins):
        staged = f"option pins of policy {config.policy!r}"
        needed = staged if can.staged_tile else "prefix_caching"
        raise ValueError(f"pinning a prefix needs {needed}")
    if can.pins and policy.num_pinned == can.pins:
        raise ValueError(f"as many prefixes are pinned as option pins allows: {can.pins}")
    if not can.pinned_tokens(len(prompt)):
        raise ValueError(
            f"a prefix of {len(prompt)} tokens is too short to be pinned: at least "
            f"{can.staged_tile + 2} are needed"
        )
    if not can.shares(len(prompt)):
        raise ValueError(
            f"a prefix of {len(prompt)} tokens is prefilled sparsely and shared with nobody: "
            f"pin fewer than {can.unshared_from}"
        )
    check_salt(cache_salt)
