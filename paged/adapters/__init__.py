"""LoRA adapters of many tenants: residency on the device, and loads (Punica §5.2)."""
