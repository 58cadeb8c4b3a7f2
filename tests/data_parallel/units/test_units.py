"""Units as literal tables: name, number of modules, parameters; a teacher's as its student's."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.data_parallel.units.units import find_matching_parts, find_units
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies

TINY = 1e-9
Table = list[tuple[str, int, list[str]]]


def table(model: nn.Module, classes: list[str] | None = None, bucket_mb: float = TINY) -> Table:
    return [
        (spec.name, len(spec.modules), [name for name, _ in spec.params])
        for spec in find_units(model, classes=classes, bucket_mb=bucket_mb)
    ]


def linear() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


class Net(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = linear()
        self.blocks = blocks
        self.head = linear()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()


def test_repeated_blocks() -> None:
    assert table(Net(nn.ModuleList([Pair(), Pair()]))) == [
        ("root", 0, ["embed.weight"]),
        ("blocks.0", 1, ["blocks.0.a.weight", "blocks.0.b.weight"]),
        ("blocks.1", 1, ["blocks.1.a.weight", "blocks.1.b.weight"]),
        ("root", 0, ["head.weight"]),
    ]


def test_containers_inside_containers() -> None:
    inner = nn.Sequential(nn.Sequential(linear(), nn.ReLU(), linear()), nn.Tanh(), linear())
    assert table(nn.Sequential(inner)) == [
        ("0.0.0", 1, ["0.0.0.weight"]),
        ("0.0.2", 1, ["0.0.2.weight"]),
        ("root", 0, ["0.2.weight"]),
    ]


def test_sequences_of_different_modules_in_a_list_are_units() -> None:
    """Sequences of different modules in a list were all in the root unit."""
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(2), Pair()) for _ in range(2))
    assert [row[0] for row in table(Net(blocks))] == ["root", "blocks.0", "blocks.1", "root"]


def test_stages_of_blocks_are_no_blocks() -> None:
    stages = nn.Sequential(*(nn.Sequential(Pair(), Pair()) for _ in range(2)))
    assert [row[0] for row in table(stages)] == ["0.0", "0.1", "1.0", "1.1"]
    towers = nn.ModuleList(nn.Sequential(linear(), nn.Sequential(Pair(), Pair())) for _ in range(2))
    assert [row[0] for row in table(towers)] == ["root", "0.1.0", "0.1.1", "root", "1.1.0", "1.1.1"]


def test_lists_cannot_be_called() -> None:
    pairs = nn.ModuleList(nn.ModuleList([linear(), nn.LayerNorm(2)]) for _ in range(2))
    assert {row[0] for row in table(Net(pairs))} == {"root"}


def test_one_of_a_kind_is_no_block() -> None:
    assert table(Net(nn.ModuleList([Pair()])))[1][0] == "root"


def test_blocks_without_parameters_do_not_count() -> None:
    assert [row[0] for row in table(nn.Sequential(nn.ReLU(), linear(), nn.ReLU()))] == ["root"]


def test_classes() -> None:
    assert table(Net(nn.ModuleList([Pair()])), classes=["Pair"])[1] == (
        "blocks.0",
        1,
        ["blocks.0.a.weight", "blocks.0.b.weight"],
    )


def test_classes_take_the_outermost() -> None:
    rows = table(Net(nn.ModuleList([Pair()])), classes=["Pair", "Linear"])
    assert [row[0] for row in rows] == ["embed", "blocks.0", "head"]


@pytest.mark.parametrize("wrong", ["Pari", "pair"])
def test_a_wrong_class_names_the_nearest(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{wrong}'.*Pair"):
        table(Net(nn.ModuleList([Pair()])), classes=[wrong])


def test_tied_across_blocks_is_in_the_root_unit() -> None:
    model = Net(nn.ModuleList([Pair(), Pair()]))
    model.blocks[1].a.weight = model.blocks[0].a.weight
    assert table(model) == [
        ("root", 0, ["embed.weight"]),
        ("root", 0, ["blocks.0.a.weight"]),
        ("blocks.0", 1, ["blocks.0.b.weight"]),
        ("blocks.1", 1, ["blocks.1.b.weight"]),
        ("root", 0, ["head.weight"]),
    ]


def tied_to_the_head(model: Net) -> None:
    model.head.weight = model.blocks[0].a.weight


def module_shared_with_the_root(model: Net) -> None:
    model.first = model.blocks[0].a


@pytest.mark.parametrize("tie", [tied_to_the_head, module_shared_with_the_root])
def test_used_outside_its_block_is_in_the_root_unit(tie: Callable[[Net], None]) -> None:
    model = Net(nn.ModuleList([Pair(), Pair()]))
    tie(model)
    owner = {name: row[0] for row in table(model) for name in row[2]}
    assert owner["blocks.0.a.weight"] == "root"
    assert owner["blocks.0.b.weight"] == "blocks.0"


def test_a_block_listed_twice_is_one_block() -> None:
    twice, other = Pair(), Pair()
    rows = table(Net(nn.ModuleList([twice, other, twice])))
    assert [row[:2] for row in rows] == [("root", 0), ("blocks.0", 1), ("blocks.1", 1), ("root", 0)]


@pytest.mark.parametrize(
    ("num_elements", "sizes"), [(0, [1, 1, 1, 1, 1]), (8, [2, 2, 1]), (12, [3, 2]), (100, [5])]
)
def test_neighbours_are_joined_up_to_the_bucket(num_elements: int, sizes: list[int]) -> None:
    model = nn.Sequential(*(linear() for _ in range(5)))  # 4 elements each
    bucket_mb = max(4 * num_elements / 2**20, TINY)
    assert [row[1] for row in table(model, bucket_mb=bucket_mb)] == sizes


def test_a_block_is_never_cut() -> None:
    model = nn.Sequential(Pair(), Pair())  # 8 elements each
    assert [len(row[2]) for row in table(model, bucket_mb=4 * 12 / 2**20)] == [2, 2]


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
