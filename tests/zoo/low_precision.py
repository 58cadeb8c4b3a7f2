"""Llamas whose layers are quantised by bitsandbytes and torchao, as small as they come."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, CONTEXT, WIDTH = 64, 16, 128


def llama() -> nn.Module:
    """Return a Llama of four layers, whose weights are whole blocks of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def with_adapters(network: Any, **options: Any) -> nn.Module:
    """Put peft's LoRA around every linear layer but the head."""
    from peft import LoraConfig, get_peft_model

    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    return get_peft_model(network, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **settings))


def _exchanged(network: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    layers = {n: one for n, one in network.named_modules() if isinstance(one, nn.Linear)}
    for name, layer in layers.items():
        if name != "lm_head":
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, make(layer))
    return network


def four_bits(**options: Any) -> nn.Module:
    """Return bitsandbytes' NF4 under LoRA."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    def made(layer: nn.Linear) -> nn.Module:
        sizes, kind = (layer.in_features, layer.out_features), {"quant_type": "nf4"} | options
        new = Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, **kind)
        new.weight = Params4bit(layer.weight.data, requires_grad=False, module=new, **kind)
        return new.to("cpu")

    return with_adapters(_exchanged(llama(), made))


def eight_bits() -> nn.Module:
    """Return bitsandbytes' eight bits under LoRA."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    def made(layer: nn.Linear) -> nn.Module:
        sizes = layer.in_features, layer.out_features
        new = Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        weight = layer.weight.data
        new.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return new.to("cpu")

    return with_adapters(_exchanged(llama(), made))


def inner_tensors() -> nn.Module:
    """Return torchao's weights of eight bits, in one tensor with their scales, and a head."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    network = llama().requires_grad_(False)
    head = network.get_submodule("lm_head")
    quantize_(
        network,
        Int8WeightOnlyConfig(),
        filter_fn=lambda one, _: isinstance(one, nn.Linear) and one is not head,
    )
    head.requires_grad_(True)
    return network


def from_pretrained(folder: Path, *, checkpointing: bool, **options: Any) -> nn.Module:
    """Load four bits and prepare them for adapters by the calls that peft's pages tell."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not folder.exists():
        with torch.random.fork_rng():
            llama().save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    network = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}
    )
    network.config.use_cache = False
    reentrant = {"use_reentrant": False} if checkpointing else None
    network = prepare_model_for_kbit_training(
        network,
        use_gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs=reentrant,
    )
    return with_adapters(network, **options)


def float8(recipe: str) -> nn.Module:
    """Return torchao's float8 layers, which compute what a GPU would."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(
        llama(),
        config=config,
        module_filter_fn=lambda one, name: isinstance(one, nn.Linear) and "lm_head" not in name,
    )
