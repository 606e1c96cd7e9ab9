"""The engine under soak, and its reference engine.

Used by experiments/soak/__main__.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.lib.engines import load_engine
from experiments.soak.users import MOST_SEQUENCES, Users
from paged.config import EngineConfig
from paged.requests.adapter import Adapter


def reference_config(config: EngineConfig) -> EngineConfig:
    """The configuration for one request at a time: ample memory, no prefix caching, no running
    ahead."""
    most, longest = min(MOST_SEQUENCES, config.max_num_seqs), config.max_model_len
    return replace(
        config, max_num_seqs=most, max_prefills_per_step=1, prefix_caching=False, run_ahead=False,
        kv_cache_tokens=most * (longest + config.page_size), watermark=0.0,
    )  # fmt: skip


def make_users(
    config: EngineConfig, seed: int, check_share: float, interrupts: float, tolerance: float,
    served: Sequence[Adapter] = (), **model: Any,
) -> Users:  # fmt: skip
    """Users of an engine that is not warmed up yet.

    served: the adapters of requests.
    model: keyword arguments of `load_engine`.

    Raises ValueError for an invalid configuration.
    """
    engine = load_engine(config, **model)
    reference = load_engine(reference_config(config), **model)
    for adapter in served:
        engine.add_known_adapter(adapter)
        reference.add_known_adapter(adapter)
    return Users(engine, reference, seed, check_share, interrupts=interrupts, tolerance=tolerance)


def warm_up(users: Users) -> None:
    """Compile both engines' programs. The reference's come first, because compilations are counted
    for the whole process."""
    users.reference.warm_up()
    users.engine.warm_up()
