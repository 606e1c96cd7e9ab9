"""What an engine is configured by."""

from dataclasses import dataclass

from paged.kv_cache import POLICIES
from paged.kv_cache.policy import Capabilities


@dataclass(frozen=True)
class EngineConfig:
    """max_num_seqs: running sequences. max_num_batched_tokens: tokens of one step.
    max_prefills_per_step: sequences that prefill in one step. max_model_len: tokens of one
    sequence, prompt and output. chunked_prefill: whether a prompt may be spread over steps.
    page_size: tokens of a page. kv_cache_tokens: tokens that all pages hold. watermark: share of
    blocks that admission leaves free. policy: a key of `POLICIES`. run_ahead: dispatch a step
    before reading the last one's tokens. multi_step: tokens that steps without prompts compute for
    each sequence in one dispatch; ends are seen, and requests admitted, that much later.
    prefix_caching: keep full blocks for later prompts that begin alike. preemption_mode:
    'recompute', 'swap', or 'auto': swap groups of several sequences. admit_after_swap: whether new
    requests wait until swapped ones have 'completed' (vLLM §4.5) or only 'resumed'.
    tensor_parallel: devices that share the model's heads and MLP. seed: for requests that bring
    none.

    Raises ValueError for values that cannot work, alone or together.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefills_per_step: int = 8
    max_model_len: int = 2048
    chunked_prefill: bool = True
    page_size: int = 16
    kv_cache_tokens: int = 32_768
    watermark: float = 0.01
    policy: str = "vllm"
    run_ahead: bool = True
    multi_step: int = 1
    prefix_caching: bool = False
    preemption_mode: str = "auto"
    admit_after_swap: str = "completed"
    tensor_parallel: int = 1
    seed: int = 0

    def __post_init__(self):
        for name in (
            "max_num_seqs", "max_num_batched_tokens", "max_prefills_per_step", "multi_step",
            "tensor_parallel",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs a token a step"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least one page of "
                f"{self.page_size} tokens"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, not {self.seed}")
        if self.policy not in POLICIES:
            raise ValueError(
                f"unknown policy {self.policy!r}; allowed: {', '.join(sorted(POLICIES))}"
            )
        can = POLICIES[self.policy].CAPABILITIES
        if self.chunked_prefill and not can.chunked_prefill:
            raise ValueError(f"policy {self.policy!r} cannot prefill in chunks: chunked_prefill")
        if self.prefix_caching and not can.prefix_cache:
            raise ValueError(f"policy {self.policy!r} cannot share prefixes: prefix_caching")
        for name, allowed in (
            ("preemption_mode", ("auto", "recompute", "swap")),
            ("admit_after_swap", ("completed", "resumed")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )
        if self.preemption_mode == "swap" and not can.swap:
            raise ValueError(f"policy {self.policy!r} cannot swap a sequence: preemption_mode")
        if self.preemption_mode == "recompute" and not can.recompute_exact:
            raise ValueError(f"policy {self.policy!r} cannot recompute a sequence: preemption_mode")
        if not (can.recompute_exact or can.swap):
            raise ValueError(f"policy {self.policy!r} can neither recompute nor swap a sequence")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole sequence must fit a step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len})"
            )
        POLICIES[self.policy].host(self)  # raises ValueError for what only this policy cannot do

    @property
    def capabilities(self) -> Capabilities:
        return POLICIES[self.policy].CAPABILITIES

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the reserved null block included."""
        return self.kv_cache_tokens // self.page_size + 1
