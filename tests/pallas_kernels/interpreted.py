"""Running ops as every implementation on a machine without a GPU."""

import functools

import jax

from pallas_kernels import mosaic


def run(op, *arguments, implementation, **options):
    """What `op` gives; kernels run in the GPU interpreter and must have no race."""
    if not implementation.startswith("mosaic_gpu"):
        return _jitted(op, implementation, *options.items())(*arguments)
    with mosaic.interpreting() as had_race:
        out = op(*arguments, implementation=implementation, **options)
        jax.block_until_ready(out)
        assert not had_race()
    return out


def run_spec(spec, arguments, implementation):
    """`run` of a named argument spec, with arrays that it drew."""
    names = list(arguments)

    def op(*values, **options):
        return spec.op(**dict(zip(names, values)), **options)

    return run(op, *arguments.values(), implementation=implementation, **spec.options)


@functools.cache
def _jitted(op, implementation, *options):
    return jax.jit(functools.partial(op, implementation=implementation, **dict(options)))
