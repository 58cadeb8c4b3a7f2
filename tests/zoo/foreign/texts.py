"""litgpt and x-transformers: networks of texts, in a LightningModule of one's own."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.features.columns import Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.batches import Batches, logged
from tests.zoo.foreign.declared import use
from tests.zoo.packages import add_folder
from tests.zoo.subjects import CONTEXT, VOCABULARY, Trained, texts

WIDTH, HEADS, LAYERS = 16, 2, 4


class Tokens(Trained):
    """Predicts the next token from a network that returns logits."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch[0][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0])


def _trained(here: Here, module: Trained) -> tuple[Any, Report]:
    trainer, data = here.trainer(max_epochs=1), Batches(here, TensorDataset(texts()))
    trainer.fit(module, datamodule=data)
    return trainer, {
        "weights": weights(module),
        "logged": logged(trainer),
        "predicted": torch.cat(trainer.predict(module, datamodule=data)),
    }


def _gpt(**sizes: Any) -> nn.Module:
    add_folder()
    from litgpt import GPT, Config

    torch.manual_seed(5)
    config = Config(
        name="tiny",
        block_size=2 * CONTEXT,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        intermediate_size=2 * WIDTH,
        **sizes,
    )
    return GPT(config)


def _litgpt(here: Here, **sizes: Any) -> Report:
    from litgpt.generate.base import generate

    module = Tokens(_gpt(**sizes))
    trainer, report = _trained(here, module)
    trainer.save_checkpoint(here.folder / "lightning.ckpt")
    torch.save(module.network.state_dict(), here.folder / "lit_model.pth")
    network = _gpt(**sizes)
    network.load_state_dict(torch.load(here.folder / "lit_model.pth"))
    network.set_kv_cache(batch_size=1)
    prompt, length = torch.tensor([1, 2, 3]), CONTEXT
    generated = generate(network.eval(), prompt, max_returned_tokens=length, top_k=1)
    loaded = torch.load(here.folder / "lightning.ckpt", weights_only=True)["state_dict"]
    return report | {"generated": generated.tolist(), "loaded": loaded}


LITGPT_CALLS = "`GPT`, `Config`; `lit_model.pth` loaded, `set_kv_cache`, `generate`"


@use("litgpt", "GPT", LITGPT_CALLS)
def neox(here: Here) -> Report:
    return _litgpt(here)


@use("litgpt", "GPT as a Llama", LITGPT_CALLS)
def llama(here: Here) -> Report:
    return _litgpt(
        here,
        n_query_groups=1,
        bias=False,
        parallel_residual=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
    )


def _decoder() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(5)
    layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=8, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=2 * CONTEXT, attn_layers=layers)


class Autoregressive(Trained):
    """Trains with the package's own wrapper, which returns a loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.network(batch[0])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network.net(batch[0])


@use(
    "x-transformers",
    "TransformerWrapper of a Decoder, in an AutoregressiveWrapper",
    "its loss; `state_dict`, `load_state_dict`, `generate`",
    refused=by("pipeline_parallel", "is a ModuleList, which a step does not call"),
)
def decoder(here: Here) -> Report:
    from x_transformers import AutoregressiveWrapper

    module = Autoregressive(AutoregressiveWrapper(_decoder()))
    _, report = _trained(here, module)
    torch.save(module.network.state_dict(), here.folder / "weights.pt")
    again = AutoregressiveWrapper(_decoder())
    again.load_state_dict(torch.load(here.folder / "weights.pt"))
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return report | {"generated": again.generate(prompts, CONTEXT, temperature=0.0).tolist()}
