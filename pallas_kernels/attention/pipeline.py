"""The pipeline of a thread block: a producer fills slots of shared memory ahead of its consumers.

One warpgroup copies, and the others compute. All warpgroups number the fillings in the same order,
so they agree on slots without communication. Before the producer fills a slot again, it waits until
all consumers have handed the slot back. A consumer waits until all copies into the slot have ended.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import pl, plgpu


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """Slots of shared memory, filled in turn: filling n has slot offset + (n - begin) % slots.

    filled: one barrier per slot, at which the copies into the slot arrive.
    read: one barrier per slot, at which each consumer arrives after it has read the slot.
    slots: the number of slots.
    begin: the number of the first filling.
    offset: the index of the ring's first slot in an array that several rings share.
    """

    filled: Any
    read: Any
    slots: int = field(metadata={"static": True})
    begin: Any = field(default=0, metadata={"static": True})
    offset: Any = field(default=0, metadata={"static": True})

    @classmethod
    def scratch(cls, slots: int, copies: int = 1, consumers: int = 1, lanes: int = 1) -> "Ring":
        """The barriers of one ring per lane, as scratch memory.

        copies: the number of copies that fill one slot.
        consumers: the number of warpgroups that read a slot.
        """
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=lanes * slots)
        return cls(filled, plgpu.Barrier(num_arrivals=consumers, num_barriers=lanes * slots), slots)

    def slot(self, number):
        return self.offset + lax.rem(number - self.begin, self.slots)

    def free(self, number):
        """Producer: the slot of a filling, after a wait until the slot's previous filling was
        read."""
        slot = self.slot(number)
        pl.when(number >= self.begin + self.slots)(lambda: plgpu.barrier_wait(self.read.at[slot]))
        return slot

    def wait(self, number):
        """Consumer: the slot of a filling, after a wait until its copies have ended."""
        slot = self.slot(number)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def hand_back(self, number) -> None:
        """Consumer: signal that the slot of a filling has been read."""
        plgpu.barrier_arrive(self.read.at[self.slot(number)])


def drain(end, *rings: Ring) -> None:
    """Producer: wait until the last fillings, up to `end` - 1, have been read, because no barrier
    may end with pending arrivals. All `rings` have the same `begin` and `slots`."""
    first, *_ = rings

    def wait(number, _):
        for ring in rings:
            plgpu.barrier_wait(ring.read.at[ring.slot(number)])

    lax.fori_loop(jnp.maximum(end - first.slots, first.begin), end, wait, None)
