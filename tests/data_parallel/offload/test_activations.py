"""Activations in host memory: the same numbers, each byte once each way, nothing left behind."""

from contextlib import ExitStack
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel.offload.activations import LEAST_BYTES, HostActivations, HostPool
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.errors import ConfigError

WIDTH, BATCH, LENGTH = 32, 8, 16
CHOICES: list[Any] = [None, "full", "selective", ["Linear"]]


class Block(nn.Module):
    """Saves views of one tensor (query, key, value), a tensor twice, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril() > 0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (query @ key.mT).masked_fill(~self.mask, -1e9)
        wide = self.drop(F.gelu(scores.softmax(-1) @ value) @ self.out.weight.t())
        return x + wide


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(params=[0, 40_000, 10**9], ids=["none", "some", "all"])
def in_flight(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let so many bytes be on the device while they travel: none, a block's, or all."""
    monkeypatch.setattr(HostActivations, "in_flight_bytes", request.param)
    return int(request.param)


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(BATCH, LENGTH, WIDTH)


def held(model: nn.Module, *others: Tensor) -> set[int]:
    return {storage_key(one) for one in (*model.parameters(), *model.buffers(), *others)}


def step(
    host: HostActivations | None, choice: Any = None, backwards: int = 1, net: Any = None
) -> list[Any]:
    """Return what a step computes; with `host` None nothing is moved."""
    model, x = made() if net is None else net
    model.zero_grad()
    torch.manual_seed(1)
    with ExitStack() as stack, checkpointed_blocks(model, choice):
        if host is not None:
            stack.enter_context(host.saving(lambda: held(model, x)))
        loss = model(x).square().mean()
        stack.close()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
    return [loss.detach(), *(param.grad for param in model.parameters()), torch.rand(1)]


def new() -> HostActivations:
    return HostActivations(torch.device("cpu"))


def moved(host: HostActivations) -> tuple[int, int]:
    return host.traffic["down"].bytes, host.traffic["up"].bytes


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_losses_gradients_and_random_streams(choice: Any, backwards: int, in_flight: int) -> None:
    expected = step(None, backwards=backwards)
    torch.testing.assert_close(step(new(), choice, backwards), expected, rtol=0, atol=0)


def saved_bytes() -> int:
    """Return the bytes of what autograd saves in a forward, each storage once."""
    model, x = made()
    there, found = held(model, x), dict[int, Tensor]()

    def note(tensor: Tensor) -> Tensor:
        large = tensor.untyped_storage().nbytes() >= LEAST_BYTES
        if large and storage_key(tensor) not in there:
            found[storage_key(tensor)] = tensor
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        torch.manual_seed(1)
        model(x).square().mean()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_each_byte_goes_once_each_way(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 0)
    host = new()
    step(host, choice)
    one = 4 * BATCH * LENGTH * WIDTH  # an activation; of four blocks' inputs one is the batch
    products = 3 * one + 2 * one + 4 * BATCH * LENGTH * LENGTH
    kept = {
        "None": saved_bytes(),
        "full": 3 * one + one,  # and the loss keeps what the last block has made
        "selective": 3 * one + one + 4 * products,
    }
    down, up = moved(host)
    assert down == up
    assert down == kept.get(str(choice), down)
    assert 0 < down <= kept["None"]


def test_what_has_not_left_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    host = new()
    step(host)
    assert moved(host) == (saved_bytes(), 0)


@pytest.mark.slow
def test_memory_is_used_again_and_given_back(in_flight: int) -> None:
    host, needed = new(), saved_bytes()
    for _ in range(3):
        host.pool.note_batch()
        step(host)
        assert host.pool.num_bytes == needed
    torch.testing.assert_close(step(host, "full"), step(None), rtol=0, atol=0)
    for _ in range(40):
        host.pool.note_batch()
        step(host, "full")
    assert host.pool.num_bytes < needed / 2
    step(host)
    assert host.pool.num_bytes == host.pool.most_bytes == needed


def test_forwards_without_a_backward_leave_nothing(in_flight: int) -> None:
    host, (model, x) = new(), made()
    for _ in range(3):
        with host.saving(lambda: held(model, x)):
            model(x).square().mean()
    assert host.pool.num_bytes == saved_bytes()
    assert moved(host)[1] == 0
    torch.testing.assert_close(step(host), step(None), rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_microbatches_whose_backwards_come_later(order: tuple[int, ...], in_flight: int) -> None:
    """As in a pipeline: in the order of the forwards, or the other way round."""
    host, (model, _) = new(), made()
    batches = [torch.randn(BATCH, LENGTH, WIDTH) for _ in order]

    def loss_of(x: Tensor, moves: bool) -> Tensor:
        with ExitStack() as stack:
            if moves:
                stack.enter_context(host.saving(lambda: held(model, x)))
            return model(x).square().mean()

    def grads(moves: bool) -> list[Any]:
        model.zero_grad()
        torch.manual_seed(1)
        losses = [loss_of(x, moves) for x in batches]
        for one in order:
            losses[one].backward()
        return [param.grad for param in model.parameters()]

    torch.testing.assert_close(grads(True), grads(False), rtol=0, atol=0)


def test_a_part_of_a_large_storage_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that lies on the device went to the host with each of its batches."""
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 0)
    data, weight, host = torch.randn(1000, 512), nn.Parameter(torch.randn(512, 512)), new()
    with host.saving(lambda: {storage_key(weight)}):
        loss = (data[500:510] @ weight).sum()
    loss.backward()
    assert moved(host) == (10 * 512 * 4,) * 2
    torch.testing.assert_close(weight.grad, data[500:510].T @ torch.ones(10, 512))


class Held(nn.Module):
    """Uses its weight as it is, transposed, and as a view of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sin() @ self.weight.t() @ self.weight.view(-1)[:].view(WIDTH, -1)


def test_parameters_and_their_views_stay_what_they_are() -> None:
    """Stage 3 gives the memory of full parameters back, and gathers into the same."""
    model, x, host = Held(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), new()
    full = model.weight.data
    with host.saving(lambda: {storage_key(full)}):
        loss = model(x).sum()
    values = full.clone()
    full.untyped_storage().resize_(0)
    full.untyped_storage().resize_(values.nbytes)
    full.copy_(values)
    loss.backward()
    again = x.detach().requires_grad_()
    model(again).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


@pytest.mark.parametrize("large", [False, True])
def test_what_is_changed_in_place_is_an_error_as_it_is_without(large: bool) -> None:
    x = torch.randn(64 if large else 2, 64, requires_grad=True)
    with new().saving(set):
        wave = x.exp()
        loss = wave.sum()
        wave.add_(1)
    with pytest.raises(ConfigError, match="modified by an inplace operation since forward saved"):
        loss.backward()


def test_what_is_changed_once_it_has_left_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 0)
    x = torch.randn(64, 64, requires_grad=True)
    with new().saving(set):
        wave = x.exp()
        loss = wave.sum()
        wave.add_(1)
    loss.backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_a_changed_tensor_that_is_saved_again_is_another(in_flight: int) -> None:
    x, host = torch.randn(64, 64, requires_grad=True), new()
    with host.saving(set):
        kept = x.sin()  # does not need its result
        first = kept * 1
        loss = (first * first).sum()
        kept.mul_(3)
        loss = loss + (kept * kept).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, 20 * x.sin() * x.cos())


def test_other_classes_and_formats_stay(in_flight: int) -> None:
    host = new()
    complex_one = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
    sparse = torch.eye(64).to_sparse().requires_grad_()
    with host.saving(set):
        loss = (complex_one.conj() * complex_one).real.sum()
        loss = loss + torch.sparse.mm(sparse, torch.ones(64, 64) * complex_one.abs()).sum()
        wide = torch.randn(1, 64, requires_grad=True).expand(64, 64)
        loss = loss + (wide * wide).sum()
    loss.backward()
    assert complex_one.grad is not None
    twice = complex_one.detach().requires_grad_()
    ((twice.conj() * twice).real.sum() + twice.abs().sum()).backward()
    torch.testing.assert_close(complex_one.grad, twice.grad)


def test_a_second_derivative(in_flight: int) -> None:
    def penalty(host: HostActivations | None) -> Tensor:
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
            torch.rand(32, 64),
        )
        x.requires_grad_()
        with ExitStack() as stack:
            if host is not None:
                stack.enter_context(host.saving(lambda: held(model, x)))
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        return model[0].weight.grad

    torch.testing.assert_close(penalty(new()), penalty(None), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_models_own(reentrant: bool, in_flight: int) -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.blocks[0].out.bias
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    def of(host: HostActivations | None) -> list[Any]:
        torch.manual_seed(0)
        model, x = Own(), torch.randn(BATCH, LENGTH, WIDTH)
        return step(host, net=(model, x))

    host = new()
    torch.testing.assert_close(of(host), of(None), rtol=0, atol=0)
    assert moved(host)[0] == 5 * 4 * BATCH * LENGTH * WIDTH


def test_torch_func_is_refused_with_what_to_do() -> None:
    """Torch func was refused without a word of what to do."""
    with (
        pytest.raises(ConfigError, match="activation_offload=True moves what autograd saves, but"),
        new().saving(set),
    ):
        torch.func.grad(torch.sin)(torch.tensor(1.0))


def test_a_keyword_argument_of_a_checkpointed_block_goes_to_host_memory(in_flight: int) -> None:
    """A keyword argument of a checkpointed block stayed on the device."""

    class Named(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    torch.manual_seed(0)
    model, x = Named(), torch.randn(BATCH, LENGTH, WIDTH)
    host = new()
    named = step(host, "full", net=(model, x))
    torch.testing.assert_close(named, step(None, net=(model, x)), rtol=0, atol=0)
    assert moved(host)[0] == 4 * 4 * BATCH * LENGTH * WIDTH


def test_the_pool_lends_what_was_given_back() -> None:
    pool = HostPool(torch.empty_like)
    one = pool.take(torch.empty(4))
    pool.give(one)
    assert pool.take(torch.empty(4)) is one
    assert pool.take(torch.empty(4)) is not one
    assert pool.take(torch.empty(4, dtype=torch.float64)).dtype == torch.float64
    assert pool.num_bytes == 16 + 16 + 32


class Late:
    """A lane of copies that are done only where a stream waits for them, in their order.

    What is read too early has no values yet, and memory that is given back too early is missed.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[ReferenceType[Tensor], ReferenceType[Tensor]]] = []
        self.num_done = 0

    def copy(self, way: str, source: Tensor, target: Tensor) -> int:
        del way
        target.view(torch.uint8).fill_(255)
        self.queue.append((ref(source), ref(target)))
        return len(self.queue)

    def follow(self, mark: int) -> None:
        for source, target in self.queue[self.num_done : mark]:
            come, gone = source(), target()
            assert come is not None, "memory was given back before its copy was done"
            assert gone is not None, "memory was given back before its copy was done"
            gone.copy_(come)
        self.num_done = max(self.num_done, mark)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("backwards", [0, 1, 2])
def test_copies_come_when_streams_wait_for_them(
    choice: Any, backwards: int, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, host = Late(), new()
    monkeypatch.setattr(HostCopier, "copy", lambda _, *args: late.copy(*args))
    monkeypatch.setattr(HostCopier, "follow", lambda _, mark: late.follow(mark))
    expected = step(None, backwards=backwards)
    for _ in range(3):  # in memory that is used again
        torch.testing.assert_close(step(host, choice, backwards), expected, rtol=0, atol=0)
        late.follow(len(late.queue))
    assert late.queue
