"""Model families as pure functions of (params, config, tokens, positions, attend, adapters)."""

import pallas_kernels  # which prepares JAX  # noqa: F401
