"""LoRA adapters of many tenants: which are on the device, and how they are loaded (Punica §5.2)."""
