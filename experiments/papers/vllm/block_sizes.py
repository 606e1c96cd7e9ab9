"""Engines that differ only in their block size, and curves over it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from paged.engine import Engine, EngineConfig


@dataclass(frozen=True)
class SizeFlags(ModelFlags):
    block_sizes: tuple[int, ...] = flag(
        tuple(2**i for i in range(9)), "tokens of a KV block, each a case", least=1
    )
    kv_cache_tokens: int = flag(1024, "tokens that all KV blocks hold", least=1)
    max_model_len: int = flag(640, "longest sequence in tokens", least=2)
    max_num_seqs: int = flag(4, "sequences that run at once", least=1)
    max_num_batched_tokens: int = flag(512, "most tokens of one step", least=1)
    seed: int = flag(0, "of the blocks' places", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("block_sizes")
        for size in self.block_sizes:
            if -(-self.max_model_len // size) > self.kv_cache_tokens // size:
                raise ValueError(
                    f"kv_cache_tokens ({self.kv_cache_tokens}) in whole blocks of {size} must hold "
                    f"max_model_len ({self.max_model_len})"
                )

    def config(self, block_size: int) -> EngineConfig:
        """Raises ValueError for what cannot work."""
        return EngineConfig(
            page_size=block_size, max_prefills_per_step=min(4, self.max_num_seqs), seed=self.seed,
            kv_cache_tokens=self.kv_cache_tokens, max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
        )  # fmt: skip


def check(flags: SizeFlags) -> None:
    for size in flags.block_sizes:
        flags.config(size)


def engines(flags: SizeFlags) -> Iterator[Engine]:
    """An engine of each block size, the smallest first, warmed up."""
    for size in sorted(set(flags.block_sizes)):
        engine = load_engine(flags.config(size), **loading(flags))
        engine.warm_up(progress=False)
        yield engine


def over_block_sizes(
    axes: Axes, sizes: Sequence[int], curves: Mapping[str, Sequence[float]], ylabel: str
) -> None:
    """Draw curves over the block size, on the scale of the paper's figures."""
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="block size (tokens)", ylabel=ylabel, ylim=(0, None))
    axes.legend(frameon=False)
