"""The engine without a device: the same scheduler and allocator over simulated time."""
