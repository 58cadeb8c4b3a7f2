"""Fails when torch changes what pipelines use of torch.distributed.pipelining's insides."""

from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from lightning_shard.pipeline_parallel._torch import (
    OF_COMPILER,
    add_messages,
    computations,
    iterates_powers,
    stage_backward_input,
    stage_backward_weight,
)
from lightning_shard.pipeline_parallel.schedules import Action, Kind


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_action_is_printed_as_torch_prints_it(kind: Kind) -> None:
    assert str(Action(3, kind, 12)) == str(_Action(3, _ComputationType(kind), 12))


def test_a_schedule_is_made_without_a_process_group() -> None:
    assert computations("looped_bfs", 2, 4, 1) == [
        [(0, "F", 0), (2, "F", 0), None, None, (2, "B", 0), (0, "B", 0)],
        [None, (1, "F", 0), (3, "F", 0), (3, "B", 0), (1, "B", 0)],
    ]


def test_an_overlapped_forward_and_backward_are_two_steps() -> None:
    rows = computations("dual_pipe_v", 1, 2, 2)
    assert rows == [
        [
            *((0, "F", 0), (1, "F", 0), (0, "F", 1), (1, "B", 0), (1, "F", 1), (0, "B", 0)),
            *((1, "B", 1), (0, "I", 1), (0, "W", 1)),
        ]
    ]


def test_a_receive_follows_what_the_peer_has_done_when_the_send_is_made() -> None:
    """One order of all steps fits every row: here that of the columns."""
    rows = add_messages([[(0, "F", 0), (0, "F", 1)], [None, (1, "F", 0), (1, "F", 1)]], (0, 1))
    assert [" ".join(f"{stage}{kind}{i}" for stage, kind, i in row) for row in rows] == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1RECV_F1 1F0 1F1",
    ]


def test_neighbouring_stages_on_one_rank_exchange_no_message() -> None:
    rows = add_messages([[(0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)]], (0, 0))
    assert rows == [[(0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)]]


def test_the_halves_of_a_backward_give_the_gradients_of_a_full_one() -> None:
    layer = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    parameters = list(layer.parameters())
    loss = layer(x).square().sum()
    inputs, groups = stage_backward_input([loss], None, [x], iter(parameters))
    assert [parameter.grad for parameter in parameters] == [None, None]
    stage_backward_weight(iter(parameters), groups)
    grads = [inputs[0], *(parameter.grad for parameter in parameters)]
    torch.testing.assert_close(grads, list(expected))


def test_which_buffers_spectral_norms_iterate() -> None:
    old = nn.utils.spectral_norm(nn.Linear(3, 3))
    new = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    vectors = {name for name, _ in old.named_buffers() if iterates_powers(old, name)}
    assert vectors == {"weight_u", "weight_v"}
    (owner,) = (one for one in new.modules() if one._buffers)
    assert all(iterates_powers(owner, name) for name in owner._buffers)
    assert not iterates_powers(nn.BatchNorm1d(3), "running_mean")


def test_what_the_compiler_notes_on_tensors_is_told_by_its_name() -> None:
    tensor = torch.zeros(2, 2)
    torch._dynamo.mark_dynamic(tensor, 0)
    assert vars(tensor)
    assert all(name.startswith(OF_COMPILER) for name in vars(tensor))
