"""Asynchronous SGD: every rank owns a shard and applies gradients to it as they arrive."""
