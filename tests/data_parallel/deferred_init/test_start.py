"""Values for modules when a run begins, and what is refused by name."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.deferred_init.start import MetaStart, move_to
from lightning_shard.errors import ConfigError
from tests.data_parallel.deferred_init.models import built_with, values
from tests.data_parallel.deferred_init.test_recorder import build

CPU = torch.device("cpu")


def made(module: nn.Module, *, seed: int | None = None) -> nn.Module:
    """Give a module on meta its values."""
    state = None if seed is None else torch.Generator().manual_seed(seed).get_state()
    start = MetaStart.of(module, CPU, 0, state)
    assert start is not None
    start.make_buffers()
    start.make_parameters()
    start.end()
    return module


@pytest.mark.parametrize("name", ["tied gpt", "odd"])
def test_a_module_gets_its_values_and_stays_the_same_objects(name: str) -> None:
    torch.manual_seed(1)
    normal = build(name)
    torch.manual_seed(1)
    module = built_with(lambda: build(name), to_meta=True)
    first = next(module.parameters())
    first.learning_rate = 0.5  # what code sets on a parameter
    optimizer = torch.optim.AdamW(module.parameters())
    made(module)
    assert next(module.parameters()) is first is optimizer.param_groups[0]["params"][0]
    assert vars(first) == {"learning_rate": 0.5}
    assert len(list(module.parameters())) == len(list(normal.parameters()))  # ties are ties
    for one, value in values(normal):
        assert torch.equal(dict(values(module))[one], value), one
    assert MetaStart.of(module, CPU, 0) is None


def test_a_cast_module_has_the_values_of_one_that_was_cast_on_the_cpu() -> None:
    torch.manual_seed(1)
    normal = build("odd").bfloat16()
    torch.manual_seed(1)
    module = made(built_with(lambda: build("odd"), to_meta=True).bfloat16())
    for one, value in values(normal):
        assert torch.equal(dict(values(module))[one], value), one


@pytest.mark.parametrize("name", ["llama", "bert", "layers"])
def test_a_module_that_nobody_saw_being_built_is_initialised_as_constructors_do(name: str) -> None:
    def built() -> nn.Module:
        if name != "layers":
            return build(name)
        parts = [nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2), nn.GRU(3, 4)]
        return nn.Sequential(*parts)

    torch.manual_seed(6)
    normal = built()
    with torch.device("meta"):
        module = built()
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="were put on meta where nothing was noted"):
        made(module, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    for one, value in values(normal):
        assert torch.equal(dict(values(module))[one], value), one


def test_a_part_that_has_values_keeps_them_while_others_are_initialised() -> None:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.bias = nn.Parameter(torch.full((2,), 7.0, device="cpu"))
            self.register_buffer("count", torch.tensor([3.0], device="cpu"))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)
            if isinstance(self.bias, Tensor):
                nn.init.zeros_(self.bias)

    with torch.device("meta"):
        module = Layer()
    with pytest.warns(UserWarning, match="'weight' of Layer were put on meta"):
        made(module)
    assert module.weight.tolist() == [[1, 1], [1, 1]]
    assert module.bias.tolist() == [7, 7]
    assert module.count.tolist() == [3]


class Token(nn.Module):
    """Has an initialiser that nobody can call without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.token = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(2))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.token, std=std)


def test_memory_that_nothing_writes_is_refused_by_name() -> None:
    module = built_with(Token, to_meta=True)
    with pytest.raises(ConfigError, match="Rank 0: 'token', 'table' of Token on meta would be"):
        made(module)
    with torch.device("meta"):
        module = Token()
    with (
        pytest.warns(UserWarning, match="nothing was noted"),
        pytest.raises(ConfigError, match="'token', 'table' of Token on meta would be memory"),
    ):
        made(module)


def test_memory_that_is_written_in_parts_is_not_refused() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 2))
            for part, value in zip(self.weight.detach().chunk(2), (1.0, 2.0), strict=True):
                part.fill_(value)

    assert made(built_with(Parts, to_meta=True)).weight.sum() == 12


def test_changes_that_came_to_nothing_are_refused_by_name() -> None:
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, for each parameter
        module.load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(
        ConfigError, match=r"'weight', 'bias' of Linear were changed on meta.*assig"
    ):
        made(module)
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    module.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)
    assert MetaStart.of(module, CPU, 0) is None


def test_what_would_be_lost_with_the_parameter_on_meta_is_refused() -> None:
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    module.weight.register_hook(lambda grad: grad)
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) has a hook, which would be lost"):
        made(module)
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    penalty = module.weight.sum()
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) cannot be given its values"):
        made(module)
    assert penalty.is_meta


def test_an_optimizer_that_makes_state_of_values_is_refused_by_name() -> None:
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    start = MetaStart.of(module, CPU, 0)
    assert start is not None
    start.check_optimizers([torch.optim.AdamW(module.parameters())])
    with pytest.raises(ConfigError, match="Adagrad makes its state when it is constructed"):
        start.check_optimizers([torch.optim.Adagrad(module.parameters())])


def test_tensors_with_values_move_to_a_device_and_those_on_meta_stay() -> None:
    module = built_with(lambda: nn.Linear(2, 2), to_meta=True)
    module.register_buffer("count", torch.ones(1))
    move_to(module, CPU)
    assert module.weight.is_meta
    assert module.count.tolist() == [1]
