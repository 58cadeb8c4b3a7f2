"""Copies of a module's arguments, on which it is tried before it is split."""

import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_shard.tensor_parallel.trial import Called


def test_a_cache_that_holds_the_keys_of_an_earlier_block_is_copied() -> None:
    """As Hugging Face's decoders fill it in training, with `use_cache`, their default."""
    hidden = torch.randn(2, 3, 4, 5, requires_grad=True)
    cache = DynamicCache()
    cache.update(hidden * 2, hidden * 3, 0)

    def block(given: tuple[tuple[Tensor], dict[str, DynamicCache]]) -> Tensor:
        (own,), cached = given[0], given[1]["past_key_values"]
        keys, values = cached.update(own, own, 0)
        return keys.sum() * values

    called = Called(block, ((hidden,), {"past_key_values": cache}), [])
    keys, values = (torch.cat([hidden * n, hidden], dim=2) for n in (2, 3))
    assert torch.equal(called.results[0], (keys.sum() * values).detach())
    assert cache.get_seq_length() == 4  # the user's own is as it was
