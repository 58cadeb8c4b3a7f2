"""Matching parts as literal tables; a teacher's parameters are cut as its student's are."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.matching_parts import find_matching_parts
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.data_parallel.units import find_units
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies


class Body(nn.Module):
    """Layers of odd sizes around blocks; the stem may be frozen in the student, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.last = nn.Linear(5, 7)


class Model(nn.Module):
    def __init__(self, *, trains_teacher: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.net = Body()
        self.net.stem.requires_grad_(False)
        self.head = nn.Linear(7, 2)
        self.teacher = copy.deepcopy(self.net).requires_grad_(trains_teacher)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)


def parts(model: nn.Module) -> list[list[str]]:
    matching = find_matching_parts(model, [])
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters():
        if (number := matching.part_of(param)) is not None:
            names.setdefault(number, []).append(name.split(".")[0])
    return [sorted(set(one)) for one in names.values()]


class Plain(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


LINEAR, NORM = nn.Linear(2, 3), nn.LayerNorm(3)
TABLE: list[tuple[nn.Module, list[list[str]]]] = [
    (Model(), [["net"], ["teacher"]]),
    (Plain(net=Body(), ema=Wrapper(Body())), [["net"], ["ema"]]),
    (Plain(a=nn.Linear(2, 3), b=frozen(LINEAR), head=nn.Linear(3, 2)), [["a"], ["b"]]),
    (Plain(mean=nn.Linear(2, 3), deviation=nn.Linear(2, 3)), [["mean"], ["deviation"]]),
    (Plain(one=nn.LayerNorm(3), other=nn.LayerNorm(3)), []),
    (Plain(one=nn.LayerNorm(3), other=frozen(NORM)), [["one"], ["other"]]),
    (Plain(a=nn.Linear(2, 3), b=nn.Linear(2, 3), c=nn.Linear(2, 3)), []),
    (Plain(**{f"l{i}{j}": nn.Linear(2, 3 + i) for i in range(9) for j in "ab"}), []),
    (
        Plain(q=Body(), r=Body(), q_target=frozen(Body()), r_target=frozen(Body())),
        [["q"], ["r"], ["q_target"], ["r_target"]],
    ),
    (
        Plain(net=Body(), shadow=nn.ParameterList(p.detach() for p in Body().parameters())),
        [["net"], ["shadow"]],
    ),
]


@pytest.mark.parametrize(("model", "expected"), TABLE)
def test_parts_with_matching_parts(model: nn.Module, expected: list[list[str]]) -> None:
    assert parts(model) == expected


def test_blocks_are_nobodys_teachers() -> None:
    blocks = nn.ModuleList([Body(), Body()])
    specs = find_units(Plain(blocks=blocks), classes=None, bucket_mb=25)
    assert [spec.name for spec in specs] == ["blocks.0"]


def test_units_end_where_a_twin_begins() -> None:
    specs = find_units(Model(), classes=None, bucket_mb=25)
    assert [(spec.name, spec.params[0][0]) for spec in specs] == [
        ("root", "first.weight"),
        ("root", "net.stem.weight"),
        ("net.blocks.0", "net.blocks.0.weight"),
        ("root", "net.last.weight"),
        ("root", "head.weight"),
        ("root", "teacher.stem.weight"),
        ("teacher.blocks.0", "teacher.blocks.0.weight"),
        ("root", "teacher.last.weight"),
    ]


def trained_teacher() -> Model:
    return Model(trains_teacher=True)


@pytest.mark.parametrize("make", [Model, trained_teacher])
@pytest.mark.parametrize(("num_ranks", "num_copies"), [(2, 1), (3, 1), (4, 2)])
def test_teacher_is_cut_otherwise_than_its_student(
    make: Callable[[], Model], num_ranks: int, num_copies: int
) -> None:
    def rank_main(rank: int) -> list[tuple[int, int]]:
        model = make()
        options = EngineOptions(stage=3, dtypes=DTypePolicy(compute=torch.bfloat16))
        engine = DataParallelEngine(model, in_copies(num_copies), options)
        with engine.optimizer_view():
            pairs = zip(model.net.parameters(), model.teacher.parameters(), strict=True)
            sizes = [(student.numel(), teacher.numel()) for student, teacher in pairs]
        engine.detach(restore=True)
        return sizes

    for sizes in run_ranks(rank_main, num_ranks):
        assert [student for student, _ in sizes] == [teacher for _, teacher in sizes]
