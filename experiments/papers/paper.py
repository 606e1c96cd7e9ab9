"""What a paper's folder says of the paper."""

from typing import NamedTuple


class Paper(NamedTuple):
    """name: short name. number: on arXiv."""

    name: str
    title: str
    number: str
