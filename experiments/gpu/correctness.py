"""Correctness of kernels on this machine's GPU: every op and spec against `reference`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.specs import Spec


@dataclass(frozen=True)
class Check:
    """The errors of one op, spec and implementation.

    largest_error: largest absolute error over all results.
    of_bound: largest error as a fraction of the error bound; at most 1 passes.
    repeats_to_the_bit: whether two calls give bit-identical results.
    """

    op: str
    spec: str
    implementation: str
    largest_error: float
    of_bound: float
    repeats_to_the_bit: bool

    @property
    def passes(self) -> bool:
        # XLA's scatters may add in any order.
        repeats = self.repeats_to_the_bit or self.implementation == "xla"
        return self.of_bound <= 1 and repeats


def jitted(function: Callable) -> Callable:
    """`function`, jitted if there is a GPU. Without a GPU, kernels are interpreted, and their
    threads would deadlock inside one jitted program on few cores."""
    return jax.jit(function) if backend.current_gpu() else function


def check(op: str, name: str, spec: Spec, implementation: str) -> Check:
    arguments = spec.arguments(jax.random.key(0))
    call = jitted(partial(spec.op, implementation=implementation, **spec.options))
    found, again = (spec.results(arguments, call(**arguments)) for _ in range(2))
    errors, of_bound = spec.errors(arguments, found)
    return Check(
        op,
        name,
        implementation,
        largest_error=float(np.max(errors)),
        of_bound=of_bound,
        repeats_to_the_bit=all(np.array_equal(f, a) for f, a in zip(found, again)),
    )


def specs_to_check(small: bool) -> list[tuple[str, str, Spec]]:
    """Every op and spec, shortened to sizes that `reference` can compute, and further specs for
    cases that the shortened specs do not cover."""
    return [(op, name, spec) for op in OPS for name, spec in OPS[op].checked(small).items()]
