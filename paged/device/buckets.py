"""The sizes to which steps are padded, so that few programs serve all steps."""

from dataclasses import dataclass

from paged.config import EngineConfig


def _steps(largest: int, smallest: int, linear_above: int) -> tuple[int, ...]:
    """Sizes up to `largest`: `smallest`, doubled to `linear_above`, then steps of it."""
    sizes, size = [], min(smallest, largest)
    while size < largest:
        sizes.append(size)
        size = size * 2 if size < linear_above else size + linear_above
    return (*sizes, largest)


@dataclass(frozen=True)
class Buckets:
    """The declared sizes of steps, each of which is compiled once.

    prefill: sizes of Tp.
    decode: sizes of Sd in steps without prefill.
    mixed: sizes of Sd in steps with prefill; few, because each is compiled for every size of Tp.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def declare(cls, config: EngineConfig) -> "Buckets":
        prefill = _steps(config.max_num_batched_tokens, smallest=64, linear_above=2048)
        decode = _steps(config.max_num_seqs, smallest=1, linear_above=128)
        return cls(prefill, decode, mixed=decode[::-3][::-1])

    def shapes(self) -> list[tuple[int, int]]:
        """All (Tp, Sd), the largest first."""
        mixed = [(tp, sd) for tp in self.prefill for sd in self.mixed]
        return sorted(mixed + [(0, sd) for sd in self.decode], reverse=True)

    def pick(self, num_prefill_tokens: int, num_decodes: int) -> tuple[int, int]:
        """The smallest declared (Tp, Sd) that holds a step."""
        if num_prefill_tokens == 0:
            return 0, _at_least(self.decode, num_decodes)
        return _at_least(self.prefill, num_prefill_tokens), _at_least(self.mixed, num_decodes)


def _at_least(sizes: tuple[int, ...], n: int) -> int:
    return next(size for size in sizes if size >= n)
