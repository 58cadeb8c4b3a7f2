"""Means of what ranks have kept, tensor by tensor."""

import torch

from lightning_shard.data_parallel.read_when_asked import mean_of_ranks


def test_a_mean_is_over_the_ranks_with_what_owners_have_added() -> None:
    ranks = [{"w": torch.full((2, 2), float(rank))} for rank in range(3)]
    parts = [{"w": torch.tensor([1.0, 2.0])}, {}, {"w": torch.tensor([3.0, 4.0])}]
    means = mean_of_ranks(ranks, parts)
    torch.testing.assert_close(means["w"], torch.tensor([[2.0, 3.0], [4.0, 5.0]]))


def test_the_mean_of_an_empty_parameter_could_not_be_taken() -> None:
    ranks = [{"empty": torch.empty(0, 4)} for _ in range(2)]
    assert mean_of_ranks(ranks, [{}, {}])["empty"].shape == (0, 4)
