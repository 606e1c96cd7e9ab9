"""Prompt and output lengths with the means that the vLLM paper publishes (§6.1, Fig. 11).

Only the means are published. The distribution is our choice: log-normal, with sigma from a flag.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

# (mean prompt tokens, mean output tokens).
PUBLISHED_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
# The paper gives no lengths for WMT16. Ours are for English to German, in tokens of LLaMA.
# Punica §7.2: 1,000 requests with ShareGPT's lengths generate 101k tokens.
MEANS = PUBLISHED_MEANS | {"translation": (30.0, 40.0), "punica": (161.31, 101.0)}
# Mean number of earlier rounds of a chat, our choice. In the paper most chats reach 1,024 tokens.
MEAN_EARLIER_ROUNDS = 4
QUANTILES = 4096


def draw(
    count: int, dataset: str, sigma: float, limit: int, seed: int
) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """`count` pairs of (prompt, output) tokens, and notes for the report.

    A pair has at most `limit` tokens. A prompt is clipped to half of the limit, and an output to
    the rest of the limit. Clipping lowers the means, so the scale is raised until the means equal
    the published ones. With a mean above half of its cap, many lengths would equal the cap, so such
    a mean is lowered to half of the cap. The notes hold the means.

    Raises ValueError if limit < 2.
    """
    if limit < 2:
        raise ValueError(f"a context of {limit} tokens has no room for a prompt and an output")
    wanted_prompt, wanted_output = MEANS[dataset]
    normals = np.random.default_rng([seed, 1]).standard_normal((count, 2))
    # The distribution has the published means. The means of a sample differ by chance.
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
    partners = np.random.default_rng(0).permutation(quantiles)

    prompt_cap = np.array(limit // 2)
    prompt_mean = min(wanted_prompt, limit // 2 / 2)
    scale = _calibrate(prompt_mean, sigma, quantiles, prompt_cap)
    prompts = _lengths(normals[:, 0], sigma, scale, prompt_cap)

    output_caps = limit - _lengths(quantiles, sigma, scale, prompt_cap)
    output_mean = min(wanted_output, float(output_caps.mean()) / 2)
    scale = _calibrate(output_mean, sigma, partners, output_caps)
    outputs = _lengths(normals[:, 1], sigma, scale, limit - prompts)

    published = dataset in PUBLISHED_MEANS
    ours = "ours: only the means are published" if published else "ours, as the means are"
    notes = {
        "lengths": f"log-normal with sigma {sigma:g} ({ours})",
        "target_mean_prompt_tokens": prompt_mean,
        "target_mean_output_tokens": output_mean,
        "longest_sequence_tokens": limit,
    }
    if published:
        notes["published_mean_prompt_tokens"] = wanted_prompt
        notes["published_mean_output_tokens"] = wanted_output
    return list(zip(prompts.tolist(), outputs.tolist())), notes


def draw_divided(
    count: int, dataset: str, sigma: float, limit: int, seed: int, divisor: int
) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """As `draw`, with all lengths divided by `divisor`. A pair has at most `limit` tokens after the
    division."""
    pairs, notes = draw(count, dataset, sigma, limit * divisor, seed)
    if divisor == 1:
        return pairs, notes
    prompts = [max(1, round(prompt / divisor)) for prompt, _ in pairs]
    outputs = [max(1, round(output / divisor)) for _, output in pairs]
    lengths = [(prompt, min(output, limit - prompt)) for prompt, output in zip(prompts, outputs)]
    return lengths, {"lengths_before_division": notes, "length_divisor": divisor}


def draw_chats(
    count: int, sigma: float, limit: int, half: int, seed: int, divisor: int
) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """As `draw_divided`, for the ends of conversations.

    A conversation has rounds with ShareGPT's lengths, each of at most `limit` tokens, and then a
    query. The prompt is the last `half` tokens of the conversation. The output has at most `half`
    tokens.
    """
    rng = np.random.default_rng([seed, 3])
    earlier = rng.geometric(1 / (1 + MEAN_EARLIER_ROUNDS), count) - 1
    num_rounds = int((earlier + 1).sum())
    rounds, notes = draw_divided(num_rounds, "sharegpt", sigma, limit, seed, divisor)
    ends = np.cumsum(earlier + 1).tolist()
    lengths = []
    for first, end in zip([0, *ends], ends):
        *history, (query, answer) = rounds[first:end]
        lengths.append((min(sum(map(sum, history)) + query, half), min(answer, half)))
    more = {
        "earlier_rounds": f"geometric with mean {MEAN_EARLIER_ROUNDS} (ours)",
        "longest_prompt_tokens": half,
        "longest_sequence_tokens": 2 * half,
    }
    return lengths, notes | more


def _lengths(normals: np.ndarray, sigma: float, scale: float, caps: np.ndarray) -> np.ndarray:
    """Log-normal int64 lengths from standard normals, clipped to 1 to `caps`."""
    return np.clip(np.rint(scale * np.exp(sigma * normals)), 1, caps).astype(np.int64)


def _calibrate(mean: float, sigma: float, quantiles: np.ndarray, caps: np.ndarray) -> float:
    """The scale (median before clipping, in tokens) at which the clipped lengths have this mean."""

    def above(log_scale: float) -> float:
        found = _lengths(quantiles, sigma, math.exp(log_scale), caps).mean()
        # Rounded lengths have the same mean over a range of scales; 1e-9 selects its lower end.
        return found - mean + 1e-9

    shortest, longest = math.log(1e-3), math.log(1e6)
    if above(shortest) > 0:  # where each length is 1
        return math.exp(shortest)
    from scipy import optimize  # imported here: it takes a second, and few programs draw lengths

    root = optimize.brentq(above, shortest, longest)
    return math.exp(root + 1e-11)  # beyond brentq's tolerance, so that the mean is reached
