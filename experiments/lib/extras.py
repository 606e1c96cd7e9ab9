"""What not every installation has."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """While a program imports what an extra of pyproject.toml brings: where it is missing, the
    program ends with a line that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: this program needs {error.name}: pip install 'paged-jax[{name}]' brings it, "
            f"or in a checkout pip install -e '.[{name}]'"
        )
