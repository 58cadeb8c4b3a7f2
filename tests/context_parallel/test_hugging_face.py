"""Hugging Face's models train with sequences in parts as on one device, attention of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

LENGTH, WINDOW = 16, 4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GEMMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW}
Inputs = dict[str, Tensor]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def text() -> Inputs:
    return {"input_ids": tokens(), "labels": tokens()}


def padded() -> Inputs:
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    return text() | {"attention_mask": mask.long()}


def packed() -> Inputs:
    """Two documents in a row, of 6 and 10 tokens, which do not look at each other."""
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)
    return text() | {"position_ids": positions}


def picture() -> Inputs:
    return {"pixel_values": drawn(2, 3, 12, 20), "labels": torch.tensor([0, 1])}


def speech() -> Inputs:
    return {"input_features": drawn(2, 8, 48), "labels": tokens(2)}


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, num_key_value_heads=2))


def gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA, attn_implementation="eager"))


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, layer_types=kinds))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attn_implementation="eager"))


def vit() -> nn.Module:
    sizes = {name: SIZES[name] for name in list(SIZES)[1:5]}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=(12, 20), patch_size=4))


def whisper() -> nn.Module:
    sides = ("encoder", "decoder")
    config = hf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **{f"{side}_layers": 2 for side in sides},
        **{f"{side}_attention_heads": 4 for side in sides},
        **{f"{side}_ffn_dim": 48 for side in sides},
    )
    return hf.WhisperForConditionalGeneration(config)


def train(
    make: Callable[[], nn.Module], inputs: Inputs, num_steps: int, is_cut: bool
) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    """Return the losses, the first step's gradients, and what was computed in full."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    cut = CutBlocks(model, all_ranks()) if is_cut else None
    losses, first = [], {}
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for grad in named.values() if is_cut else ():
            all_ranks().all_reduce(grad, "avg")
        first = first or {name: grad.clone() for name, grad in named.items()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {} if cut is None else cut.in_full.noted


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "qwen2": (qwen2, text),
    "qwen2, padded": (qwen2, padded),
    "qwen2, packed": (qwen2, packed),
    "gemma2, window, soft cap": (gemma2, text),
    "gemma3, window": (gemma3, padded),
    "llama, written out": (llama, padded),
    "vit": (vit, picture),
    "whisper": (whisper, speech),
}
QUICK = {("qwen2, packed", 3), ("gemma3, window", 8), ("vit", 2), ("whisper", 3)}


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:.*'__getitem__', which has no rule")  # windows of a cache
@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in QUICK else pytest.mark.slow)
        for name in MODELS
        for ranks in (2, 3, 4, 8)
    ],
)
def test_losses_and_gradients_are_those_of_one_device(name: str, num_ranks: int) -> None:
    """3 ranks do not divide 16 positions, nor 3 and 8 the four heads: rings, and uneven cuts."""
    make, inputs = MODELS[name]
    num_steps = 2 if (name, num_ranks) in QUICK else 20
    losses, grads, _ = train(make, inputs(), num_steps, is_cut=False)
    largest = max(grad.abs().max().item() for grad in grads.values())

    def of_rank(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
        return train(make, inputs(), num_steps, is_cut=True)

    for found, own, noted in run_ranks(of_rank, num_ranks):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
        assert own.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(own[key], grad, rtol=1e-5, atol=2e-6 * largest, msg=key)
        assert set(noted) <= {"__getitem__"}
