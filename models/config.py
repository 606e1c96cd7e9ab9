"""Static description of a model."""

import dataclasses
from dataclasses import dataclass


def _check_size(name: str, size: int) -> None:
    # Positions, tokens and lengths are int32 on the device.
    if not 1 <= size < 2**31:
        raise ValueError(f"{name} must be at least 1 and below 2^31, not {size}")


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies for a context beyond the trained context.

    kind: 'linear' divides all frequencies by `factor`.
        'llama3' divides frequencies by `factor` if their wavelength exceeds
        `original_max_position_embeddings / low_freq_factor` positions, keeps frequencies with
        wavelengths below `original_max_position_embeddings / high_freq_factor` positions, and
        blends between.
        'longrope' divides frequency i by `factors[i]`, and multiplies cosines and sines by
        `factor`.

    Raises ValueError for an unknown kind, and for values out of range.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "longrope"):
            raise ValueError(f"rope scaling is 'linear', 'llama3' or 'longrope', not {self.kind!r}")
        if self.factor < 1:  # Angles overflow if the factor is far below 1.
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        _check_size("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclass(frozen=True)
class Attention:
    """Parameters of a model's attention. A KV policy may further limit the tokens that queries see.

    scale: multiplies q·k.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
    windows: for each layer the number of latest tokens that a query sees, itself included; None:
        all tokens.
    """

    scale: float
    soft_cap: float | None
    windows: tuple[int | None, ...]

    def within(self, tokens: int) -> "Attention":
        """This attention for sequences of at most `tokens` tokens. Windows of `tokens` or more
        become None."""
        windows = tuple(None if window and window >= tokens else window for window in self.windows)
        return dataclasses.replace(self, windows=windows)

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple(dict.fromkeys(self.windows))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a model: all differences between the members of a family.

    The Llama family (Llama 1/2/3, Mistral, Qwen2/2.5, Qwen3), Phi-3 and Gemma-2 have rotary
    positions, which `rope_theta` and `rope_scaling` describe.

    sliding_window: the number of tokens that a query sees, itself included; None: all tokens.
    full_layers: layers without the window.

    Only Gemma-2 sets these fields:

    query_scale: factor of q·k; None: head_dim ** -0.5.
    attention_cap, logits_cap: soft caps of scores and of logits.

    OPT and GPT-2 have learned positions. Only they set the last four fields:

    activation: the activation function of the MLP.
    norm_first: whether norms precede attention and MLP. Otherwise they follow the residual sums of
        attention and of the MLP.
    final_norm: whether a norm follows the last layer.
    embedding_size: width of the token embeddings; None: `hidden_size`.

    Raises ValueError for sizes that are not positive or do not fit together.
    """

    model_type: str = "llama"
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    activation: str = "silu"
    norm_first: bool = True
    final_norm: bool = True
    embedding_size: int | None = None

    def __post_init__(self):
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position_embeddings", "sliding_window",
            "embedding_size",
        ):  # fmt: skip
            size = getattr(self, field)
            if size is not None:
                _check_size(field, size)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2 and not self.learned_positions:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")

    @property
    def learned_positions(self) -> bool:
        return self.model_type in ("opt", "gpt2")

    @property
    def attention(self) -> Attention:
        """The attention that `attend` must compute in each layer."""
        layers = range(self.num_layers)
        windows = (None if i in self.full_layers else self.sliding_window for i in layers)
        scale = self.query_scale or self.head_dim**-0.5
        return Attention(scale, self.attention_cap, tuple(windows))

    @property
    def plain_attention(self) -> bool:
        """Whether the scale is the default, and no layer has a soft cap or a window."""
        return self.attention == Attention(self.head_dim**-0.5, None, (None,) * self.num_layers)

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
