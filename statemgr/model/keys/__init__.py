"""Keys: which task a key belongs to, and how other software writes keys. Pure."""
