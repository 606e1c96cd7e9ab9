"""Running an op with any implementation on a machine without a GPU."""

import functools

import jax

from pallas_kernels import mosaic


def run(op, *arguments, implementation, **options):
    """The result of `op`; kernels run in the GPU interpreter and must have no race."""
    if not implementation.startswith("mosaic_gpu"):
        return _jitted(op, implementation, *options.items())(*arguments)
    with mosaic.interpreting() as had_race:
        out = op(*arguments, implementation=implementation, **options)
        jax.block_until_ready(out)
        assert not had_race()
    return out


def run_spec(spec, arguments, implementation):
    """`run` of a named argument spec, with `arguments` that the spec drew."""
    names = list(arguments)

    def op(*values, **options):
        return spec.op(**dict(zip(names, values)), **options)

    return run(op, *arguments.values(), implementation=implementation, **spec.options)


def assert_in_place(op, *arrays, donated: int) -> None:
    """Assert that `op` writes into its first `donated` arrays, without temporary memory of their
    size.

    arrays: shapes or arrays.
    """
    program = jax.jit(op, donate_argnums=tuple(range(donated))).lower(*arrays).compile()
    memory = program.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays[:donated]))
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 20


@functools.cache
def _jitted(op, implementation, *options):
    return jax.jit(functools.partial(op, implementation=implementation, **dict(options)))
