"""Sampling next tokens on the device."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray  # the host fills numpy arrays, the device reads its own
INVALID_TOKEN = -1  # what a row whose logits are not finite gives instead of a token


@flax.struct.dataclass
class SamplingArrays:
    """How each of S rows is sampled.

    temperature [S] float32 (0 is greedy); top_k [S] int32 (0 is off); top_p [S] float32 (1 is off);
    seed [S] uint32 and position [S] int32 (of the token to be sampled) make up the row's random
    key, so a request's tokens do not depend on its company in the batch.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    position: Array


def _keep_top_k_top_p(scaled_SxV, top_k_S, top_p_S):
    """Logits outside the top k, then outside the smallest set that holds mass p, become -inf.

    Ties with the last kept logit are kept.
    """
    V = scaled_SxV.shape[-1]
    ordered = jnp.sort(scaled_SxV, axis=-1, descending=True)
    k = jnp.where(top_k_S > 0, jnp.minimum(top_k_S, V), V)
    in_top_k = jnp.arange(V) < k[:, None]
    probs = jax.nn.softmax(ordered, where=in_top_k, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    kept = in_top_k & ((mass_before < top_p_S[:, None]) | (jnp.arange(V) == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled_SxV >= threshold, scaled_SxV, -jnp.inf)


def _gumbel(seed, position, V):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (V,), jnp.float32)


def sample(logits_SxV, how: SamplingArrays):
    """Tokens [S] int32 from float32 logits [S, V]; `INVALID_TOKEN` where logits are not finite.

    Greedy rows take the argmax. Others take the argmax of logits / temperature plus Gumbel noise,
    which draws from the softmax; filters leave the noise of the remaining tokens as it was. The
    costs of noise and of sorting are paid only in steps where some row asks for them.
    """
    greedy = jnp.argmax(logits_SxV, axis=-1).astype(jnp.int32)

    def draw():
        scaled = logits_SxV / jnp.maximum(how.temperature, 1e-6)[:, None]
        filtered = jax.lax.cond(
            jnp.any((how.top_k > 0) | (how.top_p < 1.0)),
            lambda x: _keep_top_k_top_p(x, how.top_k, how.top_p),
            lambda x: x,
            scaled,
        )
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
            how.seed, how.position, logits_SxV.shape[-1]
        )
        drawn = jnp.argmax(filtered + noise, axis=-1).astype(jnp.int32)
        return jnp.where(how.temperature > 0, drawn, greedy)

    tokens = jax.lax.cond(jnp.any(how.temperature > 0), draw, lambda: greedy)
    return jnp.where(jnp.isfinite(logits_SxV).all(-1), tokens, INVALID_TOKEN)
