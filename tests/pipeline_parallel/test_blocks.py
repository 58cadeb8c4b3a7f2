"""Which list of blocks is found in a model, and what is said where none or several fit."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import transformers
from torch import nn

from examples.train_gpt import GPT
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import check_calls, find_blocks

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
TEXT = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}


def tiny_gpt(tie_embeddings: bool = False) -> nn.Module:
    return GPT(context=8, num_layers=3, num_heads=2, width=16, tie_embeddings=tie_embeddings)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TEXT))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **TEXT)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, **TEXT, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, **TEXT, num_local_experts=4, num_key_value_heads=2)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=40
    )
    return transformers.T5ForConditionalGeneration(config)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers, each followed by an activation."""
    layers = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


class Heads(nn.Module):
    """A block with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))
        self.out = nn.Linear(8, 32)


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = blocks
        self.head = nn.Linear(8, 2)


class Wrapper(nn.Module):
    """What a user writes around a network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def linears(count: int, width: int = 8) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (tiny_gpt, "blocks"),
        (llama, "model.layers"),
        (gpt2, "transformer.h"),
        (bert, "bert.encoder.layer"),
        (vit, "vit.layers"),
        (mixtral, "model.layers"),
        (torch_encoder, "layers"),
    ],
)
def test_the_blocks_of_known_models(make: Callable[[], nn.Module], path: str) -> None:
    model = make()
    blocks = find_blocks(model)
    assert blocks.path == path
    assert blocks.modules == tuple(model.get_submodule(f"{path}.{i}") for i in range(3))


def test_a_list_is_found_through_wrappers() -> None:
    assert find_blocks(Wrapper(Wrapper(llama()))).path == "model.model.model.layers"


def test_a_list_is_found_through_torch_compile() -> None:
    compiled = torch.compile(Net(nn.ModuleList(linears(3))), backend="eager")
    assert isinstance(compiled, nn.Module)
    model = Wrapper(compiled)
    assert find_blocks(model).path == "model._orig_mod.blocks"
    assert find_blocks(model, "model.blocks") == find_blocks(model)
    assert find_blocks(model, "model._orig_mod.blocks") == find_blocks(model)


def test_blocks_of_which_some_are_compiled_are_of_one_class() -> None:
    first, second, third = linears(3)
    model = Net(nn.ModuleList([first, torch.compile(second, backend="eager"), third]))
    assert find_blocks(model).path == "blocks"


def test_parameters_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = llama()
    assert find_blocks(model).path == "model.layers"


def test_the_model_itself_may_be_the_list() -> None:
    blocks = find_blocks(nn.Sequential(*linears(3)))
    assert (blocks.path, len(blocks), blocks.name(2)) == ("", 3, "2")


def test_a_list_within_a_block_does_not_count() -> None:
    blocks = [nn.ModuleDict({"heads": nn.ModuleList(linears(4))}) for _ in range(2)]
    assert find_blocks(Net(nn.ModuleList(blocks))).path == "blocks"


def test_a_light_list_does_not_rival_a_heavy_one() -> None:
    """As the vision tower of a language model."""
    model = nn.ModuleDict(
        {"image": nn.Sequential(*linears(6, 4)), "text": nn.Sequential(*linears(6, 16))}
    )
    assert find_blocks(model).path == "text"


def test_layers_of_a_plain_network_are_blocks() -> None:
    blocks = find_blocks(Wrapper(mlp(4, 8, 8, 2)))
    assert blocks.path == "model"
    assert [type(module).__name__ for module in blocks.modules] == ["Linear", "ReLU"] * 3


def test_blocks_between_other_layers_of_a_sequential() -> None:
    """The lists within the blocks hold too little to be meant."""
    blocks = find_blocks(nn.Sequential(nn.Linear(4, 8), Heads(), Heads(), nn.Linear(32, 2)))
    assert (blocks.path, len(blocks)) == ("", 4)


def test_blocks_in_a_sequential_of_their_own() -> None:
    inner = nn.Sequential(*linears(6))
    assert find_blocks(nn.Sequential(nn.Linear(2, 8), inner, nn.Linear(8, 16))).path == "1"


def test_layers_of_which_one_has_all_parameters_are_no_blocks() -> None:
    with pytest.raises(ConfigError, match="no list of repeated blocks"):
        find_blocks(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))


def test_two_heavy_lists_are_refused_with_what_becomes_of_the_other() -> None:
    model = t5()
    sizes = {
        path: sum(p.numel() for p in model.get_submodule(path).parameters())
        for path in ("encoder.block", "decoder.block")
    }
    listed = ", ".join(f"'{path}' (3 modules, {size:,} parameters)" for path, size in sizes.items())
    with pytest.raises(ConfigError) as info:
        find_blocks(model)
    assert listed in str(info.value)
    assert str(info.value).startswith("Name the list to cut, such as blocks='decoder.block', or")
    assert "blocks='decoder.block' encoder.block stays full on the first" in str(info.value)
    assert find_blocks(model, "decoder.block").path == "decoder.block"


def test_four_stages_of_a_convolutional_network_are_refused() -> None:
    model = nn.ModuleDict({f"layer{i}": nn.Sequential(*linears(2, 4 * i)) for i in range(1, 5)})
    with pytest.raises(ConfigError, match=r"layer1, layer2, layer3 stays full on the first"):
        find_blocks(model)


def test_a_model_without_blocks_names_its_lists() -> None:
    model = nn.ModuleDict({"trunk": mlp(4, 4, 4), "other": nn.Linear(64, 64)})
    expected = "'trunk' (4 modules, 40 parameters); name the one to cut: blocks='trunk'"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_blocks(model)


def test_a_model_without_lists_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"^Use strategy='zero3'.*'' \(Linear, 6 param"):
        find_blocks(nn.Linear(2, 2))


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'modle\.layer' names no module.*'model\.layers'"):
        find_blocks(llama(), "modle.layer")


def test_a_path_to_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'embed' is a Linear of 0 modules; expected a ModuleLi"):
        find_blocks(Net(nn.ModuleList(linears(2))), "embed")


def test_a_dictionary_of_blocks_can_be_named() -> None:
    model = Net(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    assert find_blocks(model, "blocks").modules == tuple(model.blocks.children())


def test_a_module_that_is_in_the_list_twice_is_refused() -> None:
    first, second = linears(2)
    model = Net(nn.ModuleList([first, second, first]))
    with pytest.raises(ConfigError, match=r"'blocks\.0' and 'blocks\.2' are the same module"):
        find_blocks(model)


def test_pairs_of_layers_are_never_called() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = ([nn.Linear(8, 8), nn.Linear(8, 8)] for _ in range(4))
            self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    model = Pairs()
    with pytest.raises(ConfigError, match=r"'layers.0' is a ModuleList.*Make one module"):
        check_calls(model, find_blocks(model))
