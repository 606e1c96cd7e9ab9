"""The papers: a folder for each paper, a study for each figure or table."""

import importlib
import pkgutil

from experiments.papers.paper import Paper

# By folder, from the oldest. A folder of this package is a paper's, and says so in its `PAPER`.
PAPERS: dict[str, Paper] = {}
for module in pkgutil.iter_modules(__path__):
    if module.ispkg:
        PAPERS[module.name] = importlib.import_module(f"{__name__}.{module.name}").PAPER
PAPERS = dict(sorted(PAPERS.items(), key=lambda each: each[1].number))
