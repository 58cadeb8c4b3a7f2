"""Recomputed blocks: what is kept of a block for its backward, and when it runs again."""
