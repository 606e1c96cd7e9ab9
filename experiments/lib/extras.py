"""Imports that need an extra of pyproject.toml."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """A context for imports that need the extra: if one is missing, the program ends with a line
    that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: this program needs {error.name}: pip install 'paged-jax[{name}]' brings it, "
            f"or in a checkout pip install -e '.[{name}]'"
        )
