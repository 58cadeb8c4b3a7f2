"""What is noted while a module is built on meta, and that it gives a normal start's values."""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from examples.train_gpt import GPT
from lightning_shard.data_parallel.deferred_init.recorder import LOADERS, recording
from lightning_shard.data_parallel.deferred_init.tape import recipe_of
from lightning_shard.errors import ConfigError
from tests.data_parallel.deferred_init.models import Odd, built_with, values


def build(name: str) -> nn.Module:
    """Build a module; those of transformers under the sizes of a test."""
    if name == "odd":
        return Odd()
    if name in ("gpt", "tied gpt"):
        tied = name == "tied gpt"
        return GPT(context=8, num_layers=2, num_heads=2, width=16, tie_embeddings=tied)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        return nn.TransformerEncoder(layer, 2)
    return hugging_face(name)


def hugging_face(name: str) -> nn.Module:
    """Build a small model of transformers."""
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4}
    words = {"vocab_size": 64, **sizes}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16
        )
        return transformers.AutoModelForCausalLM.from_config(config)
    if name == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **words)
        return transformers.AutoModelForCausalLM.from_config(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**words))
    config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("to_meta", [True, False])
@pytest.mark.parametrize(
    "name", ["odd", "gpt", "tied gpt", "encoder", "gpt2", "llama", "bert", "vit"]
)
@pytest.mark.few_cases(9)
def test_values_and_generator_are_those_of_a_normal_start(name: str, to_meta: bool) -> None:
    torch.manual_seed(5)
    normal = build(name)
    following = torch.rand(3)
    torch.manual_seed(5)
    module = built_with(lambda: build(name), to_meta=to_meta)
    assert torch.equal(torch.rand(3), following)
    with_elements = {one for one, param in module.named_parameters() if not param.is_meta}
    assert with_elements <= {"gamma"}  # which torch 2.11 does not draw on meta
    own = dict(values(normal))
    made = dict(values(module))
    assert made.keys() == own.keys()
    for one, value in made.items():
        assert torch.equal(value, own[one]), one
        assert value.stride() == own[one].stride() or value.is_contiguous(), one
    flags = [param.requires_grad for param in module.parameters()]
    assert flags == [param.requires_grad for param in normal.parameters()]


def test_new_tensors_have_the_format_that_was_the_default_then() -> None:
    def built() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.Embedding(4, 4)
        finally:
            torch.set_default_dtype(before)

    torch.manual_seed(1)
    normal = built()
    torch.manual_seed(1)
    module = built_with(built, to_meta=True)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(dict(values(module))["weight"], normal.weight)


def test_a_context_inside_another_notes_each_draw_once() -> None:
    torch.manual_seed(2)
    normal, following = nn.Linear(3, 3), torch.rand(2)
    torch.manual_seed(2)
    with recording(to_meta=False), recording(to_meta=True):
        module = nn.Linear(3, 3)
    assert torch.equal(torch.rand(2), following)
    assert torch.equal(dict(values(module))["weight"], normal.weight)


def test_a_module_may_have_tensors_on_the_cpu_beside_those_on_meta() -> None:
    class Mixed(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.here = nn.Linear(2, 2, device="cpu")
            self.later = nn.Linear(2, 2)
            with torch.no_grad():
                self.later.weight.copy_(table).add_(self.here.weight)

    table = torch.arange(4.0).view(2, 2)
    torch.manual_seed(3)
    normal = Mixed(table)
    torch.manual_seed(3)
    module = built_with(lambda: Mixed(table), to_meta=True)
    assert [param.is_meta for param in module.parameters()] == [False, False, True, True]
    for name, value in values(module):
        assert torch.equal(value, dict(values(normal))[name]), name


def test_a_large_tensor_that_changes_after_it_was_copied_in_is_refused() -> None:
    table = torch.ones(600, 500)

    def built() -> nn.Module:
        layer = nn.Embedding(600, 500)
        with torch.no_grad():
            layer.weight.copy_(table)
        return layer

    module = built_with(built, to_meta=True)
    assert dict(values(module))["weight"].mean() == 1
    table.zero_()
    with pytest.raises(ConfigError, match=r"shape \(600, 500\) was copied into a module on meta"):
        dict(values(module))


def test_what_is_computed_from_a_tensor_that_was_made_elsewhere_is_refused() -> None:
    unknown = torch.ones(3, device="meta")
    with recording(to_meta=False):
        module = nn.ParameterList([nn.Parameter(unknown * 2)])
    with pytest.raises(
        ConfigError, match="a tensor on meta \\(12 bytes\\) that was made elsewhere"
    ):
        dict(values(module))


def test_outside_the_context_nothing_is_noted() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    assert recipe_of(module.weight) is None


def test_an_array_of_a_tensor_on_meta_refuses_changes_that_would_be_lost() -> None:
    with recording(to_meta=True):
        weight = torch.zeros(3)
        array = weight.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


class Skipped(nn.Module):
    """Has a layer that its code puts on meta and then makes, and one whose own code does."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = nn.utils.skip_init(nn.Linear, 4, 4)
        self.skipped.reset_parameters()
        self.emptied = nn.Linear(4, 4, device="meta").to_empty(device="cpu")
        self.emptied.reset_parameters()
        self.plain = nn.Linear(4, 4)


@pytest.mark.parametrize(("module", "kind"), LOADERS.items())
def test_classes_of_transformers_that_read_values_themselves_are_known(
    module: str, kind: str
) -> None:
    loader = getattr(import_module(module), kind)
    assert loader.from_pretrained.__wrapped__.__qualname__.endswith(".from_pretrained")


def test_what_code_put_on_meta_itself_drew_random_numbers_once_more() -> None:
    torch.manual_seed(0)
    expected = Skipped()
    torch.manual_seed(0)
    got = dict(values(built_with(Skipped, to_meta=True)))
    for name, value in expected.named_parameters():
        assert torch.equal(got[name], value), name
