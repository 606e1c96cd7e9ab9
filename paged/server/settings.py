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
        512, "prompts that are served or wait at a time; others are refused with status 429"
    )
    max_prompts: int = described(128, "prompts of one request")
    max_body_bytes: int = described(8 * 2**20, "of a request; larger ones are refused")
    max_connections: int = described(
        4096, "open at a time; one more closes the one that has waited longest for a request"
    )
    head_timeout_s: int = described(
        30, "seconds from the connection, or the last answer, to the end of a request's head"
    )
    body_timeout_s: float = described(30.0, "seconds in which a request's body must have come")
    request_timeout_s: float = described(600.0, "seconds after which a request is aborted")
    drain_s: float = described(
        60.0, "seconds that running requests have to end in after SIGTERM; then they are aborted"
    )
    max_buffered_tokens: int = described(
        256, "tokens that wait for a slow client; if more come it gets the rest at the end"
    )
    allow_adapter_loading: bool = described(
        False, "whether clients may load adapters from folders of this machine"
    )

    def __post_init__(self):
        checks.make_plain(self)
        checks.require(self, {
            "max_pending": (self.max_pending >= 1, "at least 1"),
            "max_prompts": (
                1 <= self.max_prompts <= self.max_pending,
                f"from 1 to max_pending ({self.max_pending})",
            ),
            "max_body_bytes": (self.max_body_bytes >= 1, "at least 1"),
            "max_connections": (self.max_connections >= 1, "at least 1"),
            "head_timeout_s": (self.head_timeout_s >= 1, "at least 1"),
            "body_timeout_s": (self.body_timeout_s > 0, "above 0"),
            "request_timeout_s": (self.request_timeout_s > 0, "above 0"),
            "drain_s": (self.drain_s >= 0, "0 or more"),
            "max_buffered_tokens": (self.max_buffered_tokens >= 0, "0 or more"),
        })  # fmt: skip
