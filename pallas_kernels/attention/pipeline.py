"""The pipeline of a thread block: a producer fills slots of shared memory ahead of its consumers.

One warpgroup copies, the others compute. Both count fillings, so that they agree on slots without
talking: the producer waits until consumers have handed a slot back, and consumers until all copies
into it have ended.
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
    """Slots that are filled in turn; filling number n, from `begin` on, has slot n - begin modulo
    `slots`.

    filled: barriers of a slot, at which the copies into it arrive.
    read: barriers of a slot, at which each consumer arrives when it has read it.
    offset: the first slot, where several rings share an array.
    """

    filled: Any
    read: Any
    slots: int = field(metadata={"static": True})
    begin: Any = field(default=0, metadata={"static": True})
    offset: Any = field(default=0, metadata={"static": True})

    @classmethod
    def scratch(cls, slots: int, copies: int = 1, consumers: int = 1, lanes: int = 1) -> "Ring":
        """The barriers of a ring, or of one for each of `lanes`, as scratch memory.

        copies: into a slot. consumers: warpgroups that read it.
        """
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=lanes * slots)
        return cls(filled, plgpu.Barrier(num_arrivals=consumers, num_barriers=lanes * slots), slots)

    def slot(self, number):
        return self.offset + lax.rem(number - self.begin, self.slots)

    def free(self, number):
        """For the producer: the slot of a filling, once the one before has been read."""
        slot = self.slot(number)
        pl.when(number >= self.begin + self.slots)(lambda: plgpu.barrier_wait(self.read.at[slot]))
        return slot

    def wait(self, number):
        """For a consumer: the slot of a filling, once it is there."""
        slot = self.slot(number)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def hand_back(self, number) -> None:
        """For a consumer, when it has read a slot."""
        plgpu.barrier_arrive(self.read.at[self.slot(number)])


def drain(end, *rings: Ring) -> None:
    """For the producer, after the last fillings of rings that begin together: no barrier may end
    with arrivals unseen."""
    first, *_ = rings

    def wait(number, _):
        for ring in rings:
            plgpu.barrier_wait(ring.read.at[ring.slot(number)])

    lax.fori_loop(jnp.maximum(end - first.slots, first.begin), end, wait, None)
