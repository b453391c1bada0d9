"""The names of optimizers that cannot be kept equal on all replicas."""

# States of 8 and 4 bits, updates inside backward, projectors, and weights that differ between training and
# evaluation: fabric cannot capture their state, or replay their update.
_WORDS = (
    "8bit",
    "4bit",
    "bitsandbytes",
    "lomo",
    "galore",
    "apollo",
    "layerwise",
    "schedule_free",
    "schedulefree",
)


def unequal_optimizer(kind: str) -> str:
    """Return ``kind``, the name of an optimizer or its class, if it is one of these; else an empty string."""
    return kind if any(word in kind.lower() for word in _WORDS) else ""
