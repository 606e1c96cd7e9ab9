"""The one rule for which implementation of an op runs."""

from collections.abc import Callable, Mapping


def choose(
    op: str, implementations: Mapping[str, Callable], implementation: str | None
) -> Callable:
    """The implementation of `op` to run: `implementation` if given, otherwise 'xla'.

    Raises ValueError for a name that the op does not have.
    """
    name = "xla" if implementation is None else implementation
    if name not in implementations:
        raise ValueError(
            f"{op} has no implementation {name!r}; allowed: {', '.join(sorted(implementations))}"
        )
    return implementations[name]
