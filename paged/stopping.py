"""When a sequence ends, and the text that it gives."""

import numpy as np
from tokenizers.decoders import DecodeStream


class StopChecker:
    """Finds ends by token for many slots at once."""

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int):
        self._is_eos = np.zeros(vocab_size, bool)
        self._is_eos[list(eos_token_ids)] = True

    def reasons(self, tokens, ignore_eos, known, limit) -> list[str | None]:
        """Why each sequence ends with its newest token, or None: all arguments [S]."""
        invalid = tokens < 0
        eos = self._is_eos[np.maximum(tokens, 0)] & ~ignore_eos
        length = known >= limit
        kinds = np.select([invalid, eos, length], [3, 2, 1], 0)
        names = (None, "length", "eos", "error")
        return [names[k] for k in kinds.tolist()]


class TextStream:
    """Text of one sequence as its tokens come, and the search for stop strings in it."""

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self.text = ""

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is now complete: `text` is cut before it."""
        piece = self._decoder.step(self._backend, token)
        if not piece:
            return False
        # A stop string can only end in the new piece.
        longest = max(map(len, self._stop), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
