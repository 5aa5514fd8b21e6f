"""Floor 1: models and codecs. Pure: no I/O but reading the shipped schemas once."""
