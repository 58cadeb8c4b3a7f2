"""A module that is full on the CPU shows the file that it loads, and is not there twice."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.files.reading import read_mapped
from lightning_shard.checkpoint.full import MappedParameters
from lightning_shard.errors import CheckpointError
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit, saving
from tests.examples.commands import ignoring_advice
from tests.strategies.test_mapped_files import is_mapped

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")


class Odd(nn.Module):
    """Parameters of which only the first can show what is in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(2, 3))
        self.seen = nn.Parameter(torch.randn(2, 3))
        self.looked_at = self.seen.data[0]  # as a plain tensor
        self.turned = nn.Parameter(torch.randn(3, 2).T)
        self.other_format = nn.Parameter(torch.randn(4).double())
        self.tied = nn.Linear(2, 2, bias=False)
        self.tie = nn.Linear(2, 2, bias=False)
        self.tie.weight = self.tied.weight
        self.empty = nn.Parameter(torch.empty(0))


def mapped(module: nn.Module, path: Path) -> Any:
    """Return other weights for a module, in a mapped file, with two values of what is tied."""
    state = OrderedDict(
        (name, torch.randn(value.shape).to(torch.float32))
        for name, value in module.state_dict().items()
    )
    torch.save(state, path)
    return read_mapped(path)


def test_what_is_more_than_a_copy_is_not_lent(tmp_path: Path) -> None:
    """What is more than a copy was lent too."""
    module = Odd()
    state = mapped(module, tmp_path / "a.pt")
    lent = MappedParameters(module, state)
    assert list(lent.params) == [module.plain]
    lent.lend()
    module.load_state_dict(lent.state)
    for name, value in module.state_dict().items():
        expected = state["tie.weight" if name == "tied.weight" else name]
        assert torch.equal(value, expected.to(value.dtype)), name
    assert torch.equal(module.looked_at, state["seen"][0])


def test_a_tied_parameter_is_lent_where_both_names_are_one_tensor(tmp_path: Path) -> None:
    module = Odd()
    torch.save(module.state_dict(), tmp_path / "a.pt")
    assert module.tied.weight in MappedParameters(module, read_mapped(tmp_path / "a.pt")).params


def test_what_was_lent_is_given_back_or_taken_over(tmp_path: Path) -> None:
    module = Odd()
    state = mapped(module, tmp_path / "a.pt")
    own, place = module.plain.detach().clone(), module.plain.data_ptr()
    lent = MappedParameters(module, state)
    lent.lend()
    assert module.plain.data_ptr() == state["plain"].data_ptr()
    lent.give_back()
    assert module.plain.data_ptr() == place
    assert torch.equal(module.plain, own)
    lent.lend()
    lent.take_over()
    assert not is_mapped(module.plain.data)
    assert torch.equal(module.plain, state["plain"])


class Asks(Model):
    """Looks at its weights where the optimizer is made."""

    seen: dict[str, Tensor]
    where: list[bool]

    def configure_optimizers(self) -> Any:
        """Keep copies of the weights, and whether they are mapped."""
        self.seen = {name: value.clone() for name, value in self.state_dict().items()}
        self.where = [is_mapped(param.data) for param in self.parameters()]
        return super().configure_optimizers()


class AsksForMore(Asks):
    """Has another optimizer than the checkpoint."""

    def configure_optimizers(self) -> Any:
        """Return Adam in one group."""
        super().configure_optimizers()
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("layout", ["zero3-3", "shard_ddp-2"])
def test_a_model_on_the_cpu_is_there_once_while_its_file_is_loaded(
    layout: str, tmp_path: Path
) -> None:
    """A model on the CPU was there twice while its file was loaded."""
    path = saving(LAYOUTS[layout](), tmp_path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    model = fit(LAYOUTS[layout](), Asks(), ckpt_path=path)
    assert all(model.where)
    assert all(torch.equal(value, saved[name]) for name, value in model.seen.items())


def test_a_model_whose_optimizer_does_not_fit_gives_back_what_it_was_lent(tmp_path: Path) -> None:
    """A model whose optimizer did not fit kept what it was lent."""
    path = saving(LAYOUTS["zero3-3"](), tmp_path)
    model = AsksForMore()
    before = {name: (one.data_ptr(), one.clone()) for name, one in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="groups of"):
        fit(LAYOUTS["zero3-3"](), model, ckpt_path=path)
    assert all(model.where)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0], name
        assert torch.equal(value, before[name][1]), name


def test_a_run_that_fails_in_between_leaves_no_module_that_is_mapped(tmp_path: Path) -> None:
    """A run that failed in between left a module that was mapped."""

    class Fails(Asks):
        def configure_optimizers(self) -> Any:
            super().configure_optimizers()
            raise ValueError("no")

    path = saving(LAYOUTS["zero3-3"](), tmp_path)
    model = Fails()
    with pytest.raises(ValueError, match="no"):
        fit(LAYOUTS["zero3-3"](), model, ckpt_path=path)
    assert all(model.where)
    assert not any(is_mapped(param.data) for param in model.parameters())
