"""The serving engine: a host loop of plain integers over jitted step functions."""
