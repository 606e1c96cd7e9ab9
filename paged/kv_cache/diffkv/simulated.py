"""The simulated device half: pages and reports, computed from token counts alone.

Streaming heads, the residual (KIVI), budgets (H2O, SnapKV) and thresholds of 0 (uniform formats)
follow a formula. Other thresholds follow a `Recording`; without one, no token is compressed.
"""

import numpy as np

from paged.kv_cache.diffkv.host import PAGES
from paged.kv_cache.diffkv.layout import layout_of
from paged.kv_cache.diffkv.options import Options
from paged.kv_cache.diffkv.recording import Recording
from paged.kv_cache.moves import Moves, Pairs
from paged.kv_cache.policy import CacheConfig, ShardedModel


class SimulatedPages:
    """The simulated pages of a shard. Heads of a class keep equal numbers of tokens. The last class
    has the streaming heads.

    prompts: [num_slots] computed prompt tokens of each slot.
    ends: [num_slots] all computed tokens of each slot.
    """

    def __init__(self, config: CacheConfig, model: ShardedModel, recorded: str = ""):
        """recorded: path of a `Recording`, or "". Raises ValueError if the file does not match the
        options."""
        self._layout, self._options = layout_of(config, model), config.policy_options
        layout, options = self._layout, self._options
        self._known = np.zeros((2, layout.num_slots), np.int64)
        self.prompts, self.ends = self._known
        self._swapped: dict[int, np.ndarray] = {}
        fixed = options.budget or layout.residual
        by_scores = not fixed and max(level.alpha for level in options.levels) > 0
        self._recording = None
        if recorded and by_scores:
            if layout.levels != 2:
                raise ValueError("compression is recorded in two precisions, not with --diffkv_top")
            self._recording = Recording.read(recorded, options)
        # Simulate the shard with the fewest streaming heads.
        streams = np.array(min(layout.streaming.by_shard, key=sum)) if layout.streaming else None
        num_streaming = 0 if streams is None else int(streams.sum())
        of_class = np.array([layout.all_heads - num_streaming])
        if self._recording:
            of_class = self._recording.classes(layout.layers, layout.heads, streams)
        self._heads = np.append(of_class, num_streaming)  # [C] heads of each class
        self._kept = np.zeros((layout.num_slots, len(self._heads), layout.levels), np.int64)

    def move(self, moves: Moves) -> None:
        for slot, key in moves.slot_exports:
            self._swapped[key] = self._known[:, slot].copy()
        self._known[:, moves.released] = 0
        for key, slot in moves.slot_imports:
            self._known[:, slot] = self._swapped.pop(key)
        for key in moves.dropped:
            self._swapped.pop(key, None)
        self._update([*moves.released, *(slot for _, slot in moves.slot_imports)])
        self._copy(moves.slot_copies)

    def move_after(self, moves: Moves) -> None:
        self._copy(moves.after)

    def _copy(self, pairs: Pairs) -> None:
        for parent, child in pairs:
            self._known[:, child] = self._known[:, parent]
        self._update([child for _, child in pairs])

    def compute(self, slots: np.ndarray, ends: np.ndarray, are_prompts: np.ndarray) -> None:
        self.prompts[slots] = np.where(are_prompts, ends, self.prompts[slots])
        self.ends[slots] = ends
        self._update(slots)

    def report(self) -> dict[str, np.ndarray]:
        layout, heads, kept = self._layout, self._heads, self._kept
        pages = layout.pages_of(kept)
        streams = np.arange(len(heads)) == len(heads) - 1
        needs = layout.needs(kept, pages[..., 0], streams)
        held = (heads @ pages.sum(-1)[..., None])[None, :, 0]
        free = layout.num_pages - held.sum(1, keepdims=True)
        needs = np.einsum("c,scj->sj", heads, needs)[None]
        return {"free": free, "held": held, "needs": needs, "kept": self._all(kept)[None]}

    def copied(self, pairs: Pairs) -> dict[str, int]:
        """Each page has one owner, so a fork copies all pages of its parent."""
        held = self.report()["held"][0]
        return {PAGES: int(held[[parent for parent, _ in pairs]].sum())}

    def kept(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        prompts = np.broadcast_to(self.prompts[slots], ends.shape)
        kept = self._all(self._kept_of(prompts.reshape(-1), ends.reshape(-1)))
        return kept.reshape(*ends.shape, -1) / self._layout.all_heads

    def _all(self, kept: np.ndarray) -> np.ndarray:
        """[n, I] tokens, summed over all heads."""
        return np.einsum("c,sci->si", self._heads, kept)

    def _update(self, slots: np.ndarray | list[int]) -> None:
        """Recompute the kept tokens of `slots`, whose token counts have changed."""
        if len(slots):
            self._kept[slots] = self._kept_of(self.prompts[slots], self.ends[slots])

    def _kept_of(self, prompts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[n, C, I] tokens in a head of each class, for sequences of `ends` [n] tokens."""
        kept = np.zeros((len(ends), *self._kept.shape[1:]), np.int64)
        if self._recording:
            kept[:, :-1] = self._recording.tokens(prompts, ends)
        elif self._layout.residual:
            kept[:, 0] = np.stack(self._layout.residual.split(ends), -1)
        else:
            kept[:, 0, 0] = kept_by_budget(self._options, prompts, ends)
        kept[:, -1, 0] = self._layout.in_window(ends)
        return kept


def kept_by_budget(options: Options, prompts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[n] tokens that a head keeps of sequences with `prompts` [n] prompt tokens and `ends` [n]
    tokens in total. Without a budget, a head keeps all tokens. See `compression`."""
    if not options.budget:
        return ends

    def budget(tokens):
        of = np.float32(options.budget)
        return np.ceil(of * tokens if options.budget <= 1 else of + 0 * tokens).astype(np.int64)

    h2o = options.generation_rule == "h2o"
    least = np.maximum(budget(prompts) // 2, 2) if h2o else options.window
    of_prompt = np.minimum(prompts, np.maximum(budget(prompts), least))
    if not h2o:
        return of_prompt + ends - prompts
    return np.maximum(of_prompt, np.minimum(of_prompt + ends - prompts, budget(ends)))
