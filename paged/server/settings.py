"""Configuration of a server, without its engine's configuration."""

from dataclasses import dataclass

from paged import checks
from paged.checks import described


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server.

    Raises ValueError for values of the wrong type or outside their range.
    """

    max_pending: int = described(
        512,
        "prompts that are served or wait at a time; others are refused with status 429",
        least=1,
    )
    max_prompts: int = described(128, "prompts of one request")
    max_body_bytes: int = described(
        8 * 2**20, "bytes of a request's body; larger requests are refused", least=1
    )
    max_connections: int = described(
        4096,
        "open connections; one more closes the connection that has waited longest for a request",
        least=1,
    )
    head_timeout_s: int = described(
        30,
        "seconds from the connection, or the last answer, to the end of a request's head",
        least=1,
    )
    body_timeout_s: float = described(
        30.0, "seconds in which a request's body must have come", above=0
    )
    request_timeout_s: float = described(600.0, "seconds after which a request is aborted", above=0)
    drain_s: float = described(
        60.0,
        "seconds that running requests have to end in after SIGTERM; then they are aborted",
        least=0,
    )
    max_buffered_tokens: int = described(
        256, "tokens that wait for a slow client; if more come it gets the rest at the end", least=0
    )
    allow_adapter_loading: bool = described(
        False, "whether clients may load adapters from folders of this machine"
    )

    def __post_init__(self):
        checks.make_plain(self)
        checks.require_bounds(self)
        checks.require(self, {
            "max_prompts": (
                1 <= self.max_prompts <= self.max_pending,
                f"from 1 to max_pending ({self.max_pending})",
            ),
        })  # fmt: skip
