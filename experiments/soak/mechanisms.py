"""Checks that every mechanism that a soak's flags enable has occurred, such as page selection."""

from collections.abc import Iterable

from experiments.policies import SOAKED
from experiments.soak.checks import Mechanism, Violation
from experiments.soak.users import Users

# Counts of what users do whatever the flags are.
OF_USERS = {
    "ended_stop": "no stop at a string or a token",
    "ended_abort": "no abort",
    "closed": "no close of a stream",
    "refused": "no refusal of an invalid request",
}


def named_mechanisms(users: Users) -> list[Mechanism]:
    """The mechanisms that the flags of the engine and of its users enable.

    Raises ValueError for a mechanism that cannot occur.
    """
    found = [Mechanism(count, never, "more time") for count, never in OF_USERS.items()]
    if users.check_share:
        found.append(Mechanism("compared", "no comparison", "a larger --check_share, or more time"))
    if users.interrupts.share:
        found.append(Mechanism("interrupted", "no interrupt", "more --interrupts, or more time"))
    found += _of_engine(users)
    if of_policy := SOAKED.get(users.engine.config.policy):
        found += of_policy.named(users.engine)
    for each in found:
        if not each.possible:
            raise ValueError(f"{each.never} can happen with these flags: needs {each.flags}")
    return found


def check_mechanisms(named: Iterable[Mechanism], counts: dict[str, int]) -> Violation | None:
    """A violation for the first mechanism that has not occurred; None if all have."""
    for each in named:
        if not counts[each.count]:
            return Violation("unexercised", f"{each.never} happened: needs {each.flags}")
    return None


def observe(users: Users) -> None:
    """Count occurrences of the policy's mechanisms in the device's state, between two steps."""
    if of_policy := SOAKED.get(users.engine.config.policy):
        users.counts.update(of_policy.seen(users.engine))


def _of_engine(users: Users) -> list[Mechanism]:
    config, known, found = users.engine.config, users.engine.adapters.by_content.values(), []
    if config.max_num_seqs > 1:  # else nothing is preempted
        flags = "a smaller --kv_cache_tokens, or more time"
        found.append(Mechanism("preemptions", "no preemption", flags))
        if users.engine.scheduler.swaps(2):
            found.append(Mechanism("swapped_out", "no swap to host memory", flags))
            found.append(Mechanism("swapped_in", "no swap back from host memory", flags))
        flags = "a larger --kv_cache_tokens, or more time"
        found += [
            Mechanism("parallel_samples", "no request of several samples", flags),
            Mechanism("beam_searches", "no beam search", flags),
        ]
    if config.prefix_caching or users.most_pins:
        flags = "a smaller --page_size, or more time"
        found.append(Mechanism("cached_tokens", "no request that shares a prefix", flags))
    if users.most_pins:
        flags = (
            f"another --max_model_len, of which a third, {users.prefix_length} tokens, is pinned, "
            "or other options of the policy"
        )
        found.append(Mechanism("pinned_prefixes", "no pin of a prefix", flags, users.can_pin))
    if config.adapter_slots:
        pages = sum(adapter.num_pages for adapter in known)
        more = len(known) > config.adapter_slots or pages > config.num_adapter_pages
        flags = f"more --adapters than --adapter_slots ({config.adapter_slots})"
        found.append(Mechanism("adapters_evicted", "no eviction of an adapter", flags, more))
    return found
