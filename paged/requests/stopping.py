"""The ends of sequences, and the text of their tokens."""

import codecs
import functools
import itertools
from dataclasses import dataclass, field

import numpy as np

REPLACEMENT = "\ufffd"  # The result of decoding bytes that form no character.
# Number of pieces of text that are decoded again with the next piece. A character has at most 4
# bytes, so the last 3 pieces may be unfinished, and the 3 before may begin inside a character.
WINDOW = 8


class StopChecker:
    """Finds the sequences that end with their newest token, for many slots at once.

    Raises ValueError for an end of sequence outside the vocabulary.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int):
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"eos token {token} is outside the vocabulary of {vocab_size}")
        # The last entry is for INVALID_TOKEN, which is -1.
        self._ends = np.zeros(vocab_size + 1, bool)
        self._ends[[*eos_token_ids, -1]] = True

    def ended(self, tokens, ignore_eos, known, limit) -> dict[int, str]:
        """Finish reasons of sequences that end with their newest token, by row. All arguments are
        [S]."""
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
    """The text of token ids, without special tokens and with its spaces unchanged."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def final_text(tokenizer, tokens, stop: tuple[str, ...]) -> str:
    """The text of a sequence that has ended: `decode`, cut before the first stop string."""
    text = decode(tokenizer, tokens)
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """The text of one sequence as its tokens arrive, searched for stop strings.

    `text` is `decode` of all tokens so far, without an unfinished character at the end. A character
    of several tokens appears with its last token. A U+FFFD at the end may be an unfinished
    character, so it appears with the next token. When the sequence ends, `final_text` has the whole
    text.

    So the text only grows, with one exception. A tokenizer that falls back to bytes decodes a row
    of byte tokens as characters only if the whole row is UTF-8, and otherwise as one U+FFFD for
    each byte. So a bad byte replaces the characters of its row.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self._tokenizer, self._stop = tokenizer, stop
        self._skipped, self._byte_of = _vocabulary(tokenizer)
        self._decoded = ""  # `text`, with an unfinished character at its end.
        # The last pieces of text. A piece is a token, or the byte tokens of one character. The text
        # of a token can depend on the tokens before it, so all are decoded together.
        self._window: list[list[int]] = []
        self._known = 0  # Number of characters of the window's text that are in `text`.
        self._row: _ByteRow | None = None

    @property
    def text(self) -> str:
        return self._decoded.removesuffix(REPLACEMENT)

    @property
    def settled(self) -> str:
        """The part of `text` that no later token replaces."""
        return self.text if self._row is None else self.text[: self._row.start]

    def push(self, token: int) -> bool:
        """Add a token. Returns whether `text` holds a new stop string."""
        if token in self._skipped:
            return False
        changed = len(self.text) if self._row is None else min(self._row.start, len(self.text))
        if token in self._byte_of:
            self._push_byte(token)
        else:
            self._end_row()
            self._push_piece([token])
        longest = max(map(len, self._stop), default=0)
        return any(self.text.find(s, max(0, changed - longest + 1)) >= 0 for s in self._stop)

    def _push_piece(self, tokens: list[int]) -> None:
        self._window.append(tokens)
        now = self._decode_window()
        self._decoded = self.text + now[self._known :]
        self._known = len(now.removesuffix(REPLACEMENT))
        if len(self._window) >= 2 * WINDOW:
            del self._window[:WINDOW]
            self._known -= len(now) - len(self._decode_window())

    def _push_byte(self, token: int) -> None:
        row = self._row = self._row or _ByteRow(start=len(self._decoded))
        row.length += 1
        if row.is_utf8:
            row.unfinished.append(token)
            try:
                finished = row.decoder.decode(self._byte_of[token])
            except UnicodeDecodeError:
                row.is_utf8 = False
            else:
                if finished:
                    self._push_piece(row.unfinished)
                    row.unfinished = []
        if not row.is_utf8:
            self._take_back(row)

    def _end_row(self) -> None:
        row, self._row = self._row, None
        if row is not None and row.unfinished:
            self._take_back(row)
            self._window.append(row.unfinished)
            self._known = len(self._decode_window().removesuffix(REPLACEMENT))

    def _take_back(self, row: "_ByteRow") -> None:
        self._decoded = self._decoded[: row.start] + REPLACEMENT * row.length

    def _decode_window(self) -> str:
        return decode(self._tokenizer, list(itertools.chain(*self._window)))


@dataclass
class _ByteRow:
    """Byte tokens that follow each other, from character `start` of the text."""

    start: int
    length: int = 0
    is_utf8: bool = True  # Whether all bytes so far are UTF-8.
    unfinished: list[int] = field(default_factory=list)  # The bytes after the last whole character.
    decoder: codecs.IncrementalDecoder = field(
        default_factory=codecs.getincrementaldecoder("utf-8")
    )


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer) -> tuple[frozenset[int], dict[int, bytes]]:
    """The tokens that `decode` skips, and the byte of each token that stands for one byte."""
    added = tokenizer.added_tokens_decoder.items()
    skipped = frozenset(i for i, token in added if token.special)
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    byte_of = {i: bytes([byte]) for byte, i in enumerate(ids) if i not in skipped | {None}}
    e_acute = [i for byte in "é".encode() if (i := ids[byte]) in byte_of]
    return skipped, byte_of if decode(tokenizer, e_acute) == "é" else {}
