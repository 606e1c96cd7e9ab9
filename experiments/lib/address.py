"""The repository's public address: `Repository` of `[project.urls]` in pyproject.toml, if set.

What needs the address takes it from there: commits on the site of results, and, written by
`python -m experiments.report --tables`, the notebooks' badges for Colab and what their first cells
install.
"""

import re
import tomllib
from pathlib import Path

from experiments.lib import run_record
from experiments.lib.shipped import ROOT

SOURCE = re.compile(r'SOURCE = os\.environ\.get\(\\"PAGED_JAX\\", \\"[^\\]*\\"\)')
BADGE = re.compile(r'( *"source": \[\n)( *"\[!\[Open in Colab\][^\n]*\n *"\\n",\n)?')


def repository(root: Path = ROOT) -> str | None:
    """As https://github.com/OWNER/NAME; None if there is none, or no checkout."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    except OSError:
        return None
    return project.get("urls", {}).get("Repository")


def stamp(root: Path = ROOT) -> None:
    """Write badge and source into each notebook; without an address, take them out."""
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        run_record.write_whole(path, stamped(path.read_text(), path.name, repository(root)))


def stamped(notebook: str, name: str, url: str | None) -> str:
    """The text of a notebook, the badge first in its first cell."""
    source = f"git+{url}" if url else ""
    notebook = SOURCE.sub(
        lambda _: f'SOURCE = os.environ.get(\\"PAGED_JAX\\", \\"{source}\\")', notebook, count=1
    )
    badge = ""
    if url:
        colab = url.replace("https://github.com", "https://colab.research.google.com/github")
        image = "https://colab.research.google.com/assets/colab-badge.svg"
        link = f"[![Open in Colab]({image})]({colab}/blob/main/notebooks/{name})"
        badge = f'    "{link}\\n",\n    "\\n",\n'
    return BADGE.sub(lambda found: found[1] + badge, notebook, count=1)
