"""Sampling next tokens on the device.

The order of the steps is vLLM's: logit bias, penalties, temperature, min-p, top-k, top-p, and the
draw. (transformers applies min-p after top-p.) Log-probabilities are computed from the model's
logits, before all of these steps.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray  # The host fills numpy arrays, and the device reads JAX arrays.
INVALID_TOKEN = -1  # The result of a row whose logits are not finite.
MAX_LOGIT_BIAS = 300  # The most tokens that a request can bias.
MAX_LOGPROBS = 20  # The number of alternatives with log-probabilities for each token.
BEAM = 2  # The value of `SamplingArrays.logprobs` for a row that is a beam.


@flax.struct.dataclass
class SamplingArrays:
    """Sampling parameters of S rows. All fields are [S].

    temperature: float32; 0 is greedy.
    top_k: int32; 0 is off.
    top_p: float32; 1 is off.
    min_p: float32; 0 is off.
    repetition_penalty: float32; 1 is off.
    presence_penalty, frequency_penalty: float32; 0 is off.
    seed: uint32. The row's random key is computed from the seed and the position of the token to be
        sampled, so a request's tokens do not depend on the other requests in the batch.
    prompt_length: int32, the number of prompt tokens; later tokens are output.
    num_bias: int32, the number of entries in the slot's logit bias.
    logprobs: int32. 0 if no log-probabilities are requested. `BEAM` for a beam, which uses only the
        log-probabilities and not the sampled token.
    forced: int32. At positions below `forced`, the token in the slot's history replaces the sampled
        token.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    seed: Array
    prompt_length: Array
    num_bias: Array
    logprobs: Array
    forced: Array

    @classmethod
    def of_rows(cls, rows) -> "SamplingArrays":
        """The parameters in rows int32 [S, n]. Each row has the bits of one `SAMPLING_ROW`."""
        columns = {}
        for i, name in enumerate(SAMPLING_ROW.names or ()):
            columns[name] = jax.lax.bitcast_convert_type(rows[:, i], SAMPLING_ROW[name])
        return cls(**columns)


# One row of `SamplingArrays`, as the host stores it.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32),
        ("min_p", np.float32), ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32), ("frequency_penalty", np.float32),
        ("seed", np.uint32), ("prompt_length", np.int32), ("num_bias", np.int32),
        ("logprobs", np.int32), ("forced", np.int32),
    ]
)  # fmt: skip
GREEDY_ROW = np.array((0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0), SAMPLING_ROW)


@flax.struct.dataclass
class SamplingState:
    """The sampling state of each slot on the device.

    history: [num_slots, C] int32, tokens by position. `load_slot` writes the tokens so far, which
        penalties need, and then the forced tokens. A step writes the tokens that it samples.
    bias_tokens: [num_slots, MAX_LOGIT_BIAS] int32. Only the first `SamplingArrays.num_bias` entries
        of a slot are used.
    bias_values: [num_slots, MAX_LOGIT_BIAS] float32.
    """

    history: jax.Array
    bias_tokens: jax.Array
    bias_values: jax.Array

    @classmethod
    def empty(cls, num_slots: int, max_tokens: int) -> "SamplingState":
        bias = (num_slots, MAX_LOGIT_BIAS)
        return cls(
            jnp.zeros((num_slots, max_tokens), jnp.int32),
            jnp.zeros(bias, jnp.int32),
            jnp.zeros(bias, jnp.float32),
        )

    def load_slot(self, slot, history_C, bias_tokens, bias_values) -> "SamplingState":
        """The state with one slot replaced. With a slot out of range nothing changes."""
        return SamplingState(
            self.history.at[slot].set(history_C, mode="drop"),
            self.bias_tokens.at[slot].set(bias_tokens, mode="drop"),
            self.bias_values.at[slot].set(bias_values, mode="drop"),
        )


@flax.struct.dataclass
class Logprobs:
    """Natural log-probabilities of tokens, with their most probable alternatives.

    chosen: [...] float32, log-probabilities of the tokens.
    top_tokens: [..., A] int32, the most probable tokens, ordered by descending probability;
        A = min(MAX_LOGPROBS, V).
    top: [..., A] float32, the log-probabilities of `top_tokens`.
    """

    chosen: Array
    top_tokens: Array
    top: Array


def logprobs_of(logits, tokens) -> Logprobs:
    """Log-probabilities of tokens int32 [...] under logits [..., V]."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    at = jnp.maximum(tokens, 0)[..., None]
    top, top_tokens = jax.lax.top_k(logp, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(logp, at, -1)[..., 0], top_tokens.astype(jnp.int32), top)


def no_logprobs(shape: tuple[int, ...], vocab_size: int) -> Logprobs:
    """Zeros in the shapes of `logprobs_of`, for steps in which no row requests them."""
    alternatives = (*shape, min(MAX_LOGPROBS, vocab_size))
    return Logprobs(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(alternatives, jnp.int32),
        jnp.zeros(alternatives, jnp.float32),
    )


def _biased(logits_SxV, num_bias_S, bias_tokens, bias_values):
    counts = jnp.arange(MAX_LOGIT_BIAS) < num_bias_S[:, None]
    rows = jnp.arange(logits_SxV.shape[0])[:, None]
    return logits_SxV.at[rows, bias_tokens].add(jnp.where(counts, bias_values, 0.0))


def _penalised(logits_SxV, how: SamplingArrays, history_SxC, position_S):
    """Logits after the penalties.

    The repetition penalty scales the logits of tokens in prompt and output. The frequency and
    presence penalties are subtracted from the logits of tokens in the output.
    """
    S, C = history_SxC.shape
    rows, index = jnp.arange(S)[:, None], jnp.arange(C)
    exists = index < position_S[:, None]
    generated = exists & (index >= how.prompt_length[:, None])
    nothing = jnp.zeros(logits_SxV.shape, jnp.int32)
    seen = nothing.at[rows, history_SxC].add(exists) > 0
    counts = nothing.at[rows, history_SxC].add(generated)
    factor = how.repetition_penalty[:, None]
    repeated = jnp.where(logits_SxV > 0, logits_SxV / factor, logits_SxV * factor)
    return (
        jnp.where(seen, repeated, logits_SxV)
        - how.frequency_penalty[:, None] * counts
        - how.presence_penalty[:, None] * (counts > 0)
    )


def _keep_min_p(scaled_SxV, min_p_S):
    """The logits, with -inf for tokens below min_p times the largest probability."""
    least = scaled_SxV.max(-1) + jnp.log(min_p_S)
    return jnp.where(scaled_SxV >= least[:, None], scaled_SxV, -jnp.inf)


def _keep_top_k_top_p(scaled_SxV, top_k_S, top_p_S):
    """The logits, with -inf for dropped tokens.

    Top-k keeps the k largest logits. Of these, top-p keeps the fewest largest logits with a total
    probability of at least p. Logits equal to the smallest kept logit are kept too.
    """
    V = scaled_SxV.shape[-1]
    ordered = jnp.sort(scaled_SxV, axis=-1, descending=True)
    k = jnp.where(top_k_S > 0, jnp.minimum(top_k_S, V), V)
    in_top_k = jnp.arange(V) < k[:, None]
    probs = jax.nn.softmax(ordered, where=in_top_k, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    top_p = top_p_S[:, None]
    # The rounded cumulative mass may reach 1 too early, but top_p = 1 must keep all tokens.
    kept = in_top_k & ((mass_before < top_p) | (top_p >= 1) | (jnp.arange(V) == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled_SxV >= threshold, scaled_SxV, -jnp.inf)


def _gumbel(seed, position, V):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (V,), jnp.float32)


def _where_any(asks_S, change, x):
    """`change(x)` if any row needs it, otherwise x at no cost."""
    return jax.lax.cond(jnp.any(asks_S), change, lambda x: x, x)


def _argmax(x_SxV):
    """The first index [S] int32 of the largest value in each row.

    On CPUs XLA vectorises these two plain reductions, but not `jnp.argmax`. For 32 rows of 32,000
    on two cores, they take 0.3 ms and `jnp.argmax` takes 2.5 ms.
    """
    V = x_SxV.shape[-1]
    largest = x_SxV == x_SxV.max(-1, keepdims=True)
    return jnp.where(largest, jnp.arange(V, dtype=jnp.int32), V - 1).min(-1)


def sample(logits_SxV, how: SamplingArrays, position_S, state: SamplingState, slots_S):
    """Tokens [S] int32 from float32 logits [S, V]; `INVALID_TOKEN` where logits are not finite.

    position: [S] int32, the position of the token to be sampled.
    slots: [S] int32, each row's slot in `state`; slots of padding rows may be out of range.

    Greedy rows take the argmax. Other rows take the argmax of logits / temperature plus Gumbel
    noise, which is a draw from the softmax. Top-k, top-p and min-p do not change the noise of a
    token.
    """
    rows = jnp.minimum(slots_S, state.history.shape[0] - 1)
    adjusted = _where_any(
        how.num_bias > 0,
        lambda x: _biased(x, how.num_bias, state.bias_tokens[rows], state.bias_values[rows]),
        logits_SxV,
    )
    adjusted = _where_any(
        (how.repetition_penalty != 1) | (how.presence_penalty != 0) | (how.frequency_penalty != 0),
        lambda x: _penalised(x, how, state.history[rows], position_S),
        adjusted,
    )
    greedy = _argmax(adjusted)

    def draw():
        x = adjusted / jnp.maximum(how.temperature, 1e-6)[:, None]
        x = _where_any(how.min_p > 0, lambda x: _keep_min_p(x, how.min_p), x)
        x = _where_any(
            (how.top_k > 0) | (how.top_p < 1.0),
            lambda x: _keep_top_k_top_p(x, how.top_k, how.top_p),
            x,
        )
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(how.seed, position_S, x.shape[-1])
        drawn = _argmax(x + noise)
        return jnp.where(how.temperature > 0, drawn, greedy)

    tokens = jax.lax.cond(jnp.any(how.temperature > 0), draw, lambda: greedy)
    is_forced = position_S < how.forced
    forced = state.history.at[rows, position_S].get(mode="clip")
    tokens = jnp.where(is_forced, forced, tokens)
    # If any logit is infinite or NaN, the maximum or the minimum is infinite or NaN.
    finite = jnp.isfinite(logits_SxV.max(-1)) & jnp.isfinite(logits_SxV.min(-1))
    return jnp.where(finite, tokens, INVALID_TOKEN)
