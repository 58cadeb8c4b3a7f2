"""What raw loops do, one model after the other, under every stage as on a single device."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_shard.fabric  # noqa: F401  (its names)
from lightning_shard.errors import ConfigError
from tests.fabric.nets import (
    STAGES,
    Net,
    adam,
    assert_close,
    batch_of,
    on_one,
    on_ranks,
    weights_of,
)

each_stage = pytest.mark.parametrize("stage", STAGES)


def trained(fabric: Fabric, step: Any, num_steps: int = 3, make: Any = adam) -> Any:
    """Train a net by `step(fabric, model, optimizer, number)`; return what it returns, weights."""
    module = Net()
    model, optimizer = fabric.setup(module, make(module))
    told = [step(fabric, model, optimizer, number) for number in range(num_steps)]
    return told, weights_of(model)


def compare(stage: str, step: Any, **options: Any) -> None:
    def loop(fabric: Fabric) -> Any:
        return trained(fabric, step, **options)

    assert_close(on_ranks(stage, loop), on_one(loop))


@pytest.mark.few_cases(1)
@each_stage
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_read_and_edited_and_zeroed(stage: str, set_to_none: bool) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad(set_to_none=set_to_none)
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        norms = [param.grad.norm().item() for param in model.parameters()]
        for param in model.parameters():
            param.grad.mul_(0.5).clamp_(-0.01, 0.01)
        optimizer.step()
        return norms

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
@pytest.mark.parametrize("way", ["in place", "set", "set later"])
def test_gradients_are_changed_by_weights_in_a_graph(stage: str, way: str) -> None:
    """Stage 3 made the weights full, and torch refused to write or set gradients then."""

    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad()
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        for param in model.parameters():
            halved = param.grad * 0.5
            if way == "in place":
                param.grad.addcmul_(param, param, value=0.1).add_(param, alpha=0.1)
            else:
                decay = 0.1 * param
                param.grad = halved + decay if way == "set" else halved
        optimizer.step()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_a_penalty_on_the_parameters_has_a_gradient(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad()
        loss = model(batch_of(fabric, number)).square().mean()
        penalty = sum(param.square().sum() for param in model.parameters())
        fabric.backward(loss + 0.1 * penalty)
        optimizer.step()
        return penalty.item()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_parameters_are_read_and_written_between_steps(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        norms = [param.norm().item() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
            model.head.bias.fill_(0.25)
        return norms, [tuple(param.shape) for param in model.parameters()]

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_several_forwards_one_of_them_without_gradients_before_a_backward(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad()
        batch = batch_of(fabric, number)
        first = model(batch)
        second = model(batch * 2)
        model.eval()
        with torch.no_grad():
            target = model(batch)
        model.train()
        third = model(batch * 3)
        fabric.backward((first + second - target + third).square().mean())
        optimizer.step()
        return target.sum().item() if fabric.world_size == 1 else None

    def loop(fabric: Fabric) -> Any:
        return trained(fabric, step)[1]

    assert_close(on_ranks(stage, loop), on_one(loop))


class Critic(nn.Module):
    """A generator, whose buffer autograd saves, and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("base", torch.linalg.qr(torch.randn(4, 4)).Q)

    def forward(self, x: Any, generates: bool) -> Any:
        return self.generator(x) @ self.base if generates else self.critic(x)


@pytest.mark.few_cases(1)
@each_stage
def test_a_graph_outlives_the_step_of_another_optimizer(stage: str) -> None:
    """Buffers that followed rank 0 were written anew, which ended the generator's backward."""

    def loop(fabric: Fabric) -> Any:
        torch.manual_seed(3)
        samples = torch.randn(3, 8, 4).chunk(fabric.world_size, 1)[fabric.global_rank]
        module = Critic()
        model = fabric.setup_module(module)
        parts = (module.critic, module.generator)
        both = [fabric.setup_optimizers(torch.optim.SGD(one.parameters(), 0.1)) for one in parts]
        for x in samples:
            made = model(x, True)
            for optimizer, fake in zip(both, (made.detach(), made), strict=True):
                optimizer.zero_grad()
                fabric.backward((model(fake, False) - fake).square().mean())
                optimizer.step()
        return weights_of(model)

    assert_close(on_ranks(stage, loop), on_one(loop))


@pytest.mark.few_cases(1)
@each_stage
def test_two_backwards_in_a_step(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad()
        out = model(batch_of(fabric, number))
        fabric.backward(out.square().mean(), retain_graph=True)
        fabric.backward(out.mean())
        fabric.backward(model(batch_of(fabric, number + 7)).mean())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        return norm.item()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_two_backwards_of_losses_that_differentiate_twice(stage: str) -> None:
    """The first backward gave the parameters back that the second one's graph needed."""

    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        model.mark_forward_method("penalised")
        optimizer.zero_grad()
        losses = [model.penalised(batch_of(fabric, number + 7 * part)) for part in range(2)]
        losses[1] = losses[1] + 0.1 * sum(param.square().sum() for param in model.parameters())
        for loss in losses:
            fabric.backward(loss)
        optimizer.step()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_accumulation_without_synchronization(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        for part in range(3):
            with fabric.no_backward_sync(model, enabled=part < 2):
                fabric.backward(model(batch_of(fabric, 3 * number + part)).square().mean() / 3)
        fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_a_closure(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(batch_of(fabric, number)).square().mean()
            fabric.backward(loss)
            return loss

        optimizer.step(closure)

    compare(stage, step)


def test_lbfgs_under_shard_ddp() -> None:
    """In float64: its line of steps magnifies how sums are rounded."""

    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(batch_of(fabric).double()).square().mean()
            fabric.backward(loss)
            return loss

        return optimizer.step(closure).item()

    def loop(fabric: Fabric) -> Any:
        return trained(fabric, step, make=lambda net: torch.optim.LBFGS(net.parameters(), 0.1, 4))

    double = {"precision": "64-true"}
    assert_close(on_ranks("shard_ddp", loop, **double), on_one(loop, **double))


@pytest.mark.few_cases(1)
@each_stage
def test_unused_and_frozen_parameters(stage: str) -> None:
    def loop(fabric: Fabric) -> Any:
        module = Net()
        module.unused = nn.Linear(3, 3)
        module.entrance.requires_grad_(False)
        model, optimizer = fabric.setup(module, adam(module))
        for number in range(3):
            fabric.backward(model(batch_of(fabric, number)).square().mean())
            none = [name for name, param in module.named_parameters() if param.grad is None]
            optimizer.step()
            optimizer.zero_grad()
        module.entrance.requires_grad_(True)
        fabric.backward(model(batch_of(fabric, 5)).square().mean())
        optimizer.step()
        return none, weights_of(model)

    (none, weights), (expected, expected_weights) = on_ranks(stage, loop), on_one(loop)
    assert none == expected
    assert_close(weights, expected_weights)


@pytest.mark.few_cases(1)
@each_stage
def test_methods_go_through_the_strategy_once_they_are_marked(stage: str) -> None:
    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        if fabric.world_size > 1 and number == 0:
            with pytest.raises(RuntimeError, match="mark_forward_method"):
                model.score(batch_of(fabric, number))
        model.mark_forward_method("score")
        optimizer.zero_grad()
        fabric.backward(model.score(batch_of(fabric, number)))
        optimizer.step()

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_two_models_with_an_optimizer_each(stage: str) -> None:
    """As of a GAN: the generator's loss goes through the discriminator."""

    def loop(fabric: Fabric) -> Any:
        nets = Net(), nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
        torch.manual_seed(4)
        nn.init.normal_(nets[1][0].weight)
        generator, of_generator = fabric.setup(nets[0], adam(nets[0]))
        critic, of_critic = fabric.setup(nets[1], adam(nets[1]))
        norms = []
        for number in range(3):
            fake = generator(batch_of(fabric, number))
            real = batch_of(fabric, number + 20)[:, :2]
            of_critic.zero_grad()
            fabric.backward(critic(fake.detach()).mean() - critic(real).mean())
            of_critic.step()
            of_generator.zero_grad()
            fabric.backward(-critic(fake).mean())
            norms.append(fabric.clip_gradients(generator, of_generator, max_norm=0.1).item())
            of_generator.step()
        return norms, weights_of(generator), weights_of(critic)

    assert_close(on_ranks(stage, loop), on_one(loop))


@pytest.mark.few_cases(1)
@each_stage
def test_a_backward_of_another_model_leaves_what_waits_for_one(stage: str) -> None:
    """A penalty on the first model's parameters, and two of its forwards, wait for their turn."""

    def loop(fabric: Fabric) -> Any:
        nets = Net(), Net()
        first, of_first = fabric.setup(nets[0], adam(nets[0]))
        second, of_second = fabric.setup(nets[1], adam(nets[1]))
        reductions = reductions_of(fabric, 0)
        for number in range(3):
            batch = batch_of(fabric, number)
            waiting = first(batch).square().mean() + first(batch * 2).mean()
            waiting = waiting + 0.1 * sum(param.square().sum() for param in first.parameters())
            of_second.zero_grad()
            fabric.backward(second(batch).square().mean())
            assert reductions.call_count == (number if fabric.world_size > 1 else 0)
            of_second.step()
            of_first.zero_grad()
            fabric.backward(waiting)
            of_first.step()
        return weights_of(first), weights_of(second)

    assert_close(on_ranks(stage, loop), on_one(loop))


def reductions_of(fabric: Fabric, number: int) -> Any:
    """Return a mock that counts how often gradients of one of a Fabric's modules are reduced."""
    if fabric.world_size == 1:
        return Mock(call_count=0)
    reducer = fabric.strategy.held[number].present_engine.reducer
    reducer.flush = Mock(side_effect=reducer.flush)
    return reducer.flush


@pytest.mark.few_cases(1)
@each_stage
def test_schedulers_step_the_wrapped_optimizer(stage: str) -> None:
    def loop(fabric: Fabric) -> Any:
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        rates = []
        for number in range(3):
            fabric.backward(model(batch_of(fabric, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates, weights_of(model)

    assert_close(on_ranks(stage, loop), on_one(loop))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_an_optimizer_of_matrices_is_set_up_after_its_module(stage: str) -> None:
    """The engine is made anew, so that a rank each has the full matrices."""

    def loop(fabric: Fabric) -> Any:
        model = fabric.setup_module(Net())
        optimizer = fabric.setup_optimizers(torch.optim.Adafactor(model.parameters(), lr=1e-2))
        for number in range(3):
            fabric.backward(model(batch_of(fabric, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    assert_close(on_ranks(stage, loop), on_one(loop))


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    def loop(fabric: Fabric) -> Any:
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        fabric.backward(model(batch_of(fabric)).mean() * float("inf"))
        with pytest.raises(RuntimeError, match="norm of the full gradient is"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        return fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)

    assert not on_ranks("zero2", loop).isfinite()


@pytest.mark.few_cases(1)
@each_stage
@pytest.mark.parametrize("way", ["grad", "backward", "of parameters"])
def test_gradients_by_inputs_pass_through_a_module_that_was_set_up(stage: str, way: str) -> None:
    """They were refused as a backward that is not Fabric's, so that no penalty could be trained."""

    def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> Any:
        optimizer.zero_grad()
        x = batch_of(fabric, number).requires_grad_()
        out = model(x).square()
        if way == "of parameters":
            out.mean().backward(inputs=[*model.parameters()])
        elif way == "backward":
            out.sum().backward(inputs=[x], retain_graph=True)
            fabric.backward((out * x.grad.square().sum(1, keepdim=True)).mean())
        else:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            fabric.backward(out.mean() + slope.square().sum(1).mean())
        optimizer.step()
        return None

    compare(stage, step)


@pytest.mark.few_cases(1)
@each_stage
def test_a_backward_without_fabric_is_refused(stage: str) -> None:
    def loop(fabric: Fabric) -> None:
        module = Net()
        model, _ = fabric.setup(module, adam(module))
        torch.autograd.grad(model(batch_of(fabric)).mean(), [*model.parameters()])
        model(batch_of(fabric)).mean().backward()

    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        on_ranks(stage, loop)


def test_an_optimizer_of_two_modules_is_refused() -> None:
    def loop(fabric: Fabric) -> None:
        one, two = fabric.setup_module(Net()), fabric.setup_module(Net())
        fabric.setup_optimizers(torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1))

    with pytest.raises(ConfigError, match="expected those of one module alone"):
        on_ranks("zero2", loop)


def test_a_module_that_shares_parameters_with_another_is_refused() -> None:
    def loop(fabric: Fabric) -> None:
        net = Net()
        _head = fabric.setup_module(net.head)
        fabric.setup_module(net)

    with pytest.raises(ConfigError, match="in shards already"):
        on_ranks("zero2", loop)


@pytest.mark.slow
def test_modules_that_nobody_holds_any_more_are_freed() -> None:
    """The strategy held each until the launch ended, and each backward went through all of them."""
    kept: list[nn.Module] = []

    def train(fabric: Fabric) -> int:
        alive = []
        for number in range(4):
            net = nn.Linear(4, 4)
            optimizer = torch.optim.Adam(net.parameters(), 0.1)
            model, stepping = fabric.setup(net, optimizer)
            fabric.backward(model(torch.ones(2, 4)).square().mean())
            stepping.step()
            alive.append(weakref.ref(net))
            if number == 1 and fabric.global_rank == 0:
                kept.append(net)  # it is given back full
            del net, optimizer, model, stepping
            gc.collect()
        return sum(one() is not None for one in alive)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3_in_process")
    assert fabric.launch(train) == 2  # the last one, and what somebody keeps
    assert kept[0].weight.shape == (4, 4)
    assert len(fabric.strategy.held) == 0
