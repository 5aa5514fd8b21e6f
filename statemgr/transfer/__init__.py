"""Moves many blobs in parallel: hedged, packed, compressed, verified, and bounded in memory."""
