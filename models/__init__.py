"""Model families as pure functions of (params, config, tokens, positions, attend, adapters)."""
