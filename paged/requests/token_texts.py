"""The texts of single tokens, and the offsets of a prompt's tokens in its text."""

import functools

from paged.requests.stopping import decode
from paged.requests.text_deltas import TextDeltas

# Byte-level vocabularies spell unprintable bytes as letters from U+0100 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class TokenTexts:
    """The text and the bytes of single tokens of a vocabulary.

    special: special token ids by their text.
    bytes: token id -> bytes.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._added = {i: token.content for i, token in added}
        self.special = {token.content: i for i, token in added if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self.bytes = functools.lru_cache(maxsize=2**16)(self._bytes)

    def prompt_offsets(self, prompt: str | list[int], special: bool) -> list[int]:
        """The number of characters before each token of a prompt.

        special: whether the tokenizer adds special tokens to a text.
        """
        if isinstance(prompt, list):
            return TextDeltas(self._tokenizer).push(prompt)
        spans = self._tokenizer(
            prompt, add_special_tokens=special, return_offsets_mapping=True
        )["offset_mapping"]  # fmt: skip
        offsets, end = [], 0
        for start, stop in spans:
            # Tokens like BOS cover no text; a word's span may lack the space before it.
            offsets.append(end if start == stop else min(start, end))
            end = max(end, stop)
        return offsets

    def text(self, token: int, mark: str = "") -> str:
        """A token in OpenAI's spelling: a partial character is `mark` and `\\xf0\\x9f`."""
        spelt = self.bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return mark + repr(spelt)[2:-1]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # Models may have more tokens than their tokenizer.
            return b""
        if self._byte_level and all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if piece.startswith("▁"):  # `decode` drops the first space of a text.
            return piece.replace("▁", " ").encode()
        return decode(self._tokenizer, [token]).encode()
