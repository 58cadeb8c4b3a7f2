"""Tensors that compute as the full ones would, of shards and of gradients that ranks average."""
