"""The description of a paper, in the paper's folder."""

from typing import NamedTuple


class Paper(NamedTuple):
    """name: short name. number: arXiv number."""

    name: str
    title: str
    number: str
