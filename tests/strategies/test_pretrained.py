"""Hugging Face folders straight into the shards or parts of ranks, under every strategy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import CheckpointError, load_safetensors
from tests.checkpoint.sharded.runs import LAYOUTS, quiet_trainer
from tests.examples.commands import ignoring_advice
from tests.strategies.rises import watched_starts

pytestmark = ignoring_advice(".*microbatches are")

WORDS = {"vocab_size": 128, "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
WORDS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LARGEST = 64 * 128 * 4  # bytes of a matrix of its, in float32


def config(name: str) -> Any:
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "tied": transformers.LlamaConfig}
    kinds |= {"qwen3": transformers.Qwen3Config, "mixtral": transformers.MixtralConfig}
    more = {"tied": {"tie_word_embeddings": True}, "mixtral": {"num_local_experts": 4}}
    return kinds[name](use_cache=False, **WORDS, **more.get(name, {}))


def build(name: str) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config(name))


class Pretrained(L.LightningModule):
    """Builds a model on meta, and reads a folder into it; it learns nothing."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.name, self.folder, self.made_in, self.network = name, folder, dtype, None

    def configure_model(self) -> None:
        if self.network is None:
            with torch.device("meta"), default_dtype(self.made_in):
                self.network = build(self.name)
            load_safetensors(self.network, self.folder)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(128).view(16, 8)), batch_size=2)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Folder = Callable[..., tuple[Path, nn.Module]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Write a folder as `save_pretrained` does, and return it with the model."""

    def make(name: str, dtype: torch.dtype, *, in_parts: bool) -> tuple[Path, nn.Module]:
        torch.manual_seed(3)
        model = build(name).to(dtype)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path, max_shard_size="200KB" if in_parts else "1GB")
        assert (path / "model.safetensors.index.json").exists() == in_parts
        return path, model

    return make


def check_weights(found: nn.Module, stored: nn.Module) -> None:
    expected = dict(stored.named_parameters())
    for name, param in found.named_parameters():
        assert torch.equal(param, expected[name].to(param.dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one not in ("zero3-3", "copies-4")])
@pytest.mark.few_cases(1)
def test_every_strategy_reads_a_folder_in_parts_into_what_its_ranks_hold(
    layout: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stored = folder("tied", torch.bfloat16, in_parts=True)
    rises = watched_starts(monkeypatch)
    module = Pretrained("tied", path)
    by_block = layout in ("tensor-4", "hybrid3-8")  # a unit for each block
    options = {"bucket_mb": 1e-3} if by_block else {}
    quiet_trainer(LAYOUTS[layout](**options), max_steps=1).fit(module)
    check_weights(module.network, stored)
    assert module.network.lm_head.weight is module.network.model.embed_tokens.weight
    full = sum(param.numel() for param in stored.parameters()) * 4
    parts = {"tensor-4": 4, "hybrid-8": 4, "pipeline-2": 2, "zero3-4": 4}.get(layout, 1)
    largest_unit = full / 7  # a block, or the embedding
    for held, above in rises:
        assert held < full / parts + largest_unit
        assert above < largest_unit + 3 * LARGEST


@pytest.mark.parametrize("layout", ["zero2-2", "tensor-4", "pipeline-2"])
@pytest.mark.parametrize(
    ("name", "stored_as", "made_in"),
    [
        ("qwen3", torch.float32, torch.bfloat16),
        ("mixtral", torch.bfloat16, torch.float32),
        ("llama", torch.float32, torch.float32),
    ],
)
@pytest.mark.few_cases(1)
def test_formats_differ_norms_are_not_cut_and_experts_are_put_together(
    name: str, stored_as: torch.dtype, made_in: torch.dtype, layout: str, folder: Folder
) -> None:
    path, stored = folder(name, stored_as, in_parts=name == "mixtral")
    module = Pretrained(name, path, made_in)
    quiet_trainer(LAYOUTS[layout](), max_steps=1).fit(module)
    assert {param.dtype for param in module.network.parameters()} == {made_in}
    check_weights(module.network, stored)


class Telling(Pretrained):
    """Tells what its ranks raised."""

    def __init__(self, name: str, folder: Path, told: dict[int, str]) -> None:
        super().__init__(name, folder)
        self.told = told

    def configure_model(self) -> None:
        try:
            super().configure_model()
        except CheckpointError as error:
            self.told[self.trainer.strategy.mesh_rank] = str(error)
            self.trainer.strategy.barrier()
            raise


class Told(dict[int, str]):
    """Is the same for the copies that ranks of one process are given."""

    def __deepcopy__(self, memo: object) -> "Told":
        return self


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["zero3-4", "tensor-4", "pipeline-2"])
def test_every_rank_names_what_does_not_fit(layout: str, folder: Folder) -> None:
    path, _ = folder("llama", torch.float32, in_parts=False)
    told = Told()
    with pytest.raises(CheckpointError):
        quiet_trainer(LAYOUTS[layout](), max_steps=1).fit(Telling("qwen3", path, told))
    assert len(told) == int(layout[-1])
    for text in told.values():
        assert "Missing key(s): 'model.layers.0.self_attn.q_norm.weight'" in text
        assert "'model.layers.0.self_attn.q_proj.weight' has shape (64, 64), expected" in text
