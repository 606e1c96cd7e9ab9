"""Whether what a soak's flags name has happened: LServe without a selected page soaks nothing new.

Used by experiments/soak/__main__.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from experiments.soak.checks import Violation
from experiments.soak.users import Users
from paged.kv_cache.lserve.options import UNQUANTISED


@dataclass(frozen=True)
class Mechanism:
    """Something that a soak's flags name.

    count: its name in `Users.counts`.
    never: the complaint if the count stays 0, before ' happened'.
    flags: the flags that make it happen.
    possible: whether it can happen at all.
    """

    count: str
    never: str
    flags: str
    possible: bool = True


def named_mechanisms(users: Users) -> list[Mechanism]:
    """The mechanisms that the flags of the engine and of its users name.

    Raises ValueError for one that cannot happen.
    """
    found = [*_of_users(users), *_of_engine(users)]
    if of_policy := _OF_POLICIES.get(users.engine.config.policy):
        found += of_policy[0](users)
    for each in found:
        if not each.possible:
            raise ValueError(f"{each.never} can happen with these flags: needs {each.flags}")
    return found


def check_mechanisms(named: Iterable[Mechanism], counts: dict[str, int]) -> Violation | None:
    """The first of the named mechanisms that has not happened."""
    for each in named:
        if not counts[each.count]:
            return Violation("unexercised", f"{each.never} happened: needs {each.flags}")
    return None


def observe(users: Users) -> None:
    """Count the traces of a policy's mechanisms on the device, between two steps.

    LServe, in running sequences: selecting (a query has selected pages), streaming (windows have
    left pages behind), sparse_prompts (longer than minference_budget).
    DiffKV, in tokens of all heads: demoted (in a lower precision than new ones), dropped.
    """
    if of_policy := _OF_POLICIES.get(users.engine.config.policy):
        users.counts.update(of_policy[1](users.engine))


def _of_users(users: Users) -> list[Mechanism]:
    found = []
    if users.check_share:
        found.append(Mechanism("compared", "no comparison", "a larger --check_share, or more time"))
    if users.interrupts.share:
        found.append(Mechanism("interrupted", "no interrupt", "more --interrupts, or more time"))
    return found


def _of_engine(users: Users) -> list[Mechanism]:
    config, known, found = users.engine.config, users.engine.adapters.by_content.values(), []
    if config.capabilities.swap or config.capabilities.recompute:
        count = "swapped_out" if config.preemption_mode == "swap" else "preemptions"
        found.append(Mechanism(count, "no preemption", "a smaller --kv_cache_tokens, or more time"))
    if config.prefix_caching:
        flags = "a smaller --page_size, or more time"
        found.append(Mechanism("cached_tokens", "no hit in the prefix cache", flags))
    if config.adapter_slots:
        pages = sum(adapter.num_pages for adapter in known)
        more = len(known) > config.adapter_slots or pages > config.num_adapter_pages
        flags = f"more --adapters than --adapter_slots ({config.adapter_slots})"
        found.append(Mechanism("adapters_evicted", "no eviction of an adapter", flags, more))
    return found


def _of_lserve(users: Users) -> list[Mechanism]:
    engine, found = users.engine, []
    options, layout = engine.config.policy_options, engine.host_policy.layout
    longest = f"--max_model_len ({engine.config.max_model_len})"
    streams, quantised = options.gates and options.streaming_share, options.kv_bits < UNQUANTISED
    if options.budget < engine.config.max_model_len or not (streams or quantised):
        flags = (
            f"--lserve_budget ({options.budget}) and --lserve_sparse_from below {longest}, and "
            "fewer --lserve_dense_layers than layers"
        )
        selects = layout.selects and options.dense_layers < engine.model.num_layers
        found.append(Mechanism("selecting", "no selection of pages", flags, selects))
    if streams:
        flags = f"--lserve_sink and --lserve_local together below {longest} by two pages"
        moves = layout.streams and layout.sink + layout.local + 1 < layout.most
        found.append(Mechanism("streaming", "no window of a head that streams", flags, moves))
    if options.minference_from:
        flags = f"--lserve_minference_from and --lserve_minference_budget far below {longest}"
        sparse = layout.minference > 0
        found.append(Mechanism("sparse_prompts", "no sparsely prefilled prompt", flags, sparse))
    return found


def _seen_of_lserve(engine: Any) -> dict[str, int]:
    policy, seen = engine.host_policy, {}
    layout = policy.layout
    if layout.selects:
        seen["selecting"] = int((engine.executor.snapshot()[0].positions >= 0).sum())
    if policy.streaming:
        seen["streaming"] = int((policy.streaming.first > layout.sink).sum())
    if layout.minference:
        longer = max(layout.minference_from, layout.minference * layout.page_size + 1)
        prompts = [group.num_prompt_tokens for group in engine.scheduler.running]
        seen["sparse_prompts"] = sum(tokens >= longer for tokens in prompts)
    return seen


def _of_diffkv(users: Users) -> list[Mechanism]:
    options, found = users.engine.config.policy_options, []
    flags = (
        "larger --diffkv_alpha_h and --diffkv_alpha_l, a smaller --diffkv_window, or a longer "
        "--max_model_len"
    )
    highest, *_, lowest = options.levels
    if not options.budget and highest.alpha > lowest.alpha:
        found.append(Mechanism("demoted", "no token in a lower precision", flags))
    if options.budget or lowest.alpha:
        found.append(Mechanism("dropped", "no dropped token", flags))
    return found


def _seen_of_diffkv(engine: Any) -> dict[str, int]:
    demoted = dropped = 0
    heads = [head for shard in engine.executor.snapshot() for slot in shard.heads for head in slot]
    for levels in heads:
        positions = [position for level in levels for position in level.positions]
        demoted += sum(len(level.positions) for level in levels[1:])
        dropped += max(positions, default=-1) + 1 - len(positions)
    return {"demoted": demoted, "dropped": dropped}


_OF_POLICIES: dict[str, tuple[Callable[[Users], list[Mechanism]], Callable[[Any], dict]]] = {
    "lserve": (_of_lserve, _seen_of_lserve),
    "diffkv": (_of_diffkv, _seen_of_diffkv),
}
