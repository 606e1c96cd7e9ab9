"""When a sequence ends, and the text that it gives."""

import numpy as np


class StopChecker:
    """Finds ends by token for many slots at once. Raises ValueError for an end that is no token."""

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int):
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"eos token {token} is outside the vocabulary of {vocab_size}")
        # One more at the end, where INVALID_TOKEN, -1, finds it.
        self._ends = np.zeros(vocab_size + 1, bool)
        self._ends[[*eos_token_ids, -1]] = True

    def ended(self, tokens, ignore_eos, known, limit) -> dict[int, str]:
        """row -> why its sequence ends with its newest token; all arguments are [S]."""
        reasons = {}
        for row in np.flatnonzero(self._ends[tokens] | (known >= limit)).tolist():
            if tokens[row] < 0:
                reasons[row] = "error"
            elif self._ends[tokens[row]] and not ignore_eos[row]:
                reasons[row] = "eos"
            elif known[row] >= limit[row]:
                reasons[row] = "length"
        return reasons


def decode(tokenizer, tokens) -> str:
    """Text of token ids as the model wrote it: without special tokens, its spaces untouched."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Text of one sequence as its tokens come, and the search for stop strings in it.

    A token's text can depend on its neighbours, and a character can take several tokens: a new
    piece is what a window of recent tokens decodes to beyond what it did before, once it ends in a
    whole character.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._window, self._done = 0, 0  # first token of the window, tokens whose text is known
        self.text = ""

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is now complete: `text` is cut before it."""
        self._tokens.append(token)
        before = decode(self._tokenizer, self._tokens[self._window : self._done])
        now = decode(self._tokenizer, self._tokens[self._window :])
        if len(now) <= len(before) or now.endswith("�"):
            return False
        # A stop string can only end in the new piece.
        longest = max(map(len, self._stop), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += now[len(before) :]
        self._window, self._done = self._done, len(self._tokens)
        found = [at for s in self._stop if (at := self.text.find(s, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
