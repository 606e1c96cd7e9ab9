"""Initial weights of a larger model with the same logits as a smaller one (Net2Net, Chen et al.).

Width: each unit of the residual stream is copied, and the weights that read it are split unevenly
between the copies, so that the copies diverge in training. New heads and MLP units have random
input weights, and output weights of zero. Depth: new layers follow each old layer; their output
weights are zero, too.
"""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig

UNEVEN = 0.5  # standard deviation of the noise on split weights, over that of the weights
WRITES = ("wo", "w_down")


def check(small: ModelConfig, large: ModelConfig) -> None:
    """Raises ValueError if `large` cannot be grown from `small`."""
    for name in ("hidden_size", "num_layers"):
        few, many = getattr(small, name), getattr(large, name)
        if many % few:
            raise ValueError(f"{name} must be a multiple of the smaller model's {few}, not {many}")
    for name in ("num_kv_heads", "intermediate_size"):
        few, many = getattr(small, name), getattr(large, name)
        if many < few:
            raise ValueError(f"{name} must be at least the smaller model's {few}, not {many}")
    group = small.num_heads // small.num_kv_heads
    if large.num_heads != group * large.num_kv_heads:
        raise ValueError(f"num_heads must be {group} a KV head, as in the smaller model")
    same = (
        "model_type", "vocab_size", "head_dim", "qk_norm", "qkv_bias", "tie_word_embeddings",
        "rope_theta", "rope_scaling", "norm_eps", "sliding_window",
    )  # fmt: skip
    for name in same:
        if getattr(small, name) != getattr(large, name):
            raise ValueError(
                f"{name} must be the smaller model's {getattr(small, name)!r}, not "
                f"{getattr(large, name)!r}"
            )


def inherited(small: ModelConfig, large: ModelConfig) -> np.ndarray:
    """[L, K] bool: the KV heads of `large` that `grow` would copy from `small`. Raises ValueError
    as `check` does; the weights are not compared."""
    check(small, large)
    found = np.zeros((large.num_layers, large.num_kv_heads), bool)
    found[:: large.num_layers // small.num_layers, : small.num_kv_heads] = True
    return found


def grow(p, small: ModelConfig, large: ModelConfig, random, key):
    """Parameters of `large` that give the same logits as the parameters `p` of `small`.

    random: random parameters of `large`, for its new heads, units and layers.
    Raises ValueError as `check` does.
    """
    check(small, large)
    copies, depth = large.hidden_size // small.hidden_size, large.num_layers // small.num_layers
    keys = iter(jax.random.split(key, 2 + 7 * small.num_layers))

    def read(w):  # [out, E] of the smaller model
        parts = jnp.tile(w / copies, (1, copies)).reshape(w.shape[0], copies, -1)
        noise = UNEVEN * parts.std() * jax.random.normal(next(keys), parts.shape)
        return (parts + noise - noise.mean(1, keepdims=True)).reshape(w.shape[0], -1)

    def layer(old, new):
        made = dict(new)
        for name, w in old.items():
            if name.endswith("_norm") and name not in ("q_norm", "k_norm"):
                made[name] = jnp.tile(w, copies)
            elif name in WRITES:
                made[name] = (
                    jnp.zeros_like(new[name]).at[:, : w.shape[1]].set(jnp.tile(w, (copies, 1)))
                )
            elif w.ndim == 2:
                made[name] = new[name].at[: w.shape[0]].set(read(w))
            elif name in ("q_norm", "k_norm"):
                made[name] = w
            else:  # a bias of queries, keys or values
                made[name] = new[name].at[: w.shape[0]].set(w)
        return made

    silent = [
        each | {name: jnp.zeros_like(each[name]) for name in WRITES} for each in random["layers"]
    ]
    # A tied head reads all copies of the last hidden states.
    heard = copies if small.tie_word_embeddings else 1
    grown = {
        "embed": jnp.tile(p["embed"], (1, copies)),
        "final_norm": jnp.tile(p["final_norm"] / heard, copies),
        "layers": [
            each if number % depth else layer(p["layers"][number // depth], each)
            for number, each in enumerate(silent)
        ],
    }
    return grown if small.tie_word_embeddings else grown | {"lm_head": read(p["lm_head"])}
