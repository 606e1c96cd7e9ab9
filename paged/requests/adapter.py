"""A LoRA adapter on the host, without its weights."""

from dataclasses import dataclass

from models.lora import num_pages


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter: its name, folder and content.

    content_hash: SHA-256 of the folder's content, in hex.

    An engine has one object for each name and content, so that adapters are compared by identity.
    Only `folder` may change.
    """

    name: str
    folder: str
    content_hash: str
    rank: int

    @property
    def num_pages(self) -> int:
        """Rank pages that the adapter takes on the device."""
        return num_pages(self.rank)
