"""Many engines under one scheduler, which packs, moves and consolidates requests (Punica §5)."""
