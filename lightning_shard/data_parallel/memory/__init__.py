"""Flat memory: where parameters lie, who has which shard, what user code puts in their place."""
