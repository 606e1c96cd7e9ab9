"""A pool of quantised pages, which attention and `write_kv` accept instead of an array."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.quantization.codes import Codes
from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantization.quantizer import dequantize, quantize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPages:
    """A pool of N quantised pages.

    words: [N, W] uint32, pages in the layout of pallas_kernels/quantization/format.py.
    """

    words: jax.Array
    format: KVFormat = field(metadata={"static": True})
    page_size: int = field(metadata={"static": True})

    @classmethod
    def zeros(cls, num_pages: int, page_size: int, format: KVFormat) -> "QuantizedPages":
        words = jnp.zeros((num_pages, format.page_words(page_size)), jnp.uint32)
        return cls(words, format, page_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, P, D), as if pages held plain elements."""
        return self.words.shape[0], self.page_size, self.format.head_dim

    @property
    def dtype(self):
        """The dtype of dequantised elements."""
        return jnp.dtype(jnp.float32)

    def read(self, rows) -> Codes:
        """The tokens [..., m * P] of m pages, from their words [..., m, W]."""
        codes, scales = self._sections(rows)
        codes = codes.reshape(*rows.shape[:-2], -1, self.format.code_words)
        scales = scales.reshape(*rows.shape[:-2], -1, self.format.scale_words)
        return Codes.unpacked(codes, scales, self.format)

    def values(self):
        """All elements, [N, P, D] float32."""
        N, P, _ = self.shape
        codes, scales = self._sections(self.words)
        codes, scales = codes.reshape(N, P, -1), scales.reshape(N, P, -1)
        return dequantize(codes, scales, self.format)

    def _sections(self, rows):
        return jnp.split(rows, [self.page_size * self.format.code_words], axis=-1)

    def write(self, x_TxKxD, slots_TxK) -> "QuantizedPages":
        """The pool with tokens written to `slots`, page * P + offset, as in `write_kv`."""
        C, g, P = self.format.code_words, self.format.scale_words, self.page_size
        codes, scales = quantize(x_TxKxD, self.format)
        slots = slots_TxK.reshape(-1)
        page, token = slots // P, slots % P
        words = put_words(self.words, page, token * C, codes.reshape(-1, C))
        if g:
            words = put_words(words, page, P * C + token * g, scales.reshape(-1, g))
        return replace(self, words=words)


def put_words(words_NxW, page, first, new):
    """The words [N, W] with `new` [n, w] at [page, first .. first + w - 1].

    page, first: [n] int32. Words for pages from N on are dropped. All (page, first) must be
        distinct, also for dropped words.
    """
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return jax.lax.scatter(
        words_NxW, jnp.stack([page, first], axis=-1), new, windows, unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )  # fmt: skip


def take_words(words_NxW, page, first: int, count: int):
    """Words [n, count] of the pages `page` [n] int32, from their word `first` on."""
    windows = jax.lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    starts = jnp.stack([page, jnp.full_like(page, first)], axis=-1)
    return jax.lax.gather(
        words_NxW, starts, windows, (1, count), mode=jax.lax.GatherScatterMode.CLIP
    )
