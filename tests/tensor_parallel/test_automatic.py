"""What an automatic plan splits, what it leaves full, and what it refuses."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.planning.simulated_model import copied_with
from lightning_shard.tensor_parallel.automatic import automatic_plan, check_layouts
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.tensor_parallel.styles import style_name
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.models import MODELS, SPLIT_MODELS
from tests.tensor_parallel.test_split import compare

WIDTH, HIDDEN, HEADS = 16, 32, 4


def found(model: nn.Module, num_ranks: int = 2) -> dict[str, str]:
    """Return pattern and style of what is split."""
    return {one.pattern: style_name(one.style) for one in automatic_plan(model, num_ranks)}


def plan_of(make: Callable[[], nn.Module], num_ranks: int = 2) -> dict[str, Any]:
    return {layer.pattern: layer.style for layer in automatic_plan(make(), num_ranks)}


class Net(nn.Module):
    """A block within a model, and another pair that can always be split."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.sure = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.sure(self.block(x))


class FeedForward(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.between(self.first(x)))


def blocks(model: nn.Module, num_ranks: int = 2) -> dict[str, str]:
    """Return what is split of the block of a `Net`."""
    plan = found(Net(model), num_ranks)
    return {name.removeprefix("block."): style for name, style in plan.items() if "block" in name}


@pytest.mark.parametrize(
    "between", [F.gelu, torch.tanh, nn.Dropout(0.5), lambda x: x * x.sigmoid()]
)
def test_a_pair_with_an_elementwise_function_between_is_split(between: Any) -> None:
    assert blocks(FeedForward(between)) == {"first": "colwise", "second": "rowwise"}


@pytest.mark.parametrize(
    "between",
    [lambda x: x.softmax(-1), lambda x: x.cumsum(-1), lambda x: x.flip(-1), nn.LayerNorm(HIDDEN)],
)
def test_a_pair_with_another_function_between_is_left_full(between: Any) -> None:
    assert blocks(FeedForward(between)) == {}


def only_images(x: Tensor) -> Tensor:
    _, _, _, _ = x.shape
    return torch.cat((x[..., :4].exp(), x[..., 4:]), -1)


def zeroed_column(x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0].mul_(2)
    return x


@pytest.mark.parametrize(
    "between",
    [
        zeroed_column,
        only_images,
        nn.BatchNorm1d(HIDDEN),
        lambda x: torch.cat((x[:, :16].relu(), x[:, 16:]), 1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x * x.flip(1) if x.ndim == 2 else x,
        lambda x: x.flip(3) if x.ndim == 4 else x,
    ],
)
def test_a_pair_is_tried_with_rows_and_images_as_well(between: Any) -> None:
    """Dimension 1 of sequences is a position: rows (batch, width) were cut, without a word."""
    assert blocks(FeedForward(between)) == {}


class OnlyInTraining(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.5, self.training)
        return self.second(self.between(hidden) if self.training else hidden.relu())


class Counting(FeedForward):
    """A function between that is another after each call."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(between)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x) * self.calls
        return self.second(self.between(hidden) if self.training else hidden.relu())


class Quiet(OnlyInTraining):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(self.between(hidden) if self.training else hidden.relu())


@pytest.mark.parametrize("kind", [Quiet, Counting])
def test_a_pair_is_tried_in_training_as_well(kind: type[FeedForward]) -> None:
    """Trials evaluated: what only training computes of the whole width was cut."""
    assert blocks(kind(lambda x: x - x.mean(-1, keepdim=True))) == {}
    assert blocks(kind(torch.tanh)) == {"first": "colwise", "second": "rowwise"}


def test_what_is_random_in_training_is_tried_in_evaluation_alone() -> None:
    assert blocks(OnlyInTraining(torch.tanh)) == {"first": "colwise", "second": "rowwise"}


class Leak(FeedForward):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).relu()
        return self.second(hidden), hidden


def test_a_pair_whose_hidden_activation_is_used_elsewhere_is_left_full() -> None:
    assert blocks(Leak(F.relu)) == {}


class GateOfInput(FeedForward):
    """A factor between the layers that comes from the input past the first one."""

    def __init__(self) -> None:
        super().__init__(F.relu)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu() * self.gate(x))


def test_a_pair_whose_region_a_gradient_leaves_elsewhere_is_left_full() -> None:
    """Forward all is right; but each rank would have a part of the gate's gradient."""
    assert blocks(GateOfInput()) == {}


class Scaled(FeedForward):
    def __init__(self) -> None:
        super().__init__(F.relu)
        self.scale = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.scale(self.first(x)))


def test_parameters_between_the_layers_have_the_gradient_of_all_ranks() -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net(Scaled()).double()

    plan = plan_of(make)
    assert blocks(Scaled())["scale"] == "replicated_with_grad_allreduce"
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    compare(make, plan, lambda model: model(x).square().mean(), 2)


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def test_a_fused_gate_is_split_in_each_half() -> None:
    assert blocks(FusedGate()) == {"gate_up": "packed_colwise(2)", "down": "rowwise"}


def test_a_chain_of_layers_is_split_in_pairs() -> None:
    sizes = (WIDTH, HIDDEN, WIDTH, HIDDEN, WIDTH)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
    chain = nn.Sequential(*(one for layer in layers for one in layer))
    names = ("block.0", "block.2", "block.4", "block.6", "sure.0", "sure.2")
    forms = ("colwise", "rowwise") * 3
    assert found(Net(chain)) == dict(zip(names, forms, strict=True))


class FusedAttention(nn.Module):
    """Query, key and value in one matrix: one after the other, or of each head together."""

    def __init__(self, *, by_heads: bool, num_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.by_heads = by_heads
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        if self.by_heads:
            query, key, value = mixed.unflatten(-1, (self.num_heads, 3, -1)).unbind(-2)
        else:
            query, key, value = mixed.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        heads = [one.transpose(1, 2) for one in (query, key, value)]
        return self.back(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("by_heads", "style"), [(False, "packed_colwise(3)"), (True, "colwise")])
def test_a_fused_projection_is_split_by_head_as_it_is_laid_out(by_heads: bool, style: str) -> None:
    assert blocks(FusedAttention(by_heads=by_heads)) == {"mix": style, "back": "rowwise"}


class BiasOfHeads(FusedAttention):
    """Is given something of each head, which its caller does not split."""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        assert bias is None or bias.shape[0] == HEADS
        return super().forward(x)


def test_an_attention_that_asks_for_more_is_not_tried_without_it() -> None:
    """MPT's runs without its bias of each head, and then failed with it."""
    assert blocks(BiasOfHeads(by_heads=False)) == {}


class Grouped(nn.Module):
    """Heads of keys and values that are fewer than those of queries."""

    def __init__(self, num_heads: int = HEADS, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.width = num_heads, num_kv_heads, 4
        self.q_proj = nn.Linear(WIDTH, num_heads * self.width)
        self.k_proj = nn.Linear(WIDTH, num_kv_heads * self.width)
        self.v_proj = nn.Linear(WIDTH, num_kv_heads * self.width)
        self.o_proj = nn.Linear(num_heads * self.width, WIDTH)
        self.q_norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        each = self.num_heads // self.num_key_value_heads
        key, value = (one.repeat_interleave(each, dim=1) for one in (key, value))
        mixed = F.scaled_dot_product_attention(self.q_norm(query), key, value)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kv_heads", "num_ranks", "style"),
    [(2, 2, "colwise"), (2, 4, "shared_heads(2)"), (1, 2, "shared_heads(1)"), (4, 4, "colwise")],
)
def test_keys_and_values_of_fewer_heads_than_ranks_are_shared(
    kv_heads: int, num_ranks: int, style: str
) -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net(Grouped(num_kv_heads=kv_heads)).double()

    assert blocks(make().block, num_ranks) == {
        "q_proj": "colwise",
        "k_proj": style,
        "v_proj": style,
        "o_proj": "rowwise",
        "q_norm": "replicated_with_grad_allreduce",
    }
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    compare(make, plan_of(make, num_ranks), lambda model: model(x).square().mean(), num_ranks)


@pytest.mark.parametrize(
    ("make", "num_ranks", "message"),
    [
        (lambda: FusedAttention(by_heads=False), 8, "4 heads, .* 8 ranks .* of 1, 2, 4"),
        (lambda: Grouped(6, 3), 2, "6 heads, and 3 of keys and values, which 2 .* of 1, 3, 6"),
        (lambda: nn.MultiheadAttention(WIDTH, HEADS), 8, "block has 4 heads, which 8 .* 1, 2, 4"),
        (lambda: MODELS["llama"](), 8, "self_attn .* 4 heads, and 2 of keys .* 1, 2, 4"),
        (lambda: MODELS["gpt2"](), 3, "4 heads, .* 3 ranks .* 1, 2, 4"),
    ],
)
def test_more_ranks_than_heads_names_the_sizes_that_work(
    make: Callable[[], nn.Module], num_ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        automatic_plan(Net(make()), num_ranks)


def test_a_model_with_nothing_to_split_is_refused() -> None:
    message = (
        r"^Use strategy='zero3', .*found nothing in Sequential to split over 2 ranks\. Its largest "
        r"layers are '0' \(Conv2d, 20 parameters\), '1' \(Linear, 10 parameters\)\. .*"
        r"plan=\{'1': 'colwise_gather_output'\}"
    )
    with pytest.raises(ConfigError, match=message):
        automatic_plan(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2), nn.ReLU()), 2)


class Grown(FeedForward):
    """Takes seven positions only, and what it computes in parts it knows by its own width."""

    def __init__(self, *, positions: int, hidden: int) -> None:
        super().__init__(F.relu)
        self.positions, self.hidden = positions, hidden

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.positions:
            raise ValueError(f"takes {self.positions} positions, got {x.shape[1]}")
        hidden = self.first(x)
        if hidden.shape[-1] != self.hidden:
            raise ValueError(f"is {self.hidden} wide, got {hidden.shape[-1]}")
        return self.second(hidden)


@pytest.mark.parametrize(
    ("positions", "raised"),
    [(7, "ValueError: takes 7 positions, got 6"), (6, f"ValueError: is {HIDDEN} wide, got")],
)
def test_what_a_trial_raises_is_told(positions: int, raised: str) -> None:
    """What a trial raised was swallowed."""
    block = Grown(positions=positions, hidden=HIDDEN)
    with pytest.raises(ConfigError, match=rf"A trial of 'first' and 'second' raised {raised}"):
        automatic_plan(block, 2)


class Words(nn.Module):
    def __init__(self, vocabulary: int, embedding: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.words = embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(8, WIDTH)
        self.net = Net(nn.Identity())
        self.logits = nn.Linear(WIDTH, vocabulary, bias=False)
        self.logits.weight = self.words.weight


def test_a_vocabulary_is_split_with_its_output_layer() -> None:
    plan = found(Words(24))
    assert plan["words"] == "embedding_rowwise"
    assert plan["logits"] == "colwise_parted"
    assert "places" not in plan


def test_a_vocabulary_that_does_not_divide_is_left_full() -> None:
    assert not {"words", "logits"} & set(found(Words(25)))


class Amplified(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * 3


class Shifted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward((input + 1) % self.num_embeddings)


def test_an_embedding_with_a_forward_of_its_own_is_tried_out() -> None:
    assert found(Words(24, Amplified))["words"] == "embedding_rowwise"
    assert "words" not in found(Words(24, Shifted))


def test_an_embedding_s_own_forward_is_kept() -> None:
    """Gemma's embedding multiplies its rows; in parts it did not."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"table": Amplified(8, 4, padding_idx=5)}).double()

    ids = torch.tensor([0, 5, 7, 1])

    def loss(model: nn.Module) -> Tensor:
        return (model.table(ids) * torch.arange(16.0).view(4, 4)).sum()

    compare(make, {"table": "embedding_rowwise"}, loss, 2)


def test_the_layers_of_a_module_that_cannot_be_tried_out_must_be_well_known() -> None:
    class Asks(FeedForward):
        def forward(self, x: Tensor, settings: dict[str, int]) -> Tensor:
            return self.second(F.relu(self.first(x * settings["factor"])))

    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor, settings: dict[str, int]) -> Tensor:
            return self.fc2(F.relu(self.fc1(x * settings["factor"])))

    assert blocks(Asks(F.relu)) == {}
    assert blocks(Known()) == {"fc1": "colwise", "fc2": "rowwise"}


class Attached(L.LightningModule):
    """Cannot be copied: it knows a trainer, which knows process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.sure = FeedForward(F.relu)
        self.was_copied = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))

    def __deepcopy__(self, memo: Any) -> Any:
        self.was_copied = True
        return self


def test_a_lightning_module_is_not_copied_but_its_parts_are() -> None:
    model = Attached()
    plan = found(nn.ModuleDict({"inside": model}))
    assert set(plan) == {"inside.sure.first", "inside.sure.second"}
    assert not model.was_copied


def test_a_model_is_left_as_it_is_and_random_numbers_too() -> None:
    torch.manual_seed(0)
    model = Net(FeedForward(nn.Dropout(0.5)))
    calls: list[int] = []
    model.block.first.register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    automatic_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert calls == []


class Drawing(FeedForward):
    """Leaves its function out now and then, by streams that are not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() + np.random.rand() > 1:
            return x
        return super().forward(x)


def test_a_trial_draws_no_random_numbers_from_python_or_numpy() -> None:
    """Trials in training draw what blocks draw; a run drew other numbers after them."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert "sure.0" in found(Net(Drawing(torch.tanh)))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_embedding_of_positions_without_an_output_layer_is_left_full() -> None:
    assert found(MODELS["gpt2"]()) == {
        "network.transformer.wte": "embedding_rowwise",
        "network.transformer.h.*.attn.c_attn": "packed_colwise(3)",
        "network.transformer.h.*.attn.c_proj": "rowwise",
        "network.transformer.h.*.mlp.c_fc": "colwise",
        "network.transformer.h.*.mlp.c_proj": "rowwise",
        "network.lm_head": "colwise_parted",
    }


class Attended(nn.Module):
    """Looks like one of Hugging Face's: it brings a plan along."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.net = Net(Grouped())
        self._plan = plan

    @property
    def tp_plan(self) -> dict[str, str]:
        return self._plan


def test_a_model_s_own_plan_goes_first_and_is_completed() -> None:
    own = {"net.sure.0": "colwise_rep", "net.gone": "colwise"}
    model = nn.ModuleDict({"inside": Attended(own)})
    plan = found(model)
    assert plan["inside.net.sure.0"] == "colwise_gather_output"
    assert plan["inside.net.block.q_proj"] == "colwise"
    assert "inside.net.sure.2" not in plan


class OwnWords(Words):
    """Brings a plan along that splits its vocabulary, and its two layers."""

    @property
    def tp_plan(self) -> dict[str, str]:
        layers = {"net.sure.0": "colwise", "net.sure.2": "rowwise"}
        return layers | {"words": "embedding_rowwise", "logits": "colwise_rep"}


def test_a_vocabulary_that_does_not_divide_is_not_split() -> None:
    """As `resize_token_embeddings` makes one: 33 words on two ranks."""
    assert found(OwnWords(24))["words"] == "embedding_rowwise"
    plan = found(OwnWords(25))
    assert not {"words", "logits"} & set(plan)
    assert plan["net.sure.0"] == "colwise"


def test_two_layers_of_an_own_plan_that_do_not_divide_stay_full_together() -> None:
    own = {"net.sure.0": "colwise", "net.sure.2": "rowwise"}
    model = Attended(own)
    model.net.sure = nn.Sequential(nn.Linear(WIDTH, 25), nn.ReLU(), nn.Linear(25, WIDTH))
    assert not {"net.sure.0", "net.sure.2"} & set(found(model))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"net.sure.0": "mla_kv_a_proj"}, "splits 'net.sure.0' by 'mla_kv_a_proj', which is not"),
        ({"net.sure.0": "sideways"}, "unknown style 'sideways'"),
        ({"net.block": "moe_tp_experts"}, "expected a layer with parameters"),
        ({"net.sure.0": "moe_tp_experts"}, re.escape("'weight' of shape (32, 16), expected")),
    ],
)
def test_an_own_plan_that_cannot_be_followed_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        automatic_plan(Attended(plan), 2)


def test_a_split_model_s_own_forward_of_a_linear_layer_is_refused_by_rows() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    model = nn.ModuleDict({"layer": Doubled(4, 4)})
    with pytest.raises(ConfigError, match="a linear layer without a forward of its own"):
        match_plan(model, {"layer": "rowwise"})


def test_heads_that_the_ranks_share_are_full_on_each() -> None:
    def fn(rank: int) -> None:
        model = Net(Grouped(num_kv_heads=1))
        split = SplitModel(model, automatic_plan(model, 2), all_ranks())
        assert not split.groups_of(model.block.k_proj.weight)
        assert split.groups_of(model.block.q_proj.weight)
        assert (model.block.num_heads, model.block.num_key_value_heads) == (2, 1)
        split.restore()
        assert (model.block.num_heads, model.block.num_key_value_heads) == (4, 1)

    run_ranks(fn, 2)


OF_HEADS = {"block.mix": "colwise", "block.back": "rowwise"}
PACKED = {"block.mix": "packed_colwise(3)", "block.back": "rowwise"}


def check(block: nn.Module, plan: dict[str, str], num_ranks: int = 2) -> None:
    model = Net(block)
    check_layouts(model, match_plan(model, plan), num_ranks)


@pytest.mark.parametrize(
    ("block", "plan", "right"),
    [
        (FusedAttention(by_heads=False), OF_HEADS, r"packed_colwise\(3\)"),
        (FusedAttention(by_heads=True), PACKED, "colwise"),
        (
            FusedGate(),
            {"block.gate_up": "colwise", "block.down": "rowwise"},
            r"packed_colwise\(2\)",
        ),
    ],
)
def test_a_fused_projection_cut_in_the_wrong_way_is_refused(
    block: nn.Module, plan: dict[str, str], right: str
) -> None:
    """A fused projection cut in the wrong way trained another model."""
    with pytest.raises(ConfigError, match=f"computed the same with '{right}', expected that"):
        check(block, plan)


def test_what_a_trial_confirms_or_cannot_tell_is_accepted() -> None:
    check(FusedAttention(by_heads=False), PACKED)
    check(FusedAttention(by_heads=True), OF_HEADS)
    shared = dict.fromkeys(("block.q_proj", "block.k_proj", "block.v_proj"), "colwise")
    check(Grouped(num_kv_heads=2), shared | {"block.o_proj": "rowwise"})
    check(FusedAttention(by_heads=False), OF_HEADS, num_ranks=1)
    check(FusedAttention(by_heads=False), {"block.mix": "colwise_gather_output"})
    check(FusedAttention(by_heads=False), OF_HEADS, num_ranks=3)  # the automatic plan refuses it


@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_a_model_without_values_is_split_as_with_them(name: str) -> None:
    """A buffer on meta, such as a causal mask, could not be copied: attentions were left full."""
    model = SPLIT_MODELS[name]()
    without = copied_with(lambda one: one.detach().to("meta"), model)
    assert {one.name: one.style for one in automatic_plan(without, 2)} == {
        one.name: one.style for one in automatic_plan(model, 2)
    }
