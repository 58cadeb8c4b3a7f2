"""Hugging Face's models as small as they come, from configurations, without a download.

texts       a causal language model, or one whose every token is a label
pairs       an encoder and a decoder
classes     a classifier of words or images
sounds      a classifier of waves, and a transcriber of spectra
series      a forecast
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.zoo.subjects import (
    CONTEXT,
    NUM_SAMPLES,
    VOCABULARY,
    Language,
    Subject,
    Trained,
    generator,
    images,
    texts,
)

NUM_CLASSES = 5
_WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_DEEP = {"num_hidden_layers": 4}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * CONTEXT}
_DECODER = _WIDE | _DEEP | _TEXT | {"use_cache": False}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_ENCODER = _WIDE | _DEEP | _TEXT
_IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": NUM_CLASSES}


class Pairs(Trained):
    """What comes in is to come out, reversed."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch[0], labels=batch[0].flip(1)).loss


class Classes(Trained):
    """A classifier of whatever its network takes first."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]).logits, batch[1])


class Transcripts(Trained):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_features=batch[0], labels=batch[1]).loss


class Series(Trained):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(past_values=batch[0], future_values=batch[1]).loss


def _labels() -> Tensor:
    return torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator())


def _of_texts() -> Dataset[Any]:
    return TensorDataset(texts())


def _of_images() -> Dataset[Any]:
    return TensorDataset(*images(), _labels())


def _of_words() -> Dataset[Any]:
    return TensorDataset(texts(), _labels())


def _of_waves() -> Dataset[Any]:
    return TensorDataset(torch.randn(NUM_SAMPLES, 400, generator=generator()), _labels())


def _of_spectra() -> Dataset[Any]:
    spectra = torch.randn(NUM_SAMPLES, 8, 2 * CONTEXT, generator=generator())
    return TensorDataset(spectra, texts())


def _of_series() -> Dataset[Any]:
    values = torch.randn(NUM_SAMPLES, 20, 2, generator=generator())
    return TensorDataset(values[:, :16], values[:, 16:])


@dataclass(frozen=True, kw_only=True)
class Small:
    """A model of transformers.

    Attributes:
        name: The configuration is named `{name}Config`.
        kind: The model is named `{name}{kind}`.
    """

    name: str
    sizes: Mapping[str, Any]
    kind: str = "ForCausalLM"
    module: Callable[[nn.Module], Trained] = Language
    data: Callable[[], Dataset[Any]] = _of_texts
    flags: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Subject:
        import transformers

        config = getattr(transformers, f"{self.name}Config")(**self.sizes)
        _drop_nothing(config)
        network = getattr(transformers, f"{self.name}{self.kind}")(config)
        return Subject(module=self.module(network), data=self.data(), flags=dict(self.flags))


def _drop_nothing(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or name.startswith("mask_time_prob")):
            setattr(config, name, 0.0)


def _encoder(name: str, **sizes: Any) -> Small:
    return Small(name=name, kind="ForMaskedLM", sizes=_ENCODER | sizes, module=Language)


def _classifier(name: str, sizes: Mapping[str, Any], **flags: Any) -> Small:
    kind = "ForImageClassification"
    return Small(
        name=name, kind=kind, sizes=sizes, module=Classes, data=_of_images, flags=dict(flags)
    )


def _pair(name: str, **sizes: Any) -> Small:
    kind = "ForConditionalGeneration"
    return Small(name=name, kind=kind, sizes={"vocab_size": VOCABULARY} | sizes, module=Pairs)


_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "use_cache": False}
_BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 2 * CONTEXT}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 2 * CONTEXT, "n_embd": 32, "n_layer": 4}
_GPT |= {"n_head": 4, "use_cache": False}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

SMALL: dict[str, Small] = {
    "llama": Small(name="Llama", sizes=_GROUPED),
    "mistral": Small(name="Mistral", sizes=_GROUPED | {"sliding_window": 4}),
    "qwen2": Small(name="Qwen2", sizes=_GROUPED),
    "qwen3": Small(name="Qwen3", sizes=_GROUPED | {"head_dim": 8}),
    "gemma2": Small(name="Gemma2", sizes=_GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "phi3": Small(name="Phi3", sizes=_GROUPED | _ENDS),
    "olmo2": Small(name="Olmo2", sizes=_GROUPED | _ENDS),
    "granite": Small(name="Granite", sizes=_GROUPED | _ENDS),
    "starcoder2": Small(name="Starcoder2", sizes=_GROUPED | _ENDS),
    "stablelm": Small(name="StableLm", sizes=_GROUPED | _ENDS),
    "cohere": Small(name="Cohere", sizes=_GROUPED | _ENDS),
    "mixtral": Small(
        name="Mixtral", sizes=_GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gpt2": Small(name="GPT2", kind="LMHeadModel", sizes=_GPT | _ENDS),
    "gptj": Small(name="GPTJ", sizes=_GPT | {"rotary_dim": 4} | _ENDS),
    "gpt_neox": Small(name="GPTNeoX", sizes=_DECODER | _ENDS),
    "opt": Small(
        name="OPT", sizes=_WIDE | _DEEP | _TEXT | _ENDS | {"ffn_dim": 48, "word_embed_proj_dim": 32}
    ),
    "bloom": Small(
        name="Bloom",
        sizes={"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4} | _ENDS,
    ),
    "falcon": Small(name="Falcon", sizes=_DECODER | _ENDS),
    "mamba": Small(
        name="Mamba",
        sizes={"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4} | _DEEP | _ENDS,
    ),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta", **_ENDS),
    "albert": _encoder("Albert", embedding_size=16),
    "electra": _encoder("Electra", embedding_size=16),
    "deberta": _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8
    ),
    "distilbert": Small(
        name="DistilBert",
        kind="ForSequenceClassification",
        sizes={"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4}
        | {"num_labels": NUM_CLASSES, "max_position_embeddings": 2 * CONTEXT},
        module=Classes,
        data=_of_words,
    ),
    "t5": _pair(
        "T5",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "bart": _pair("Bart", **_BART, **_ENDS, decoder_start_token_id=2),
    "vit_hf": _classifier("ViT", _WIDE | _DEEP | _IMAGE),
    "beit": _classifier("Beit", _WIDE | _DEEP | _IMAGE),
    "swin": _classifier(
        "Swin",
        _IMAGE
        | {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 2},
    ),
    "convnext": _classifier(
        "ConvNext",
        {"patch_size": 2, "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}
        | {"num_labels": NUM_CLASSES},
    ),
    "resnet": _classifier(
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": NUM_CLASSES}
        | {"layer_type": "basic"},
        sync_batchnorm=True,
    ),
    "wav2vec2": Small(
        name="Wav2Vec2",
        kind="ForSequenceClassification",
        sizes=_WIDE
        | _DEEP
        | {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "apply_spec_augment": False}
        | {"num_conv_pos_embedding_groups": 2, "num_labels": NUM_CLASSES, "vocab_size": VOCABULARY},
        module=Classes,
        data=_of_waves,
    ),
    "whisper": Small(
        name="Whisper",
        kind="ForConditionalGeneration",
        sizes=_BART
        | _ENDS
        | {"vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": CONTEXT}
        | {"max_target_positions": 2 * CONTEXT, "decoder_start_token_id": 1},
        module=Transcripts,
        data=_of_spectra,
    ),
    "patchtst": Small(
        name="PatchTST",
        kind="ForPrediction",
        sizes={"num_input_channels": 2, "context_length": 16, "prediction_length": 4}
        | {"patch_length": 4, "patch_stride": 4, "d_model": 32, "ffn_dim": 48, "loss": "mse"}
        | {"num_attention_heads": 4, "num_hidden_layers": 4, "norm_type": "layernorm"},
        module=Series,
        data=_of_series,
    ),
}
