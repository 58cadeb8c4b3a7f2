"""Folders of Lightning's own strategies and of plain FSDP are resumed, and they read ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.sharded import peers
from tests.checkpoint.sharded.peers import Peer, peer, stepped
from tests.checkpoint.sharded.runs import LAYOUTS, SAVED_AFTER, fit, saving
from tests.examples.commands import ignoring_advice
from tests.processes import ProcessesFailedError, run_processes

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")
SAVED = f"step={SAVED_AFTER}.ckpt"


def sharded(layout: str, folder: Path) -> Path:
    return saving(LAYOUTS[layout](checkpoint_format="sharded"), folder, peer())


@pytest.mark.slow
def test_model_parallel_strategy_both_ways(tmp_path: Path) -> None:
    expected = fit("auto", peer()).losses
    theirs, _ = run_processes(peers.model_parallel, 2, folder=tmp_path / "theirs")
    torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=0)
    for layout in ("zero3-3", "tensor-4"):
        ours = fit(LAYOUTS[layout](), peer(), ckpt_path=tmp_path / "theirs" / SAVED)
        torch.testing.assert_close(ours.losses, expected[SAVED_AFTER:], rtol=1e-5, atol=0)
    path = sharded("zero3-4", tmp_path / "ours")
    again, _ = run_processes(peers.model_parallel, 2, folder=tmp_path / "again", resume=path)
    torch.testing.assert_close(again, expected[SAVED_AFTER:], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_one_process_reads_a_folder_without_this_package(tmp_path: Path) -> None:
    path = sharded("zero3-4", tmp_path)
    model = peer()
    optimizer = stepped(model)  # makes the state that is read into
    state = {"state_dict": model.state_dict(), "optimizer_0": {"state": {"head.weight": {}}}}
    moment = optimizer.state[model.head.weight]["exp_avg"]
    state["optimizer_0"]["state"]["head.weight"]["exp_avg"] = moment
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=path)
    full = saving(LAYOUTS["zero3-4"](), tmp_path / "full", peer())
    expected = torch.load(full, weights_only=False)
    torch.testing.assert_close(model.state_dict(), dict(expected["state_dict"]), rtol=0, atol=0)
    number = [name for name, _ in model.named_parameters()].index("head.weight")
    torch.testing.assert_close(
        moment, expected["optimizer_states"][0]["state"][number]["exp_avg"], rtol=0, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("write", [peers.write_fsdp1, peers.write_fsdp2])
def test_folders_of_plain_fsdp(write: object, tmp_path: Path) -> None:
    run_processes(write, 2, folder=tmp_path / "theirs")  # type: ignore[arg-type]
    expected = peer()
    optimizer = stepped(expected)
    model = OneGroup()
    with pytest.warns(UserWarning, match="nothing of a Trainer's"):
        fit(LAYOUTS["zero3-3"](), model, ckpt_path=tmp_path / "theirs", max_steps=1)
    alone = OneGroup()
    alone.load_state_dict(expected.state_dict())
    alone.begun = optimizer.state_dict()
    fit("auto", alone, max_steps=1)
    torch.testing.assert_close(model.losses, alone.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)


class OneGroup(Peer):
    """The model with an Adam of one group, and no schedule, which may have been begun."""

    begun: Any = None

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        if self.begun is not None:
            optimizer.load_state_dict(self.begun)
        return optimizer


@pytest.mark.slow
def test_fsdp2_reads_a_folder(tmp_path: Path) -> None:
    path = sharded("hybrid-8", tmp_path / "ours")
    full = torch.load(saving(LAYOUTS["hybrid-8"](), tmp_path / "full", peer()), weights_only=False)
    for weights in run_processes(peers.read_fsdp2, 2, path=path):
        for name, value in weights.items():
            torch.testing.assert_close(value, full["state_dict"][name], rtol=0, atol=0)


@pytest.mark.slow
def test_processes_write_and_resume_a_folder(tmp_path: Path) -> None:
    expected = fit("auto", peer()).losses
    run_processes(peers.gloo, 2, folder=tmp_path)
    for path in (tmp_path / SAVED, tmp_path / "afterwards.ckpt"):
        assert sorted(one.name for one in path.glob("*.pt")) == ["meta.pt"]
    again, _ = run_processes(peers.gloo, 2, folder=tmp_path / "b", resume=tmp_path / SAVED)
    torch.testing.assert_close(again, expected[SAVED_AFTER:], rtol=1e-5, atol=0)
    changed = tmp_path / SAVED / "__1_0.distcp"
    changed.write_bytes(bytes(changed.stat().st_size))
    with pytest.raises(ProcessesFailedError) as failed:
        run_processes(peers.gloo, 2, folder=tmp_path / "c", resume=tmp_path / SAVED)
    assert str(failed.value).count("__1_0.distcp is damaged: it has") >= 2
