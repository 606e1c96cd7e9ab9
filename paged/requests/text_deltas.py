"""The text of a sequence as its tokens arrive, in deltas that never change later."""

from collections.abc import Iterable

from paged.requests.stopping import TextStream


class TextDeltas:
    """Deltas that concatenate to a prefix of a sequence's final text, whatever tokens follow.

    Text that a later token could change, or that may begin a stop string, waits in the stream.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self._stream, self._stop = TextStream(tokenizer, ()), stop
        self._num_taken = 0  # characters

    def push(self, tokens: Iterable[int]) -> list[int]:
        """Add tokens. Returns each token's offset in the text, in characters; all tokens of one
        character have the character's offset."""
        offsets = []
        for token in tokens:
            offsets.append(len(self._stream.text))
            self._stream.push(token)
        return offsets

    def take(self) -> str:
        """The delta since the last call. None of the tokens so far may end the sequence."""
        text = self._stream.settled
        delta = text[self._num_taken : len(text) - self._stop_prefix(text)]
        self._num_taken += len(delta)
        return delta

    def rest(self, final_text: str) -> str:
        """The last delta of a sequence that has ended."""
        return final_text[self._num_taken :]

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(text) - at)
        return longest
