"""`torch.distributed.checkpoint` on in-process ranks: saved by some, loaded by others."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def sharded_model(seed: int, num_ranks: int) -> nn.Module:
    model = make_model(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    return model


@pytest.mark.parametrize(("num_savers", "num_loaders"), [(2, 3), (3, 2), (4, 1)])
def test_save_and_load_with_other_numbers_of_ranks(
    tmp_path: Path, num_savers: int, num_loaders: int
) -> None:
    def save(rank: int) -> None:
        state = get_model_state_dict(sharded_model(0, num_savers))
        dcp.save({"model": state}, checkpoint_id=tmp_path)

    def load(rank: int) -> list[Tensor]:
        model = sharded_model(1, num_loaders)
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state["model"])
        return [p.full_tensor().detach() for p in model.parameters()]

    run_ranks(save, num_savers)
    saved = [p.detach() for p in make_model(0).parameters()]
    for weights in run_ranks(load, num_loaders):
        torch.testing.assert_close(weights, saved, rtol=0, atol=0)

    alone = {"model": make_model(1).state_dict()}
    dcp.load(alone, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(list(alone["model"].values()), saved, rtol=0, atol=0)
