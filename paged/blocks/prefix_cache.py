"""Automatic prefix caching: full blocks are found again by their tokens.

The key of a block is a hash of its own tokens and of the key of the block before it. The block's
own tokens are compared as well. A block is published once its tokens are confirmed. A published
block without owners stays until its memory is needed; the least recently used is evicted first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np


def chain(tokens: np.ndarray, page_size: int, key: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The (key, content) of each full block of `tokens`, which follow a prefix with key `key`."""
    data, size = tokens.tobytes(), page_size * tokens.itemsize
    for end in range(size, len(data) + 1, size):
        content = data[end - size : end]
        key = hashlib.blake2b(key + content, digest_size=16).digest()
        yield key, content


def root_key(*parts: str) -> bytes:
    """The key of the empty prefix. Sequences share blocks only if they have equal parts: the salt,
    and the name and content hash of the adapter, if any."""
    data = b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in parts)
    return hashlib.blake2b(data, digest_size=16).digest()


class PrefixCache:
    """Maps prefixes to blocks. The block pool owns the blocks' memory.

    A pinned prefix may end in the middle of a block. Such a tail is found by the key of the full
    block before it, and a sequence that continues it copies the block (vLLM §4.4).

    idle: the published blocks without owners, the least recently used first.
    """

    def __init__(self):
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, tuple[bytes, bytes]] = {}
        self._tails: dict[bytes, list[tuple[bytes, int]]] = {}

    def __contains__(self, block: int) -> bool:
        """Whether `block` is published, and so kept once its last owner releases it."""
        return block in self._entries

    def find(self, links: Iterable[tuple[bytes, bytes]]) -> tuple[list[int], bytes | None]:
        """The longest run of published blocks along the `chain` of a prompt, and the key of its
        last block (None if there is no block)."""
        blocks, last = [], None
        for key, content in links:
            block = self._blocks.get(key)
            if block is None or self._entries[block][1] != content:
                break
            blocks.append(block)
            last = key
        return blocks, last

    def find_tail(self, key: bytes, content: bytes) -> tuple[int, int] | None:
        """The longest pinned tail after `key` that starts `content`: (block, length in bytes)."""
        fits = [t for t in self._tails.get(key, ()) if content.startswith(t[0])]
        return max(((block, len(tail)) for tail, block in fits), key=lambda t: t[1], default=None)

    def pin_tail(self, key: bytes, content: bytes, block: int) -> None:
        self._tails.setdefault(key, []).append((content, block))

    def publish(self, block: int, key: bytes, content: bytes) -> None:
        """Let other sequences find `block`, unless the cache has a block with the same key."""
        if key not in self._blocks:
            assert block not in self._entries, f"block {block} is published twice"
            self._blocks[key] = block
            self._entries[block] = key, content

    def evict(self) -> int:
        """Forget the least recently used idle block and return it."""
        block, _ = self.idle.popitem(last=False)
        key, _ = self._entries.pop(block)
        del self._blocks[key]
        return block
