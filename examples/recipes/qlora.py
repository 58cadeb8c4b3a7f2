"""Fine-tune a Llama whose weights have 4 bits by LoRA, under ZeRO stage 3, by Hugging Face's calls.

    python -m examples.recipes.qlora
    python -m examples.recipes.qlora --base my_llama --strategy zero3 --accelerator gpu --devices 8

As in the recipe `lora`, a small Llama that knows English is taught English in capitals. Its base is
loaded in NF4, of which each rank keeps a shard; AdamW keeps the adapters' state in 8 bits. In the
end peft's adapters are merged into the base in its own precision, without this package.
"""

import argparse
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch

import lightning_shard  # noqa: F401  the import registers the names of the strategies
from examples.train_gpt import ENGLISH, Text

try:
    import bitsandbytes
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from examples.recipes.lora import fit, loss_of
    from examples.train_llama import Llama, load_llama
except ModuleNotFoundError as error:
    raise SystemExit(f"This recipe needs {error.name}: pip install {error.name}") from None


class QLoRALlama(L.LightningModule):
    """A Llama of 4 bits, frozen, with low-rank adapters of its layers.

    Source:
        QLoRA, arXiv:2305.14314; the calls are those of peft's guide to quantization.
    """

    def __init__(self, path: Path, rank: int = 8, learning_rate: float = 1e-2) -> None:
        super().__init__()
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        base = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=four_bits, device_map={"": "cpu"}
        )
        base.config.use_cache = False
        base = prepare_model_for_kbit_training(
            base, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        self.network = get_peft_model(base, adapters).train()
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss of each next byte."""
        loss: torch.Tensor = self.network(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Update the adapters, with a state of 8 bits."""
        trained = [param for param in self.parameters() if param.requires_grad]
        optimizer: torch.optim.Optimizer
        optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=self.learning_rate)
        return optimizer


def main() -> None:
    """Make a base, fine-tune it in 4 bits, merge the adapters into the base as it was."""
    parser = argparse.ArgumentParser(description="Fine-tune a Llama of 4 bits with LoRA.")
    parser.add_argument("--base", type=Path, help="a folder of Hugging Face's")
    parser.add_argument("--folder", type=Path, default=Path("build/recipes/qlora"))
    parser.add_argument("--strategy", default="zero3_in_process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec|in eval mode)")
    L.seed_everything(0, verbose=False)
    base = options.base or options.folder / "base"
    if not (base / "config.json").exists():
        english = Llama(num_layers=2, learning_rate=1e-2)
        fit(english, Text(batch_size=64), 100, accelerator="cpu", devices=1)
        english.network.save_pretrained(base)
    capitals = options.folder / "capitals.txt"
    capitals.write_text(ENGLISH.read_text("utf-8").upper(), "utf-8")
    data = Text(capitals, batch_size=64 // options.devices)
    print(f"the base alone     {loss_of(load_llama(base), data):.2f} nats per byte")
    L.seed_everything(0, verbose=False)
    places = {name: getattr(options, name) for name in ("strategy", "accelerator", "devices")}
    model = QLoRALlama(base)
    trainer = fit(model, data, options.steps, **places)
    if trainer.is_global_zero:
        model.network.save_pretrained(options.folder / "adapters")
        loaded = PeftModel.from_pretrained(load_llama(base), options.folder / "adapters")
        merged = loaded.merge_and_unload()
        print(f"merged afterwards  {loss_of(merged, data):.2f} nats per byte")


if __name__ == "__main__":
    main()
