"""The repository's public address: `Repository` of `[project.urls]` in pyproject.toml, if set.

The site of results links commits to this address. `python -m experiments.report --tables` writes it
into the notebooks: their Colab badges, and the package that their first code cells install.
"""

import re
import tomllib
from pathlib import Path

from experiments.lib import run_record
from experiments.lib.shipped import ROOT

SOURCE = re.compile(r'SOURCE = os\.environ\.get\(\\"PAGED_JAX\\", \\"[^\\]*\\"\)')
BADGE = re.compile(r'( *"source": \[\n)( *"\[!\[Open in Colab\][^\n]*\n *"\\n",\n)?')


def repository(root: Path = ROOT) -> str | None:
    """The address, as https://github.com/OWNER/NAME; None if not set, or without a checkout."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    except OSError:
        return None
    return project.get("urls", {}).get("Repository")


def stamp() -> None:
    """Write badge and source into each notebook; without an address, remove them."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        run_record.write_whole(path, stamped(path.read_text(), path.name, repository()))


def stamped(notebook: str, name: str, url: str | None) -> str:
    """The notebook's text with the source set, and the badge at the top of its first cell."""
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
