"""Every public way to a tensor's memory gives the full tensor's, or is refused by name."""

import copy
import ctypes
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file, save_model
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import (
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    RankFailedError,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.processes import run_processes
from tests.strategies.parity import ignore_upstream_warnings, ignoring
from tests.strategies.styles import Net
from tests.trainers import cpu_trainer

pytestmark = ignoring(
    ".*this fit will run with no optimizer",
    "TypedStorage is deprecated",
    "__array__ implementation doesn't accept a copy",
    "To copy construct from a tensor",
)

Way = Callable[[Tensor], Any]
PLAN = {"net.blocks.*.layer": "colwise_gather_output"}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "zero2": lambda: ZeRO2Strategy(backend="in_process", num_ranks=2),
    "zero3": lambda: ZeRO3Strategy(backend="in_process", num_ranks=2),
    "tensor": lambda: TensorParallelStrategy(backend="in_process", num_ranks=2, plan=PLAN),
    "pipeline": lambda: PipelineParallelStrategy(backend="in_process", num_ranks=2),
    "tensor and zero3": lambda: HybridParallelStrategy(
        backend="in_process", num_ranks=4, tensor_parallel_size=2, zero_stage=3, plan=PLAN
    ),
}


def at(address: int, like: Tensor) -> Any:
    """Return a copy of the memory at an address."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_double))
    return np.array(np.ctypeslib.as_array(pointer, (like.numel(),)))


def within(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a copy of what lies in a storage where a tensor says."""
    seen = torch.empty(0, dtype=like.dtype)
    return seen.set_(storage, like.storage_offset(), (like.numel(),)).clone()


def its_pointer(tensor: Tensor) -> Any:
    return at(tensor.data_ptr(), tensor)


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def put_into(make: Callable[[Tensor], Tensor]) -> Way:
    def way(tensor: Tensor) -> Tensor:
        plain = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
        plain.data = make(tensor)
        return plain.data.clone()

    return way


class Other(Tensor):
    pass


def as_other(tensor: Tensor) -> Tensor:
    other: Any = tensor.as_subclass(Other)
    copied: Tensor = other.clone().as_subclass(Tensor)
    return copied


def swapped(tensor: Tensor) -> Tensor:
    """Swap a tensor with a plain one, look at it there, and swap it back."""
    plain: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    plain = nn.Parameter(plain) if isinstance(tensor, nn.Parameter) else plain
    torch.utils.swap_tensors(plain, tensor)  # type: ignore[no-untyped-call]
    seen = plain.detach().clone()
    torch.utils.swap_tensors(plain, tensor)  # type: ignore[no-untyped-call]
    return seen


def gradient_of_another(make: Callable[[Tensor], Tensor]) -> Way:
    def way(tensor: Tensor) -> Tensor:
        plain = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
        plain.grad = make(tensor)
        return plain.grad.clone()

    return way


def added_by_python(tensor: Tensor) -> Tensor:
    plain = torch.ones(tensor.shape, dtype=tensor.dtype)
    return plain.map_(tensor.detach(), lambda own, other: own + other)  # type: ignore[attr-defined, no-any-return]


def backward_from_a_copy(tensor: Tensor) -> Tensor | None:
    with torch.enable_grad():
        leaf = tensor.detach().clone().requires_grad_()
        (leaf.square().sum() + (leaf @ leaf).sum()).backward()
    return leaf.grad


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


def by_script(tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(doubled)(tensor)


def cubes(tensor: Tensor) -> Tensor:
    return tensor.pow(3).sum()


def elements(tensor: Tensor) -> list[Tensor]:
    return list(tensor.detach().flatten())


def registered(tensor: Tensor) -> Tensor:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(tensor))
    return module.weight.detach()


def set_in(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype).set_(tensor.detach()).clone()


def torch_type(name: str) -> Callable[[Any], Tensor]:
    return lambda data: getattr(torch, name)(data)  # type: ignore[no-any-return]


WAYS: dict[str, Way] = {
    "data_ptr": its_pointer,
    "data_ptr of detach": lambda w: its_pointer(w.detach()),
    "data_ptr of cpu": lambda w: its_pointer(w.detach().cpu()),
    "data_ptr of contiguous": lambda w: its_pointer(w.detach().contiguous()),
    "data_ptr of clone": lambda w: its_pointer(w.detach().clone()),
    "data_ptr of a row": lambda w: its_pointer(w.detach()[1]),
    "data_ptr of a transpose": lambda w: its_pointer(w.detach().T.contiguous()),
    "data_ptr of a Parameter": lambda w: its_pointer(nn.Parameter(w.detach())),
    "distance of rows": lambda w: [w.detach()[1].data_ptr() - w.detach().data_ptr()],
    "same pointers": lambda w: [w.data_ptr() == w.detach().data_ptr() == w[0].data_ptr()],
    "untyped_storage": lambda w: within(w.untyped_storage(), w),
    "untyped_storage of data": lambda w: within(w.data.untyped_storage(), w),
    "storage": lambda w: within(w.storage().untyped(), w),
    "copy of the storage": lambda w: within(w.untyped_storage().clone(), w),
    "offset of a row": lambda w: [w.detach()[1].storage_offset() - w.storage_offset()],
    "as_strided": lambda w: w.detach().as_strided((w.numel(),), (1,), w.storage_offset()),
    "is_set_to": lambda w: [w.detach().is_set_to(w.detach())],
    "numpy": lambda w: w.detach().numpy(),
    "numpy of cpu": lambda w: w.detach().cpu().numpy(),
    "numpy by force": lambda w: w.numpy(force=True),
    "np.array": lambda w: np.array(w.detach()),
    "np.asarray": lambda w: np.asarray(w.data),
    "memoryview": lambda w: np.asarray(memoryview(w.detach().numpy())),
    "tolist": lambda w: w.tolist(),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).clone(),
    "to_dlpack": lambda w: dlpack.from_dlpack(dlpack.to_dlpack(w.detach())).clone(),
    "to_dlpack of a parameter": lambda w: dlpack.from_dlpack(dlpack.to_dlpack(w)).clone(),
    "np.from_dlpack": lambda w: np.from_dlpack(w.detach()).copy(),
    "set_": set_in,
    "data of another": put_into(lambda w: w.data),
    "data of another, a clone": put_into(lambda w: w.data.clone()),
    "data of another, a parameter": put_into(lambda w: w),
    "view of another format": lambda w: w.detach().view(torch.int64).view(w.dtype),
    "to": lambda w: w.detach().to(torch.float64, copy=True).numpy(),
    "Tensor": torch.Tensor,
    "Tensor of detach": lambda w: torch.Tensor(w.detach()),
    "Tensor.new": lambda w: torch.zeros(1, dtype=w.dtype).new(w),  # type: ignore[attr-defined]
    "Tensor of a list": lambda w: torch.Tensor(elements(w)),
    "Tensor.new_tensor": lambda w: torch.zeros(1, dtype=w.dtype).new_tensor(w),
    "DoubleTensor": torch_type("DoubleTensor"),
    "DoubleTensor of detach": lambda w: torch_type("DoubleTensor")(w.detach()),
    "DoubleTensor of a list": lambda w: torch_type("DoubleTensor")(elements(w)),
    "FloatTensor": lambda w: torch_type("FloatTensor")(w.detach().float()),
    "type": lambda w: w.type(torch.FloatTensor),
    "is of a type": lambda w: [isinstance(w.detach(), torch.DoubleTensor)],
    "another class": lambda w: Other(w).as_subclass(Tensor),
    "gradient of another": gradient_of_another(lambda w: w.detach()),
    "gradient of another, a parameter": gradient_of_another(lambda w: w),
    "apply_": lambda w: w.detach().clone().apply_(lambda one: one * 2),
    "map_": added_by_python,
    "backward from a copy": backward_from_a_copy,
    "jacobian": lambda w: torch.autograd.functional.jacobian(torch.exp, w.detach()[0]),
    "torch.func.grad": torch.func.grad(cubes),
    "torch.func.grad of a dictionary": lambda w: torch.func.grad(lambda d: cubes(d["w"]))({"w": w})[
        "w"
    ],
    "torch.func.jvp": lambda w: torch.func.jvp(cubes, (w,), (torch.ones_like(w),))[1],
    "torch.func.hessian": lambda w: torch.func.hessian(cubes)(w.detach()[0]),
    "vmap": torch.vmap(lambda row: row.exp().sum()),
    "scripted": by_script,
    "Parameter": lambda w: nn.Parameter(w).detach(),
    "Parameter by name": lambda w: nn.Parameter(data=w, requires_grad=False),
    "Parameter of a module": registered,
    "Embedding": lambda w: nn.Embedding.from_pretrained(w).weight,
    "as_subclass": as_other,
    "as_subclass of detach": lambda w: as_other(w.detach()),
    "set_ to the tensor": lambda w: torch.zeros(w.shape, dtype=w.dtype).set_(w).clone(),
    "swap_tensors": swapped,
    "pickle of a parameter": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save of a parameter": saved,
    "torch.tensor": torch.tensor,
    "torch.tensor by name": lambda w: torch.tensor(data=w),
    "torch.tensor of a list": lambda w: torch.tensor(elements(w)),
    "torch.as_tensor of a list": lambda w: torch.as_tensor(elements(w)),
    "torch.asarray, a copy": lambda w: torch.asarray(w.detach(), copy=True),
    "torch.as_tensor": torch.as_tensor,
    "torch.asarray": lambda w: torch.asarray(w.detach()),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w.detach())),
    "torch.save": lambda w: saved(w.detach()),
    "share_memory_": lambda w: w.detach().clone().share_memory_(),
    "safetensors": lambda w: load(save({"w": w}))["w"],
    "safetensors of detach": lambda w: load(save({"w": w.detach()}))["w"],
    "safetensors of cpu": lambda w: load(save({"w": w.detach().cpu().contiguous()}))["w"],
}
"""What reads all elements by an address, a storage, an array, another tensor or a file."""


REFUSED = (
    *("share_memory_", "swap_tensors", "pickle", "torch.save"),
    *("pickle of a parameter", "torch.save of a parameter"),
)
"""What may be refused by name."""


def write_storage(weight: Tensor) -> None:
    seen = torch.empty(0, dtype=weight.dtype)
    seen.set_(weight.untyped_storage(), weight.storage_offset(), (weight.numel(),)).add_(2)


def write_array(weight: Tensor) -> None:
    weight.detach().numpy()[1] += 3


def write_dlpack(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach())[2].sub_(1)


def write_address(weight: Tensor) -> None:
    ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_double))[3] = 0.25


WRITES = [write_storage, write_array, write_dlpack, write_address]


class Found(dict[str, list[Any]]):
    """What each rank got, which the ranks' copies of a module share."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: [] for name in names})

    def __deepcopy__(self, memo: Any) -> "Found":
        return self


class Asks(L.LightningModule):
    """Asks one thing of one weight after the second step; `found` holds what each rank got."""

    def __init__(self, ways: dict[str, Way], *, of_gradient: bool = False) -> None:
        super().__init__()
        self.net = Net()
        self.double()
        self.ways, self.of_gradient = ways, of_gradient
        self.found = Found(ways)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2 and not self.of_gradient:
            self.ask(self.net.blocks[1].layer.weight)

    def on_after_backward(self) -> None:
        if self.global_step == 1 and self.of_gradient:
            self.ask(self.net.blocks[1].layer.weight.grad)

    def ask(self, weight: Any) -> None:
        for name, way in self.ways.items():
            try:
                self.found[name].append(plain(way(weight)))
            except ConfigError as error:
                self.found[name].append(str(error))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        batch = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(batch.repeat(4, 1)), 4)


def plain(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    value = value.detach().clone().numpy() if isinstance(value, Tensor) else value
    return value if value is None else np.array(value, dtype=np.float64).ravel()


def fit(module: Asks, strategy: Any = "auto", devices: int = 1) -> Asks:
    torch.manual_seed(7)
    for param in module.parameters():
        nn.init.normal_(param, std=0.3)
    trainer = cpu_trainer(
        devices=devices, strategy=strategy, max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module)
    return module


@cache
def alone() -> Asks:
    return fit(Asks(WAYS))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_a_weight_s_memory_leads_to_all_of_it(strategy: str) -> None:
    """Under zero3 addresses and storages were those of shards, or none: files had garbage.

    `torch.Tensor`, `nn.Parameter`, `as_subclass` and `set_` took a rank's part for the weight in
    hooks of tensor and pipeline parallel, and `swap_tensors` left nothing in it. Pickled alone, a
    parameter took a process group along.

    Under tensor and pipeline parallel an address was that of memory that had been given back.

    `torch.DoubleTensor`, `new_tensor`, `torch.func.grad`, `vmap` and scripted functions took the
    part, gradients of a copy were None, and `apply_` ended the process.
    """
    run = fit(Asks(WAYS), STRATEGIES[strategy]())
    for name, found in run.found.items():
        for value in found:
            if isinstance(value, str):
                assert "net.blocks.1.layer.weight" in value, name
                assert name in REFUSED[:1] or strategy != "zero2", name
                assert name in REFUSED, name
            else:
                np.testing.assert_allclose(value, alone().found[name][0], rtol=1e-9, err_msg=name)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "pipeline"])
def test_what_is_written_to_a_weight_s_memory_is_the_weight_s(strategy: str) -> None:
    """Arrays and storages were copies, and what hooks wrote there was lost."""
    ways: dict[str, Way] = {}
    for write in WRITES:
        ways[write.__name__] = write
        ways[f"after {write.__name__}"] = lambda w: w.detach().clone()
    expected, run = fit(Asks(ways)), fit(Asks(ways), STRATEGIES[strategy]())
    torch.testing.assert_close(run.state_dict(), expected.state_dict())
    for name in ways:
        if name.startswith("after"):
            np.testing.assert_allclose(run.found[name][0], expected.found[name][0], rtol=1e-9)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "tensor"])
def test_a_sharded_gradient_leads_to_no_memory_without_a_word(strategy: str) -> None:
    """`storage()` of a gradient in shards read memory that nobody has, and ended the process.

    So did `plain.data = p.grad`, and a use of what it was.
    """
    torch_refuses = ("Tensor", "DoubleTensor", "FloatTensor", "another class", "torch.func.jvp")
    of_weights = ("swap_tensors", "scripted", "gradient of another", *torch_refuses)
    ways = {name: way for name, way in WAYS.items() if not name.startswith(of_weights)}
    expected = fit(Asks(ways, of_gradient=True))
    run = fit(Asks(ways, of_gradient=True), STRATEGIES[strategy]())
    for name, found in run.found.items():
        if isinstance(found[0], str):
            assert "net.blocks.1.layer.weight" in found[0], name
        else:
            np.testing.assert_allclose(found[0], expected.found[name][0], rtol=1e-9, err_msg=name)


class AsksInStep(Asks):
    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 1:
            self.ask(self.net.blocks[1].layer.weight)
        return super().training_step(batch, batch_idx)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
@pytest.mark.parametrize("way", ["data_ptr", "untyped_storage", "numpy", "safetensors"])
def test_a_step_is_led_to_no_memory_of_other_ranks(strategy: str, way: str) -> None:
    """A weight of which a step's rank has a part, or nothing, gave an address of nothing."""
    try:
        run = fit(AsksInStep({way: WAYS[way]}), STRATEGIES[strategy]())
    except ConfigError as error:
        assert "in a step" in str(error)  # noqa: PT017
        return
    for found in run.found[way]:
        if isinstance(found, str):
            assert "in a step" in found
        else:
            np.testing.assert_allclose(found, fit(AsksInStep({way: WAYS[way]})).found[way][0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.stem.weight


def as_hugging_face_does(module: nn.Module, path: Path, *, is_main: bool) -> None:
    """Compare storages on every rank, and write on one."""
    state, seen = module.state_dict(), set[int]()
    for name, value in list(state.items()):
        storage = value.untyped_storage().data_ptr()
        if storage in seen:
            del state[name]
        seen.add(storage)
    if is_main:
        save_file({name: value.contiguous() for name, value in state.items()}, path)


class Saves(Asks):
    """Saves in a hook of validation, of the epoch's end and of saving."""

    def __init__(self, folder: Path) -> None:
        super().__init__({})
        self.folder, self.tied = folder, Tied().double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([self.tied.head(self.tied.stem(batch[0]))], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def save(self, name: str) -> None:
        rank = self.global_rank
        save_file(self.net.state_dict(), self.folder / f"{name}.file.{rank}")
        save_model(self.tied, str(self.folder / f"{name}.model.{rank}"))
        is_main = rank == 0
        as_hugging_face_does(self.tied, self.folder / f"{name}.tied.0", is_main=is_main)

    def on_validation_end(self) -> None:
        self.save("validation")

    def on_train_epoch_end(self) -> None:
        self.save("epoch")

    def on_train_end(self) -> None:
        self.save("end")


def test_state_dicts_are_written_by_safetensors_in_hooks(tmp_path: Path) -> None:
    """Torch's error of invalid storages ended such a hook, as `save_pretrained`'s.

    Hugging Face's compares storages on all ranks, and writes on rank 0 alone.
    """
    torch.manual_seed(7)
    (tmp_path / "alone").mkdir()
    (tmp_path / "zero3").mkdir()
    fit(Saves(tmp_path / "alone"))
    fit(Saves(tmp_path / "zero3"), STRATEGIES["zero3"]())
    for file in (tmp_path / "zero3").iterdir():
        expected = load_file(tmp_path / "alone" / f"{file.name[:-1]}0")
        torch.testing.assert_close(load_file(file), expected)


class ReadsAlone(Asks):
    """Reads one weight on rank 0 alone."""

    def __init__(self, way: Way, *, of_gradient: bool = False) -> None:
        super().__init__({}, of_gradient=of_gradient)
        self.way = way

    def ask(self, weight: Any) -> None:
        if self.trainer.is_global_zero:
            self.way(weight)


@pytest.mark.parametrize(
    ("strategy", "module"),
    [
        ("zero3", ReadsAlone(lambda w: w.norm())),
        ("zero3", ReadsAlone(lambda w: save({"w": w}))),
        ("zero2", ReadsAlone(lambda gradient: gradient.norm(), of_gradient=True)),
        ("tensor", ReadsAlone(lambda w: w.norm())),
        ("pipeline", ReadsAlone(lambda w: save({"w": w}))),
    ],
)
def test_what_one_rank_reads_alone_is_named(strategy: str, module: ReadsAlone) -> None:
    """The error named operations of ranks, and nothing that a user could look for."""
    with pytest.raises((CollectiveMismatchError, DeadlockError)) as error:
        fit(module, STRATEGIES[strategy]())
    assert "to read 'net.blocks.1.layer.weight', of which ranks have parts" in str(error.value)
    assert "every rank must read it, or none" in str(error.value)
    assert Path(__file__).name in str(error.value)


def read_over_gloo() -> str:
    """Run in each of two processes."""
    ignore_upstream_warnings()
    strategy = ZeRO3Strategy(backend="gloo", timeout=5.0)
    with pytest.raises(RankFailedError) as error:
        fit(ReadsAlone(lambda w: w.norm()), strategy, devices=2)
    return str(error.value)


@pytest.mark.slow
def test_what_one_rank_reads_alone_is_named_over_gloo() -> None:
    """The ranks waited for each other until the time-out, whose error named operations only."""
    told: list[str] = run_processes(read_over_gloo, 2)
    assert any("to read 'net.blocks.1.layer.weight', of which ranks have parts" in t for t in told)


class Detaches(Asks):
    """Freezes layers by `detach_()`, and a copy as means of weights do."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__({})
        self.copies = copies

    def on_train_start(self) -> None:
        frozen: nn.Module = self.net.blocks[1].layer
        if self.copies:
            frozen = self.__dict__["teacher"] = copy.deepcopy(self.net)
        for param in frozen.parameters():
            param.detach_()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.copies:
            pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
            for own, other in pairs:
                own.data.lerp_(other.data, 0.5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "pipeline", "tensor and zero3"])
@pytest.mark.parametrize("copies", [False, True])
def test_detach_in_place_freezes_as_on_one_device(strategy: str, copies: bool) -> None:
    """Tensor parallel and pipelines trained on; under zero3 it was torch's error for a copy."""
    run = fit(Detaches(copies=copies), STRATEGIES[strategy]())
    expected = fit(Detaches(copies=copies))
    torch.testing.assert_close(run.state_dict(), expected.state_dict())
    if not copies:
        assert not run.net.blocks[1].layer.weight.requires_grad
