"""A model that is small enough to compile and run in tests; its parameters are random."""

from models.config import ModelConfig

TINY = ModelConfig(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=256, qk_norm=True,
    eos_token_ids=(2,),
)  # fmt: skip
