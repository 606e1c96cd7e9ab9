"""The host's memory for what is swapped out."""

import jax.numpy as jnp
import numpy as np

from paged.device.mover import _Landing


def test_there_may_be_more_units_than_the_machine_has_memory_for():
    """As of 256 sequences of 32k tokens of an 8B model, of which few are ever swapped out."""
    content = {"words": jnp.arange(3 * 1024, dtype=jnp.uint32).reshape(3, 1024)}
    content["scores"] = jnp.ones((3, 2), jnp.bfloat16)
    host, units = _Landing(2**28), np.array([0, 5, 2**28 - 1])  # 1 TiB of words
    host.send(units, content)
    for name, values in host.read(units[1:]).items():
        np.testing.assert_array_equal(values, content[name][1:])
