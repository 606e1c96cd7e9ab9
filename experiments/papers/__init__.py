"""The papers: a folder for each paper, a study for each figure or table."""

import importlib
import pkgutil

from experiments.papers.paper import Paper

# A folder of this package is a paper's, and says so in its `PAPER`.
_FOLDERS = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
_FOUND = {name: importlib.import_module(f"{__name__}.{name}").PAPER for name in _FOLDERS}
# By folder, from the oldest.
PAPERS: dict[str, Paper] = dict(sorted(_FOUND.items(), key=lambda each: each[1].number))
