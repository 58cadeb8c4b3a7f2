"""Parameters that share memory without being one parameter are refused, others are not."""

import pytest
import torch
from torch import nn

from lightning_shard import ConfigError
from lightning_shard.data_parallel.memory.shared_memory import refuse_shared_memory


def pair() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"Rank 1: .*'0.weight' and '1.weight'.*share memory"):
        refuse_shared_memory(model, rank=1)


def test_parameters_that_are_tied_by_their_data_are_refused() -> None:
    """Parameters that were tied by their data came apart."""
    model = pair()
    model[1].weight.data = model[0].weight.data
    refused(model)


def test_a_transposed_view_is_refused() -> None:
    """A transposed view came apart."""
    model = pair()
    model[1].weight.data = model[0].weight.data.t()
    refused(model)


def test_a_part_of_the_other_is_refused() -> None:
    """A part of the other came apart."""
    model = pair()
    model[1].weight.data = model[0].weight.data[1:, :2]
    refused(model)


def test_rows_and_columns_of_one_tensor_that_do_not_meet_are_taken() -> None:
    model, fused = pair(), torch.randn(4, 8)
    model[0].weight.data, model[1].weight.data = fused[:, :4], fused[:, 4:]
    refuse_shared_memory(model, rank=0)
    model[0].weight.data, model[1].weight.data = fused[:2], fused[2:]
    refuse_shared_memory(model, rank=0)


def test_one_parameter_in_two_places_is_taken() -> None:
    model = pair()
    model[1].weight = model[0].weight
    refuse_shared_memory(model, rank=0)


def test_parameters_without_memory_or_elements_are_taken() -> None:
    refuse_shared_memory(pair().to("meta"), rank=0)
    empty = torch.ones(0)
    refuse_shared_memory(nn.ParameterList([nn.Parameter(empty), nn.Parameter(empty)]), rank=0)
    refuse_shared_memory(nn.LazyLinear(3), rank=0)


def test_a_buffer_or_attribute_on_a_parameters_memory_is_refused() -> None:
    """A buffer or attribute on a parameter's memory stayed behind."""
    model = pair()
    model.register_buffer("first", model[0].weight.data[0])
    with pytest.raises(ConfigError, match=r"Rank 1: 'first' of ModuleList shares memory with .*'0"):
        refuse_shared_memory(model, rank=1)
    del model.first
    for kept in (model[0].weight.data, [model[0].weight.detach()], {"a": model[0].weight[:2]}):
        model[1].kept = kept
        with pytest.raises(ConfigError, match=r"'1.kept\[0\]' of ModuleList shares memory with"):
            refuse_shared_memory(model, rank=0)
    model[1].kept = [model[0].weight, model[0].weight.detach().clone()]
    refuse_shared_memory(model, rank=0)


def test_what_old_spectral_norms_compute_anew_is_taken() -> None:
    refuse_shared_memory(nn.utils.spectral_norm(nn.Linear(4, 4)), rank=0)


def test_buffers_on_one_memory_are_taken() -> None:
    model, same = pair(), torch.ones(3)
    model.register_buffer("one", same)
    model.register_buffer("other", same)
    refuse_shared_memory(model, rank=0)


def test_tensors_of_other_layouts_are_taken() -> None:
    model = pair()
    model.graph = torch.eye(3).to_sparse()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    refuse_shared_memory(model, rank=0)
