"""An adapter as the host knows it."""

from dataclasses import dataclass

from models.lora import num_pages


@dataclass(eq=False)
class Adapter:
    """Its name, what it holds, and where it lies on the disk.

    content_hash: SHA-256 of the folder's content, in hex. An engine has one object for each name
    and content, so that adapters are compared by identity; only its folder may change.
    """

    name: str
    folder: str
    content_hash: str
    rank: int

    @property
    def num_pages(self) -> int:
        """Rank pages that it takes on the device."""
        return num_pages(self.rank)
