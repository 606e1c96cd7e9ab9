"""Pages of two or three precisions that a token reads, and attention over them, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.kv_cache.diffkv.page_selector import TopPages
from pallas_kernels.quantized_attention import (
    PageFormat,
    Tokens,
    mixed_precision_attention,
    parse_format,
)
from pallas_kernels.quantized_attention.tables import runs as runs_of
from tests.sweeps import swept

R, G, D, N, WIDTH = 3, 2, 8, 60, 12
TOP = TopPages(count=4, logical=3)
# Pages of each precision by row: many, as many as are read, and many of a streaming row.
PAGES: dict[int, list[tuple[int, ...]]] = {
    2: [(6, 3), (3, 1), (5, 4)],
    3: [(3, 4, 3), (2, 1, 1), (4, 2, 3)],
}
SELECTS = np.array([True, True, False])


def formats_of(levels: int) -> tuple[PageFormat, ...]:
    names = ("K16V16", "K8V8", "K4V4")[-levels:]
    parsed = [parse_format(name, D, "float16") for name in names]
    words = PageFormat.holding(4, *parsed[0]).words
    return tuple(PageFormat(*both, words=words) for both in parsed)


class Pool:
    """Pages with random tokens, written by the policy's own functions, and a record of them.

    pages: pages by row and precision.
    had: all keys that a page ever had, by page and logical page.
    """

    def __init__(self, levels: int, rng: np.random.Generator):
        self.formats = formats_of(levels)
        single = 4 if levels == 3 else 0
        self.runs = runs_of(levels, WIDTH + single, single)
        self.tables = rng.permutation(N)[: R * (WIDTH + single)].reshape(R, -1)
        self.words = jnp.zeros((N, self.formats[0].words), jnp.uint32)
        C = TOP.logical_pages(self.formats)
        self.extremes = jnp.full((N, C * 2 * D), 7.0, jnp.float32)  # left by former owners
        self.had: dict[int, list[list[np.ndarray]]] = {}
        self.pages: list[list[list[int]]] = []
        self.counts = np.zeros((R, levels), np.int32)
        for row, held in enumerate(PAGES[levels]):
            self.pages.append([])
            for level, (count, format) in enumerate(zip(held, self.formats)):
                self._fill(rng, row, level, count, format)

    def _fill(self, rng, row: int, level: int, count: int, format: PageFormat) -> None:
        P, run = format.tokens, self.runs[level]
        n = count * P - 2  # the last page is not full
        ids = self.tables[row, run.column(np.arange(count))]
        self.pages[row].append(ids.tolist())
        self.counts[row, level] = n
        keys = rng.normal(size=(n, D)).astype(np.float32)
        order = rng.permutation(n)  # tokens of a ring are not in the order of their places
        self._write(format, ids[order // P], order % P, keys[order], True)
        again = rng.permutation(n)[: n // 4 + 1]  # tokens whose places others take
        keys[again] = rng.normal(size=(len(again), D))
        self._write(format, ids[again // P], again % P, keys[again], False)

    def _write(self, format, page, at, keys, added) -> None:
        n = len(page)
        tokens = Tokens(jnp.asarray(keys), jnp.asarray(keys), jnp.zeros(n), jnp.zeros(n, jnp.int32))
        page, at = jnp.asarray(page, jnp.int32), jnp.asarray(at, jnp.int32)
        self.words = format.write(self.words, page, at, tokens)
        self.extremes = TOP.write(self.extremes, page, at, tokens.keys, added)
        C = TOP.logical_pages(self.formats)
        for one, place, key in zip(page.tolist(), at.tolist(), keys):
            self.had.setdefault(one, [[] for _ in range(C)])[place // TOP.logical].append(key)


@pytest.mark.slow
@pytest.mark.parametrize("levels", swept([3, 2], 1))
def test_pages_are_read_by_their_extremes(levels):
    rng = np.random.default_rng(levels)
    pool = Pool(levels, rng)
    q = rng.normal(size=(R, G, D)).astype(np.float32)
    newest = np.array([pages[0][1] for pages in pool.pages])
    read = TOP.read(
        jnp.asarray(q), pool.extremes, jnp.asarray(pool.tables), jnp.asarray(pool.counts),
        jnp.asarray(newest), jnp.asarray(SELECTS), pool.runs, pool.formats, "xla",
    )  # fmt: skip
    single = pool.runs[0].width if levels == 3 else 0
    out, lse, kept = mixed_precision_attention(
        jnp.asarray(q.reshape(R, G, D)), pool.words, read.tables[:, None], read.counts[:, None],
        pool.formats, single=single, implementation="reference",
    )  # fmt: skip
    of_held = read.of_held([x[:, 0] for x in kept])
    for row in range(R):
        pages = [page for of_level in pool.pages[row] for page in of_level]
        scores = {page: _score(q[row], pool.had[page]) for page in pages}
        best = sorted((p for p in pages if p != newest[row]), key=lambda p: -scores[p])
        chosen = {newest[row], *best[: TOP.count - 1]} if SELECTS[row] else set(pages)
        _check_row(pool, row, q[row], chosen, np.asarray(out)[row], of_held)


def _score(q, by_logical: list[list[np.ndarray]]) -> float:
    """The largest value of LServe's eq. 2 over all query heads and logical pages."""
    boxes = [(np.max(keys, 0), np.min(keys, 0)) for keys in by_logical if keys]
    return max(np.maximum(q * high, q * low).sum(1).max() for high, low in boxes)


def _check_row(pool: Pool, row: int, q, chosen, out, of_held) -> None:
    """Check that attention `out` [G, D] is over the tokens of the chosen pages, and that `of_held`
    has their scores at the places of these pages."""
    logits, values = [], []
    for level, format in enumerate(pool.formats):
        count, P = int(pool.counts[row, level]), format.tokens
        scores = np.asarray(of_held[level])[row]
        for number, page in enumerate(pool.pages[row][level]):
            held = min(P, count - number * P)
            if page not in chosen:
                assert (scores[number] == -np.inf).all()
                continue
            at = jnp.arange(held)
            stored = format.read_tokens(pool.words, jnp.full(held, page), at)
            expected = np.asarray(stored.keys) @ q.T * D**-0.5
            np.testing.assert_allclose(scores[number, :held], expected, atol=1e-4)
            logits.append(expected)
            values.append(np.asarray(stored.values))
    weights = np.asarray(jax.nn.softmax(np.concatenate(logits), axis=0))
    np.testing.assert_allclose(out, weights.T @ np.concatenate(values), atol=1e-4)
