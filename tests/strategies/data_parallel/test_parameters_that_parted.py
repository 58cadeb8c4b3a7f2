"""Under shard_ddp each rank has every parameter: what makes them differ between ranks is loud."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_shard import ConfigError
from lightning_shard.data_parallel.memory import equal_weights
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.styles import Automatic

pytestmark = ignoring()
Edit = Callable[["Edited"], None]


class Edited(Automatic):
    """A hook changes parameters after the second batch."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.edit = edit

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.global_step == 2:
            self.edit(self)


def generator(model: Edited) -> torch.Generator:
    return torch.Generator().manual_seed(model.global_rank)


def drawn(model: Edited) -> None:
    nn.init.normal_(model.net.head.weight, generator=generator(model))


def assigned(model: Edited) -> None:
    weight = model.net.head.weight
    weight.data = torch.randn(weight.shape, generator=generator(model), dtype=weight.dtype)


def replaced(model: Edited) -> None:
    shape = model.net.head.weight.shape
    model.net.head.weight = nn.Parameter(torch.randn(shape, generator=generator(model)))


def on_one_rank(model: Edited) -> None:
    if model.global_rank == 1:
        with torch.no_grad():
            model.net.head.weight.mul_(0.5)


def past_version_counters(model: Edited) -> None:
    model.net.head.weight.data.normal_(generator=generator(model))


def alike(model: Edited) -> None:
    nn.init.normal_(model.net.head.weight, generator=torch.Generator().manual_seed(3))
    model.net.head.bias.data = torch.ones_like(model.net.head.bias)


def rounded_otherwise(model: Edited) -> None:
    with torch.no_grad():
        model.net.head.weight.mul_(1 + 1e-6 * model.global_rank)


def train(edit: Edit, **options: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Edited(edit)
    quiet_trainer(max_epochs=3, **options).fit(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:'net.head.weight' was replaced by another parameter")
@pytest.mark.parametrize("edit", [drawn, assigned, replaced, on_one_rank])
def test_edits_of_a_ranks_own_parted_the_weights_without_a_word(edit: Edit) -> None:
    with pytest.raises(ConfigError, match=r"ranks have different values of 'net\.head\.weight'"):
        train(edit, strategy="shard_ddp_in_process", devices=2)


def test_edits_past_version_counters_are_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_weights, "_COMPARE_EVERY", 5)
    with pytest.raises(ConfigError, match=r"different values of 'net\.head\.weight', expected"):
        train(past_version_counters, strategy="shard_ddp_in_process", devices=2)


@pytest.mark.parametrize("edit", [alike, rounded_otherwise])
def test_equal_edits_go_on(edit: Edit) -> None:
    expected = train(edit)
    for name, value in train(edit, strategy="shard_ddp_in_process", devices=2).items():
        torch.testing.assert_close(value, expected[name])
