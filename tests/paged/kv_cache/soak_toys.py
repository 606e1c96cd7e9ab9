"""The soak over a toy policy: python -m tests.paged.kv_cache.soak_toys --policy=sink_window

Flags and results are those of experiments.soak.
"""

import dataclasses
from dataclasses import dataclass

from absl import flags

from experiments.soak import __main__ as soak
from paged.kv_cache import POLICIES
from tests.paged.kv_cache.device_owned import DEVICE_OWNED
from tests.paged.kv_cache.sink_window import SINK_WINDOW, Options


@dataclass(frozen=True)
class LongerOptions(Options):
    """Sinks of several blocks: sequences that began short exceed the pool as they grow."""

    sink_tokens: int = 16
    window_tokens: int = 32


TOYS = {
    "sink_window": dataclasses.replace(SINK_WINDOW, options=LongerOptions),
    "device_owned": DEVICE_OWNED,
}
DEFAULTS = {"policy": "sink_window", "page_size": 4, "prefix_caching": False}


def define_flags() -> None:
    soak.define_flags()
    for name, value in DEFAULTS.items():
        flags.FLAGS.set_default(name, value)


if __name__ == "__main__":
    POLICIES.update(TOYS)
    dataclasses.replace(soak.PROGRAM, define_flags=define_flags).run()
