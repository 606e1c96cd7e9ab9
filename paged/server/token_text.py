"""The text of single tokens, and of a choice as its tokens come."""

import functools
from collections.abc import Sequence

from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceOutput
from paged.requests.stopping import TextStream, decode

# Byte-level vocabularies spell the bytes that cannot be printed in letters from U+0100 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class TokenTexts:
    """What each token of a vocabulary stands for, by itself."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._added = {i: token.content for i, token in added}
        self.special = {token.content: i for i, token in added if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self.bytes = functools.lru_cache(maxsize=2**16)(self._bytes)

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer, ())

    def prompt_offsets(self, prompt: str | list[int], special: bool) -> list[int]:
        """For each token of a prompt where it begins in the given text. special: whether the
        tokenizer adds special tokens to a text."""
        if isinstance(prompt, list):
            return offsets(self.stream(), prompt)
        spans = self._tokenizer(
            prompt, add_special_tokens=special, return_offsets_mapping=True
        )["offset_mapping"]  # fmt: skip
        begun, end = [], 0
        for start, stop in spans:
            # An added token covers no characters; a word's span may lack the space before it.
            begun.append(end if start == stop else min(start, end))
            end = max(end, stop)
        return begun

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # models may have more tokens than their tokenizer
            return b""
        if self._byte_level and all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if piece.startswith("▁"):  # whose space would be lost at the beginning of a text
            return piece.replace("▁", " ").encode()
        return decode(self._tokenizer, [token]).encode()

    def text(self, token: int, mark: str = "") -> str:
        """As OpenAI writes it: bytes that are no whole characters as `\\xf0\\x9f`, after `mark`."""
        spelt = self.bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return mark + repr(spelt)[2:-1]


def offsets(stream: TextStream, tokens: Sequence[int]) -> list[int]:
    """For each token the number of characters before it; tokens of one character begin where it
    does. Pushes the tokens to the stream."""
    begun = []
    for token in tokens:
        begun.append(len(stream.text))
        stream.push(token)
    return begun


class ChoiceText:
    """What of a choice's text can be told while its tokens come: what no later token takes back,
    and no stop string may yet cut off. All that was told is how the final text begins."""

    def __init__(self, tokenizer, how: SamplingParams):
        self._stream, self._stop = TextStream(tokenizer, how.stop), how.stop
        self._told = 0  # characters

    def grow(self, tokens: list[int]) -> str:
        """What is new with these tokens, none of which ends the choice."""
        for token in tokens:
            self._stream.push(token)
        text = self._stream.settled
        text = text[: len(text) - self._begun(text)]
        new = text[self._told :]
        self._told += len(new)
        return new

    def _begun(self, text: str) -> int:
        """Characters at the end with which a stop string may begin."""
        longest = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(text) - at)
        return longest

    def finish(self, output: SequenceOutput) -> str:
        """The rest of the final text."""
        return output.text[self._told :]
