"""LoRA adapters of many tenants: which are on the device, and how they come there (Punica §5.2)."""
