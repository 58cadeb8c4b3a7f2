"""Fine-tune a decoder of Hugging Face with peft's LoRA adapters, under ZeRO stage 3.

    python -m examples.recipes.lora
    python -m examples.recipes.lora --base my_llama --strategy zero3 --accelerator gpu --devices 8

Without `--base` a small Llama over bytes is trained first, which knows English. The adapters teach
it English in capitals. They are saved by peft, and loaded again by peft, without this package.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch.utils.data import DataLoader

import lightning_shard  # noqa: F401  the import registers the names of the strategies
from examples.train_gpt import ENGLISH, Text
from examples.train_llama import Llama, load_llama

try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ModuleNotFoundError as error:
    raise SystemExit(f"This recipe needs {error.name}: pip install peft") from None


class LoRALlama(Llama):
    """The same network, frozen, with low-rank adapters of its layers.

    Args:
        rank: Of the adapters.
        path: As of `Llama`, and so are the others.

    Source:
        LoRA, arXiv:2106.09685; peft's implementation.
    """

    def __init__(
        self,
        rank: int = 8,
        path: Path | None = None,
        width: int = 64,
        num_layers: int = 4,
        learning_rate: float = 1e-2,
    ) -> None:
        super().__init__(path, width, num_layers, learning_rate)
        self.save_hyperparameters()
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        self.network = get_peft_model(self.network, adapters).train()


def fit(model: Llama, data: Text, steps: int, **options: Any) -> L.Trainer:
    """Train for so many steps; nothing is printed or saved."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_steps=steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        **quiet,
        **options,
    )
    trainer.fit(model, datamodule=data)
    return trainer


@torch.no_grad()
def loss_of(network: torch.nn.Module, data: Text) -> float:
    """Return the mean loss of some text that nothing was trained on, in nats per byte."""
    data.setup("validate")
    loader = DataLoader(data.val_blocks, batch_size=256)
    text, _ = next(iter(loader))  # labels are shifted by the network
    return network.eval()(input_ids=text, labels=text).loss.item()


def main() -> None:
    """Make a base, fine-tune it, save the adapters, and load them again."""
    parser = argparse.ArgumentParser(description="Fine-tune a Llama with LoRA under ZeRO stage 3.")
    parser.add_argument("--base", type=Path, help="a folder of Hugging Face's")
    parser.add_argument("--folder", type=Path, default=Path("build/recipes/lora"))
    parser.add_argument("--strategy", default="zero3_in_process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")
    L.seed_everything(0, verbose=False)
    base = options.base or options.folder / "base"
    if not (base / "config.json").exists():
        english = Llama(num_layers=2, learning_rate=1e-2)
        fit(english, Text(batch_size=64), 100, accelerator="cpu", devices=1)
        english.network.save_pretrained(base)
    capitals = options.folder / "capitals.txt"
    capitals.write_text(ENGLISH.read_text("utf-8").upper(), "utf-8")
    data = Text(capitals, batch_size=64 // options.devices // options.num_nodes)
    print(f"the base alone     {loss_of(load_llama(base), data):.2f} nats per byte")
    L.seed_everything(0, verbose=False)
    model = LoRALlama(path=base)
    places = {name: getattr(options, name) for name in ("strategy", "accelerator", "devices")}
    trainer = fit(model, data, options.steps, num_nodes=options.num_nodes, **places)
    if trainer.is_global_zero:
        model.network.save_pretrained(options.folder / "adapters")
        loaded = PeftModel.from_pretrained(load_llama(base), options.folder / "adapters")
        print(f"with its adapters  {loss_of(loaded, data):.2f} nats per byte")


if __name__ == "__main__":
    main()
