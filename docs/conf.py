"""Of Sphinx: `make docs`."""

import os
import re
from pathlib import Path

from experiments.lib import address
from paged import __version__

DOCS = Path(__file__).parent

project = html_title = "paged-jax"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["examples"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
html_theme = "furo"
html_show_copyright = False
if url := address.repository():
    html_theme_options = {
        "source_repository": url, "source_branch": "main", "source_directory": "docs/",
    }  # fmt: skip


def as_written(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are prose, not reStructuredText: code stays code, no other character means
    anything, and a paragraph with an indented line or a list keeps its lines."""

    def plain(part: str) -> str:
        return f"`{part}`" if part.startswith("`") else re.sub(r"([*_|`\\])", r"\\\1", part)

    text = "".join(map(plain, re.split(r"(`[^`\n]+`)", "\n".join(lines))))
    paragraphs = [part.splitlines() for part in re.split(r"\n\s*\n", text.strip("\n"))]
    kept = re.compile(r"\s|- |\d+\. ")
    lines[:] = [
        line
        for paragraph in paragraphs
        for line in (
            *(f"| {x}" if any(map(kept.match, paragraph)) else x for x in paragraph),
            "",
        )
    ]


# Pages of the repository beside docs/: path -> the page that includes it.
INCLUDED = {
    (page.parent / page.read_text().split()[1]).resolve(): page
    for page in (DOCS / "included").glob("*.md")
}


def to_included(app, docname: str, source: list[str]) -> None:
    """Links to such pages go where the site has them."""
    folder = (DOCS / docname).parent

    def there(link: re.Match[str]) -> str:
        page = INCLUDED.get((folder / link[1]).resolve())
        return f"]({os.path.relpath(page, folder)}" if page else link[0]

    source[0] = re.sub(r"\]\(([^)#\s]+\.md)", there, source[0])


def setup(app) -> None:
    app.connect("source-read", to_included)
    app.connect("autodoc-process-docstring", as_written)
