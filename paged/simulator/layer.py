"""The ops of a layer, of the logits' head and of adapters, as one shard computes them."""

from models.config import ModelConfig
from paged.kv_cache.policy import ShardedModel
from paged.simulator.cost_model import CostModel, Elements, Op, Product, Rows
from pallas_kernels.lora import PAGE_RANKS

ITEMSIZE = 2  # bytes of a number in activations, and in weights that are not quantised


def layer_ops(model: ShardedModel, tokens, bits: int = 16, weight_bits: int = 16) -> dict[str, Op]:
    """All ops of a layer, without attention and all-reduces.

    tokens: T, an int or an array.
    bits: bits of the operands of products: 16, or 8 for W8A8, which quantises activations by row
        before each product.
    weight_bits: bits of weights in memory, if fewer.

    Norms read their rows twice; gated MLPs compute gate and up in one product.
    """
    T, shard = tokens, model.shard
    E, F, D = shard.hidden_size, shard.intermediate_size, shard.head_dim
    H, K, gated = shard.num_heads, shard.num_kv_heads, not shard.learned_positions
    norm, add = Rows(T, 3 * ITEMSIZE * E), Elements(3 * ITEMSIZE * T * E)
    ops: dict[str, Op] = {
        "attention_norm": norm,
        "qkv": Product(T, E, (H + 2 * K) * D, bits, weight_bits),
    }
    if gated:
        ops["rope"] = Rows(T, 2 * ITEMSIZE * (H + K) * D)
    ops["o"] = Product(T, H * D, E, bits, weight_bits)
    ops |= {"attention_add": add, "mlp_norm": norm}
    ops["mlp_up"] = Product(T, E, (1 + gated) * F, bits, weight_bits)
    ops["activation"] = Rows(T, (2 + gated) * ITEMSIZE * F)
    ops |= {"mlp_down": Product(T, F, E, bits, weight_bits), "mlp_add": add}
    if bits == 8:
        quantised = {name: op for name, op in ops.items() if isinstance(op, Product)}
        ops |= {f"quantise_{name}": Rows(T, 3 * op.k) for name, op in quantised.items()}
    return ops


def head_ops(model: ShardedModel, tokens: int, sampled: int) -> dict[str, Op]:
    """Ops before and after the layers: the embedding of `tokens` tokens, and the final norm and
    logits of `sampled` tokens. These ops are not quantised. Shards split the vocabulary."""
    E, V = model.shard.hidden_size, model.shard.vocab_size
    return {
        "embed": Rows(tokens, 2 * ITEMSIZE * E),
        "final_norm": Rows(sampled, 3 * ITEMSIZE * E),
        "logits": Product(sampled, E, -(-V // model.num_shards)),
    }


def projections(model: ShardedModel) -> list[tuple[int, int]]:
    """(in, out) of each adapted projection of a shard: q, k, v, o, then the MLP's projections."""
    shard: ModelConfig = model.shard
    E, F, D = shard.hidden_size, shard.intermediate_size, shard.head_dim
    H, K, gated = shard.num_heads, shard.num_kv_heads, not shard.learned_positions
    return [(E, H * D), (E, K * D), (E, K * D), (H * D, E), *[(E, F)] * (1 + gated), (F, E)]


def adapter_page_bytes(model: ShardedModel) -> int:
    """Bytes of `PAGE_RANKS` ranks of all projections of all layers, on a shard."""
    widths = sum(fan_in + fan_out for fan_in, fan_out in projections(model))
    return model.shard.num_layers * PAGE_RANKS * widths * ITEMSIZE


def adapters_s(costs: CostModel, model: ShardedModel, pages: int, tokens: int) -> float:
    """Seconds of SGMV in one layer: a shrink and an expand launch for each projection (Punica §4).

    pages: rank pages of all distinct adapters in the step.
    tokens: tokens with an adapter.
    """
    of_ranks = PAGE_RANKS * ITEMSIZE
    seconds = 0.0
    for fan_in, fan_out in projections(model):
        ranks = tokens * of_ranks  # bytes between the two launches, if an adapter has one page
        seconds += costs.launch_s(pages * of_ranks * fan_in + tokens * ITEMSIZE * fan_in + ranks)
        expanded = 2 * tokens * ITEMSIZE * fan_out + ranks
        seconds += costs.launch_s(pages * of_ranks * fan_out + expanded)
    return seconds
