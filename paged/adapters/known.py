"""The adapters that requests may name."""

from pathlib import Path

from models import peft
from models.config import ModelConfig
from paged.checks import is_text, refusal, shown
from paged.config import EngineConfig
from paged.requests.adapter import Adapter

MOST_SHOWN = 10  # adapters that an error message names


class KnownAdapters:
    """Adapters by name. `add` can give a name new content, which later requests get.

    by_content: every adapter that was ever added, by name and content hash.
    dtype: dtype of served adapters. `read` refuses weights that are not finite in this dtype.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, dtype: str = "float32"):
        self._model, self._config, self._dtype = model, config, dtype
        self._by_name: dict[str, Adapter] = {}
        self.by_content: dict[tuple[str, str], Adapter] = {}

    def read(self, name: str, folder: str | Path) -> Adapter:
        """Read the adapter of a PEFT folder, without adding it.

        Raises ValueError as `peft.load` and `check` do, and for a name that is empty or no text.
        """
        if not is_text(name) or not name:
            raise refusal("name", "a text that is not empty", name)
        weights, content_hash = peft.load(folder, self._model, self._dtype)
        adapter = Adapter(name, str(folder), content_hash, weights.rank)
        self.check(adapter)
        return adapter

    def check(self, adapter: Adapter) -> None:
        """Raise ValueError without adapter slots, or for a rank that does not fit."""
        if not self._config.adapter_slots:
            raise ValueError("adapters need adapter_slots, which is 0")
        if not 1 <= adapter.rank <= self._config.max_adapter_rank:
            raise ValueError(
                f"adapter {shown(adapter.name)}: its rank {shown(adapter.rank)} is not from 1 to "
                f"max_adapter_rank ({self._config.max_adapter_rank})"
            )

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def add(self, adapter: Adapter) -> None:
        known = self.by_content.setdefault((adapter.name, adapter.content_hash), adapter)
        known.folder = adapter.folder  # the same content may have moved
        self._by_name[adapter.name] = known

    def means(self, adapter: Adapter) -> bool:
        """Whether requests for the adapter's name now get this content from this folder."""
        known = self._by_name.get(adapter.name)
        return known is not None and (known.content_hash, known.folder) == (
            adapter.content_hash, adapter.folder
        )  # fmt: skip

    def named(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None for None. Raises ValueError for an unknown name."""
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._by_name:
            names = [*map(repr, self.names)]
            listed = ", ".join(names[:MOST_SHOWN] + ["…"] * (len(names) > MOST_SHOWN)) or "none yet"
            raise ValueError(f"adapter {shown(name)} is not known; known are: {listed}")
        return self._by_name[name]
