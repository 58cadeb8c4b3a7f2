"""The models of the parity tests: ordinary LightningModules that know nothing of ranks.

Each has two AdamW groups, one of them without weight decay, and a warm-up. `data(num_samples)` is
its training set, the same on every call. What the models use of an engine:

    gpt         repeated blocks, two embeddings; the module of `examples/train_gpt.py`
    conv        batch norms (buffers), each rank with its own statistics; a frozen layer
    sync_conv   the same, the ranks with common statistics
    lstm        fused weights of `nn.LSTM`, one matrix as embedding and head
    llama       Hugging Face, grouped-query attention
    gpt2        Hugging Face, tied embeddings
    encoder     torch's TransformerEncoder, a classifier of words
    bert        Hugging Face, a layer's linear layers lie in several modules; tied embeddings
    t5          Hugging Face, an encoder and a decoder; a bias of attention for each head
    vit         Hugging Face, images
    mixtral     Hugging Face, experts in one tensor each
    qwen3       Hugging Face, norms of each head
    nanogpt     nanoGPT's module, its attention computes with the whole width; tied embeddings
    mixture     experts that only some samples, so only some ranks, use; an unused parameter
"""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from examples.train_gpt import GPT
from tests.strategies import nanogpt

VOCABULARY = 64
CONTEXT = 16
# Adam divides by the root of the mean square + eps. The bias of attention's keys has no effect on
# the loss, so its gradient is rounding noise (about 1e-9); with the usual eps of 1e-8 Adam would
# make full steps of it, in another direction for every order of summation.
EPS = 1e-6
WARMUP_STEPS = 5


def warm_up(step: int) -> float:
    """Return the factor of the learning rate; a function, so that it can be pickled."""
    return min(1.0, (step + 1) / WARMUP_STEPS)


class Trained(L.LightningModule):
    """A loss and how it is minimised."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> dict[str, Any]:
        trainable = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=EPS)
        schedule = LambdaLR(optimizer, warm_up)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ExampleGPT(Trained, GPT):
    """The example's module; only its optimizer is set up for comparisons."""

    training_step = Trained.training_step
    loss = GPT.loss

    def __init__(self, width: int = 32, num_layers: int = 3) -> None:
        GPT.__init__(self, context=CONTEXT, num_layers=num_layers, num_heads=4, width=width)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        return TensorDataset(*_text(num_samples, 256))


class ConvNet(Trained):
    """A classifier of images with batch norms; its first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.stem.requires_grad_(False)
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8, momentum=None),
            nn.ReLU(),
        )
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).flatten(1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(num_samples, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(10, (num_samples,), generator=generator))


class ConvNetOfRanks(ConvNet):
    """What a `ConvNet` with plain batch norms computes on `num_ranks` ranks, on one device.

    Each rank's part of the batch has its own statistics. The running ones are rank 0's.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def loss(self, batch: list[Tensor]) -> Tensor:
        ranks = range(self.num_ranks)
        losses = [
            self._loss_of_rank(r, *(part[r :: self.num_ranks] for part in batch)) for r in ranks
        ]
        return torch.stack(losses).mean()

    def _loss_of_rank(self, rank: int, images: Tensor, labels: Tensor) -> Tensor:
        if rank == 0:
            return F.cross_entropy(self(images), labels)
        copies = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return F.cross_entropy(functional_call(self, copies, images), labels)


class TiedLSTM(Trained):
    """A language model; one matrix is both embedding and head."""

    def __init__(self, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embedding.weight

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch  # each (B, T)
        output, _ = self.lstm(self.embedding(text))
        return F.cross_entropy(self.head(output).flatten(0, 1), following.flatten())

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        return TensorDataset(*_text(num_samples))


class HuggingFaceLM(Trained):
    """Any causal language model of `transformers`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, batch: list[Tensor]) -> Tensor:
        (text,) = batch
        return self.network(input_ids=text, labels=text).loss

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        return TensorDataset(_text(num_samples)[0])


def _config(kind: str, num_layers: int, **options: Any) -> Any:
    """Return a Hugging Face configuration of the sizes that the small models have in common."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        **options,
    )


def llama(num_layers: int = 2) -> HuggingFaceLM:
    """Four query heads share two key and value heads; embedding and head are separate."""
    from transformers import LlamaForCausalLM

    sizes = {"intermediate_size": 48, "num_key_value_heads": 2}
    config = _config("llama", num_layers, **sizes, tie_word_embeddings=False)
    return HuggingFaceLM(LlamaForCausalLM(config))


def gpt2(num_layers: int = 2) -> HuggingFaceLM:
    """Embedding and head are one matrix; no dropout."""
    from transformers import GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = _config("gpt2", num_layers, **dropout, bos_token_id=0, eos_token_id=0)
    return HuggingFaceLM(GPT2LMHeadModel(config))


def bert(num_layers: int = 2) -> HuggingFaceLM:
    """Embedding and head are one matrix; learnt positions."""
    from transformers import BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = _config("bert", num_layers, intermediate_size=64, **dropout)
    return HuggingFaceLM(BertForMaskedLM(config))


def mixtral(num_layers: int = 2) -> HuggingFaceLM:
    """Four experts, of which each word uses two; four query heads share two of keys and values."""
    from transformers import MixtralForCausalLM

    sizes = {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    return HuggingFaceLM(MixtralForCausalLM(_config("mixtral", num_layers, **sizes)))


def qwen3(num_layers: int = 2) -> HuggingFaceLM:
    """Four query heads share one of keys and values; queries and keys have norms of each head."""
    from transformers import Qwen3ForCausalLM

    sizes = {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8}
    config = _config("qwen3", num_layers, **sizes, tie_word_embeddings=True)
    return HuggingFaceLM(Qwen3ForCausalLM(config))


def t5(num_layers: int = 2) -> HuggingFaceLM:
    """Three embeddings and the head are one matrix; heads are narrower than the width says."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=64,
        num_layers=num_layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gelu",  # see Encoder
        decoder_start_token_id=0,
    )
    return HuggingFaceLM(T5ForConditionalGeneration(config))


class Encoder(Trained):
    """torch's encoder with an embedding, learnt positions and a classifier of each word."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        # A ReLU's gradient jumps where a rounding error changes the sign of what goes in.
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        for param in self.parameters():
            if param.ndim > 1:  # as in GPT-2: with larger ones the noise is louder, see EPS
                nn.init.normal_(param, std=0.02)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        mixed = self.encoder(self.embedding(text) + self.position, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(mixed).flatten(0, 1), following.flatten())

    data = staticmethod(TiedLSTM.data)


class Layers(Trained):
    """A plain `nn.Sequential` of layers, and nothing else."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        width = 24
        layers = [nn.Linear(64, width), nn.Tanh()]
        for _ in range(num_layers - 2):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.network = nn.Sequential(*layers, nn.Linear(width, 10))

    def loss(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images.flatten(1)), labels)

    data = staticmethod(ConvNet.data)


class HuggingFaceViT(Trained):
    """A classifier of images; its patches are those of a convolution."""

    def __init__(self, num_layers: int = 2) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=10,
        )
        self.network = ViTForImageClassification(config)

    def loss(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return self.network(pixel_values=images, labels=labels).loss

    data = staticmethod(ConvNet.data)


class NanoGPT(Trained):
    """nanoGPT's module, without biases as in its own configuration for training."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.network = nanogpt.NanoGPT(vocabulary=VOCABULARY, context=CONTEXT, **options)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        _, loss = self.network(text, following)
        return loss

    data = staticmethod(TiedLSTM.data)


class MixtureBlock(nn.Module):
    """Adds to each sample what its expert makes of it; leaves other experts alone."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        added = torch.zeros_like(x)  # (B, width)
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                added = added.index_add(0, chosen, torch.tanh(expert(self.norm(x[chosen]))))
        return x + added


class Mixture(Trained):
    """Experts by sample: one for all, one on a single rank, one now and then, one never."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.blocks = nn.ModuleList(MixtureBlock(width, num_experts=4) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.ones(()))
        self.outlet = nn.Linear(width, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, route, target = batch
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, route)
        return F.mse_loss(self.outlet(x * self.scale), target)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        x, target = (torch.randn(num_samples, width, generator=generator) for width in (8, 1))
        index = torch.arange(num_samples)
        route = torch.zeros(num_samples, dtype=torch.long)
        route[index % 12 == 1] = 1  # in every batch of twelve on rank 1 of 2, 3 or 4
        route[index % 60 == 14] = 2  # in every fifth batch on rank 2 of 3 or 4, on rank 0 of 2
        return TensorDataset(x, route, target)


def _text(num_samples: int, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Random walks over the vocabulary, which can be learnt; (S, T) tokens and those after."""
    generator = torch.Generator().manual_seed(3)
    strides = torch.randint(1, 4, (num_samples, CONTEXT + 1), generator=generator)
    starts = torch.randint(vocabulary, (num_samples, 1), generator=generator)
    walk = (starts + strides.cumsum(1)) % vocabulary
    return walk[:, :-1].clone(), walk[:, 1:].clone()


MODELS: dict[str, Callable[[], Trained]] = {
    "gpt": ExampleGPT,
    "conv": ConvNet,
    "sync_conv": ConvNet,
    "lstm": TiedLSTM,
    "llama": llama,
    "gpt2": gpt2,
    "mixture": Mixture,
}
# Of one more interest where layers are split.
SPLIT_MODELS: dict[str, Callable[[], Trained]] = {
    "encoder": Encoder,
    "bert": bert,
    "t5": t5,
    "vit": HuggingFaceViT,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "nanogpt": NanoGPT,
}
# With enough blocks for four ranks of two stages each.
PIPELINE_MODELS: dict[str, Callable[[], Trained]] = {
    "layers": Layers,
    "gpt_8": lambda: ExampleGPT(num_layers=8),
    "encoder_8": lambda: Encoder(num_layers=8),
    "llama_8": lambda: llama(8),
    "gpt2_8": lambda: gpt2(8),
    "bert_8": lambda: bert(8),
    "vit_8": lambda: HuggingFaceViT(8),
    "mixtral_8": lambda: mixtral(8),
    "qwen3_8": lambda: qwen3(8),
}
