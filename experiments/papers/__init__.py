"""The papers: a folder for each paper, a study for each figure or table."""

import importlib
import pkgutil

from experiments.papers.paper import Paper

# Each subpackage belongs to a paper, and describes the paper in `PAPER`.
_FOLDERS = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
_FOUND = {name: importlib.import_module(f"{__name__}.{name}").PAPER for name in _FOLDERS}
# Papers by folder name, oldest first.
PAPERS: dict[str, Paper] = dict(sorted(_FOUND.items(), key=lambda each: each[1].number))
