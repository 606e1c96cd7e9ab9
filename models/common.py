"""Code that the model families share: the interface to a server, and the loop over layers.

A family is a module with `declare`, `forward`, `logits` and `PROJECTIONS` (models/families.py).
`forward` takes three functions, so that a model does not depend on how it is served:

* `attend(layer, q, k, v, cache) -> (out, cache)` computes attention. q is [T, H, D]; k and v are
  [T, K, D]. q and k are given after QK norm and rotary embedding. out is [T, H, D]. `attend` may
  use a paged cache, sparse pages, quantised pages, or plain causal attention.
  `ModelConfig.attention` has the layer's scale, soft cap and window.
* `adapters(name, layer, x, y) -> y` adds an adapter to a projection. x [T, in] is the projection's
  input, and y [T, out] its product with the base weights. The result is y + xAB, in y's dtype
  (LoRA; Punica §2.2 and §4). `name` is one of the family's `PROJECTIONS`. If `adapters` is
  None, the model is the base model.
* `reduce` combines the shards of tensor parallelism (vLLM §4.6). `params` and `config` then have
  only the shard's part of the heads and of the MLP. `reduce.sum(y)` sums y [T, E] over the shards.
  `reduce.max(x)` is the elementwise maximum of x [T] over the shards, which W8A8 needs for each
  token's scale.

`layer` is a traced int32 scalar, with which `attend` and `adapters` index stacks of all layers.

`projection` applies `adapters`, then `reduce`. On a shard, x and y are the shard's parts. If shards
split the output ('wq', 'wk', 'wv', 'w_gate', 'w_up'), B is split like the weights' output, and A is
whole. If shards split the input ('wo', 'w_down'), A is split like the weights' input, and B is
whole. Then xAB and y are both partial sums, and one `reduce.sum` completes both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.linear import linear

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Adapters = Callable[[str, jax.Array, jax.Array, jax.Array], jax.Array]


class Reduce(NamedTuple):
    sum: Callable[[jax.Array], jax.Array]
    max: Callable[[jax.Array], jax.Array]


ALONE = Reduce(lambda y: y, lambda x: x)  # for a model that is not split

INPUT_SPLIT = ("wo", "w_down")  # Shards split the input of these projections.


def projection(p: dict, layer, adapters: Adapters | None, reduce: Reduce) -> Callable:
    """A function `project(name, x)` for a layer with parameters p. For x [T, in], the function
    returns [T, out] in x's dtype.

    The order is product, adapter, sum over shards, bias. Every shard has the whole bias of 'wo' and
    of 'w_down', so the bias is added after the sum. The optional bias of 'wq' is 'bq', and so on.
    """

    def project(name: str, x):
        split = name in INPUT_SPLIT
        y = linear(x, p[name], reduce_max=reduce.max if split else ALONE.max)
        if adapters is not None:
            y = adapters(name, layer, x, y)
        if split:
            y = reduce.sum(y)
        bias = "b" + name.removeprefix("w")
        return y + p[bias] if bias in p else y

    return project


def over_layers(block: Callable, carry, layers):
    """Run `carry = block(carry, p, layer)` for each layer's parameters p. Returns the last carry.

    layers: a list with one dict of arrays per layer, over which Python loops; or one dict of arrays
        [L, ...] (`params.stack`), over which `lax.scan` loops. The scan compiles the block once,
        but copies each layer's weights before it multiplies by them. In both forms `layer` is a
        traced int32 scalar, and the block is traced once.
    """
    if isinstance(layers, list):
        block = jax.jit(block)
        for layer, p in enumerate(layers):
            carry = block(carry, p, jnp.int32(layer))
        return carry
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    numbers = jnp.arange(num_layers, dtype=jnp.int32)
    return jax.lax.scan(lambda c, x: (block(c, *x), None), carry, (layers, numbers))[0]


def logits(params, config: ModelConfig, hidden):
    """Next-token logits [T, V] in float32 from hidden states [T, E]."""
    head = params["embed" if config.tie_word_embeddings else "lm_head"]
    return linear(hidden, head, jnp.float32)
