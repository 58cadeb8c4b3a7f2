"""Forwards of blocks, of all kinds, for comparison in parts and in full."""
