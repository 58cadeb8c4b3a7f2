"""Safetensors into modules: plain, on "meta", of runs in shards; Hugging Face's own names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from lightning_shard import CheckpointError, load_safetensors
from lightning_shard.checkpoint.conversion import loading
from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()


class Loading(Model):
    """Loads in one of its hooks, and does not learn."""

    def __init__(self, path: Path, hook: str) -> None:
        super().__init__()
        self.path = path
        setattr(self, hook, self.load)

    def load(self) -> None:
        """Load the whole file."""
        load_safetensors(self, self.path)

    def configure_optimizers(self) -> Any:
        """Return an optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with an index, in bfloat16."""
    torch.manual_seed(7)
    state = {name: torch.randn_like(one).bfloat16() for name, one in Model().state_dict().items()}
    folder = tmp_path_factory.mktemp("weights")
    torch.save(state, folder / "in.pt")
    consolidate(folder / "in.pt", folder / "hf", Consolidation(max_shard_bytes=300))
    assert len(list((folder / "hf").iterdir())) > 2
    return folder / "hf", state


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("layout", "hook"),
    [
        ("zero3-4", "configure_model"),
        ("zero3-4", "on_fit_start"),
        ("zero2-2", "on_train_start"),
        ("tensor-4", "configure_model"),
        ("pipeline-2", "on_fit_start"),
        ("hybrid-8", "on_train_start"),
    ],
)
def test_a_run_loads_in_its_hooks(
    layout: str, hook: str, weights: tuple[Path, dict[str, Tensor]]
) -> None:
    path, state = weights
    trained = fit(LAYOUTS[layout](), Loading(path, hook), max_steps=1)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, state[name].float()), name


class Tied(nn.Module):
    """Two names of one weight, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def test_a_module_on_meta_is_made_as_it_is_loaded(tmp_path: Path) -> None:
    whole = Tied()
    state = {name: one for name, one in whole.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "one.safetensors")
    with torch.device("meta"):
        module = Tied()
    module.norm.weight.requires_grad_(False)
    misses = load_safetensors(module, tmp_path / "one.safetensors")
    assert misses.missing_keys == ["head.weight"]
    assert module.head.weight is module.embed.weight
    assert not module.norm.weight.requires_grad
    for name, tensor in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_what_does_not_fit_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    path, module = tmp_path / "one.safetensors", nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "more": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"'bias'; Unexpected key\(s\): 'more'.*strict=False"):
        load_safetensors(module, path)
    safetensors.torch.save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(3, 3\), expected \(3, 2\)"):
        load_safetensors(module, path, strict=False)
    for name, tensor in before.items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_without_strict_the_names_that_are_there_are_loaded(tmp_path: Path) -> None:
    path, module = tmp_path / "one.safetensors", nn.Linear(2, 3)
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "more": torch.ones(1)}, path)
    assert load_safetensors(module, path, strict=False) == (["bias"], ["more"])
    assert torch.equal(module.weight, torch.ones(3, 2))


SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4}
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def gpt2() -> nn.Module:
    """Build a GPT-2, whose head is tied."""
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Build a BERT."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def mixtral() -> nn.Module:
    """Build a Mixtral, which has the experts of a layer in one parameter."""
    config = transformers.MixtralConfig(num_local_experts=4, num_key_value_heads=2, **SIZES)
    return transformers.MixtralForCausalLM(config)


def without_base(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return names as the base model has them, and masks as older versions kept them."""
    found = {name.removeprefix("transformer."): one for name, one in state.items()}
    return {**found, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}


def of_old_norms(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return names as of TensorFlow's checkpoints, and a buffer that is saved no more."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): one
        for name, one in state.items()
    }
    return {**renamed, "bert.embeddings.position_ids": torch.arange(512)[None]}


def as_they_are(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what was saved."""
    return state


def stored(model: nn.Module, folder: Path, change: Change) -> dict[str, Tensor]:
    """Save a model, change its file, and return what is in it."""
    model.save_pretrained(folder)
    state = change(safetensors.torch.load_file(folder / "model.safetensors"))
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


@pytest.mark.parametrize(
    ("build", "change", "name"),
    [
        (gpt2, without_base, "h.0.ln_1.weight"),
        (bert, of_old_norms, "bert.embeddings.LayerNorm.gamma"),
        (mixtral, as_they_are, "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_from_pretrained_reads_is_read(
    build: Any, change: Change, name: str, device: str, tmp_path: Path
) -> None:
    assert name in stored(build(), tmp_path, change)
    expected = type(build()).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.device(device):
        module = build()
    load_safetensors(module, tmp_path)
    own = dict(module.named_parameters())
    assert all(torch.equal(own[name], one) for name, one in expected.named_parameters())


def test_names_that_no_rule_knows_are_refused(tmp_path: Path) -> None:
    def other(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**without_base(state), "adapter.weight": torch.ones(1)}

    stored(gpt2(), tmp_path, other)
    with pytest.raises(CheckpointError, match=r"Unexpected key\(s\): 'adapter.weight'"):
        load_safetensors(gpt2(), tmp_path)


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    def fewer(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: one for name, one in state.items() if "1.block_sparse_moe.experts.3" not in name
        }

    stored(mixtral(), tmp_path, fewer)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.gate_up_proj.*has shape"):
        load_safetensors(mixtral(), tmp_path)


def test_without_the_rules_of_transformers_the_prefix_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(loading, "import_module", absent)
    stored(gpt2(), tmp_path, without_base)
    module, expected = gpt2(), transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    load_safetensors(module, tmp_path)
    own = dict(module.named_parameters())
    assert all(torch.equal(own[name], one) for name, one in expected.named_parameters())
    base = module.transformer
    stored(module, tmp_path, as_they_are)
    load_safetensors(base, tmp_path, strict=False)


def test_the_private_names_of_transformers_are_there() -> None:
    for name in ("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing"):
        assert hasattr(transformers.PreTrainedModel, name)
