"""Pinned prefixes: computed before any request needs them, and kept for good (vLLM §4.4)."""

import numpy as np

from paged.engine_loop import EngineLoop
from paged.event_log import EventLog
from paged.registry import Requests
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup

# Once the request's only token is sampled, all keys and values of the prompt are written.
SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)


class Pinning:
    """Runs the request that computes a pinned prompt; `Intake` pins its blocks at its end."""

    def __init__(self, loop: EngineLoop, requests: Requests, event_log: EventLog):
        self._loop, self._requests, self._event_log = loop, requests, event_log

    def check(self, prompt: np.ndarray) -> None:
        """Raise ValueError without prefix caching or a free pin, while requests are unfinished, and
        for a prompt that is too short to pin or that the policy never shares."""
        config, can = self._loop.config, self._loop.config.capabilities
        if not (config.prefix_caching or can.pins):
            staged = f"option pins of policy {config.policy!r}"
            needed = staged if can.staged_tile else "prefix_caching"
            raise ValueError(f"pinning a prefix needs {needed}")
        if can.pins and self._loop.host_policy.num_pinned == can.pins:
            raise ValueError(f"as many prefixes are pinned as option pins allows: {can.pins}")
        if not can.pinned_tokens(len(prompt)):
            raise ValueError(
                f"a prefix of {len(prompt)} tokens is too short to be pinned: at least "
                f"{can.staged_tile + 2} are needed"
            )
        if self._requests.unfinished:
            count = len(self._requests.unfinished)
            raise ValueError(f"{count} requests are unfinished: pin prefixes before")
        if not can.shares(len(prompt)):
            raise ValueError(
                f"a prefix of {len(prompt)} tokens is prefilled sparsely and shared with nobody: "
                f"pin fewer than {can.unshared_from}"
            )

    def run(self, group: SequenceGroup, prompt: np.ndarray) -> bool:
        """Compute the prompt of a queued group with `pin`. Returns whether it is pinned: False if
        its logits are not finite, or its adapter cannot be loaded."""
        assert group.pin and group.mailbox is not None
        while not group.mailbox:
            self._loop.run_step()
        if group.mailbox[0].finish_reason == "error":
            return False
        now, round_ = self._loop.executor.clock.now(), self._loop.round
        self._event_log.pin(now, round_, prompt, group)
        return True
