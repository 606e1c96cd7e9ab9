"""Recorded compression of a real model, for simulation: tokens kept by KV head and length.

A file has the tokens of each KV head in high and in low precision, for each recorded pair of
thresholds, as means over several sequences:

    prompt      right after prompts of `lengths` tokens
    generated   in sequences of `lengths` tokens, generated from a short beginning

`python -m experiments.papers.diffkv.record_compression` writes such a file.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paged.kv_cache import made_for
from paged.kv_cache.diffkv.options import Options

ROUNDING = 1e-6  # tolerance for sums of rounded token counts


@dataclass(frozen=True)
class Recording:
    """Kept tokens for every length. Sequences of up to `window` tokens are kept whole in high
    precision. Between recorded lengths, token counts are interpolated. Above N tokens, heads keep
    the same share of tokens as at N tokens.

    prompt, generated: [N + 1, L, K, 2] number of tokens that a head keeps of 0 … N tokens, in both
        precisions together and in low precision.
    """

    prompt: np.ndarray
    generated: np.ndarray

    @classmethod
    def read(cls, path: str | Path, options: Options) -> "Recording":
        """The recording for the options' thresholds. Raises ValueError if these thresholds were not
        recorded, if another option differs from the recorded one, or if the file cannot be read or
        is invalid."""
        return made_for.read(str(path), lambda text: cls._parsed(text, options))

    @classmethod
    def _parsed(cls, text: str, options: Options) -> "Recording":
        try:
            stored = json.loads(text)
            found = {(each["alpha_h"], each["alpha_l"]): each for each in stored["recorded"]}
            recorded = dict(stored["options"])
            wanted = options.alpha_h, options.alpha_l
            if wanted not in found:
                raise ValueError(
                    f"the recorded alpha_h and alpha_l are {list(found)}, not {wanted}"
                )
            for name, value in recorded.items():
                if value != getattr(options, name):
                    raise ValueError(f"{name} is {value!r}, not {getattr(options, name)!r}")
            of_alpha = found[wanted]
            return cls.of(stored["lengths"], of_alpha["prompt"], of_alpha["generated"], options)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"is no recorded compression: {error!r}") from error

    @classmethod
    def of(cls, lengths, prompt, generated, options: Options) -> "Recording":
        """lengths: [n]. prompt, generated: [n, L, K, 2] tokens in high and in low precision.

        Raises ValueError for impossible token counts: a head's total must grow by at most one for
        each generated token, and neither the total nor low precision may shrink."""
        W = options.window
        grid = np.array([0, W, *lengths], float)
        if (np.diff(grid) <= 0).any():
            raise ValueError(f"lengths must ascend from above the window ({W}): {lengths}")
        curves = []
        for kept in (prompt, generated):
            high, low = np.moveaxis(np.array(kept, float), -1, 0)
            most = grid[2:, None, None] + ROUNDING
            if not ((high >= 0) & (low >= 0) & (high + low <= most)).all():
                raise ValueError("a head keeps from none to all tokens of a sequence")
            begin = np.stack([np.zeros_like(high[0]), np.full_like(high[0], W)])
            total = np.concatenate([begin, high + low])
            curves.append(np.stack([total, np.concatenate([0 * begin, low])], -1))
        grown = np.diff(curves[1], axis=0) / np.diff(grid)[:, None, None, None]
        if (grown < 0).any() or (grown[..., 0] > 1 + ROUNDING).any():
            raise ValueError(
                "for each generated token, a head's kept tokens must grow by 0 to 1, in all and "
                "in low precision"
            )
        tokens = np.arange(grid[-1] + 1)
        after = np.clip(np.searchsorted(grid, tokens), 1, len(grid) - 1)
        before = after - 1
        share = ((tokens - grid[before]) / (grid[after] - grid[before]))[:, None, None, None]
        return cls(*(x[before] + share * (x[after] - x[before]) for x in curves))

    def classes(self, layers: int, heads: int, streams: np.ndarray | None) -> np.ndarray:
        """[L * K] number of heads of a model that use each recorded head. A layer uses the recorded
        layer of the same relative depth; its heads use that layer's heads in turn.

        layers, heads: layers of the model, and KV heads of each.
        streams: [layers * heads] bool, streaming heads, which use no recorded head; None if no head
            streams."""
        L, K = self.prompt.shape[1:3]
        number = np.arange(layers * heads)
        recorded = (number // heads * L // layers) * K + number % K
        return np.bincount(recorded if streams is None else recorded[~streams], minlength=L * K)

    def tokens(self, prompts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[r, L * K, 2] tokens that heads keep in high and in low precision, of sequences with
        `prompts` [r] prompt tokens and `ends` [r] tokens in total. A generated token adds the same
        number of tokens as in the recorded generation at this length."""
        kept = self._at(self.prompt, prompts)
        kept = kept + self._at(self.generated, ends) - self._at(self.generated, prompts)
        # Rounded so that one more token adds at most one, to one precision.
        total, low = np.moveaxis(np.floor(kept + 1e-6).astype(np.int64), -1, 0)
        low = np.minimum(low, total)
        return np.stack([total - low, low], -1)

    def _at(self, curve: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[r, L * K, 2] values of `curve` at `tokens` [r]."""
        longest = len(curve) - 1
        found = curve.reshape(longest + 1, -1, 2)[np.minimum(tokens, longest)]
        return found * np.maximum(tokens / longest, 1)[:, None, None]
