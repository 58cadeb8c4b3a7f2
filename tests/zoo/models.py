"""Small models of other packages as LightningModules, each with its data; all train by SGD.

tft        pytorch-forecasting's TemporalFusionTransformer: a LightningModule itself
nbeats     pytorch-forecasting's NBeats, which keeps layers in lists of stacks
byol       lightly's heads with batch norms, and a momentum encoder in the step
lora       peft's LoRA over a Llama: most parameters are frozen
clip       transformers' CLIP: a contrastive loss over the samples of all ranks
deepseek   transformers' DeepSeek-V3: latent attention, experts, a buffer that routes
vit        timm's VisionTransformer, and timm's ModelEmaV3 updated after each step
and many of Hugging Face's, in `hugging_face`.
"""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.zoo.hugging_face import SMALL
from tests.zoo.packages import import_torchvision
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


def deepseek() -> Subject:
    """DeepSeek-V3, a dense layer and three with experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    network = DeepseekV3ForCausalLM(config)
    return Subject(module=Language(network), data=TensorDataset(texts()))


def lora() -> Subject:
    """LoRA of the attention and the MLP of a Llama."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    adapters = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    network = get_peft_model(LlamaForCausalLM(config), adapters)
    return Subject(module=Language(network), data=TensorDataset(texts()))


class Contrastive(Trained):
    """CLIP's loss over the pairs of all ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.network(input_ids=batch[0], pixel_values=batch[1])
        text, image = (
            self.all_gather(one, sync_grads=True).reshape(-1, one.shape[-1])
            for one in (out.text_embeds, out.image_embeds)
        )
        logits = text @ image.T * self.network.logit_scale.exp()
        pairs = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def clip() -> Subject:
    """CLIP with two layers of text and two of images."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": 2}
    vision = {"image_size": 8, "patch_size": 4}
    config = CLIPConfig(
        text_config=sizes | text,
        vision_config=sizes | vision,
        projection_dim=16,
        logit_scale_init_value=0.0,
    )
    data = TensorDataset(texts(), *images())
    return Subject(module=Contrastive(CLIPModel(config)), data=data)


class BYOL(L.LightningModule):
    """lightly's example: a student, and a teacher that follows it."""

    def __init__(self) -> None:
        import_torchvision()
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(72, 32)
        )
        self.projection_head = BYOLProjectionHead(32, 48, 16)
        self.prediction_head = BYOLPredictionHead(16, 48, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(self.backbone, self.backbone_momentum, m=0.5)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.5)
        one, two = batch
        targets = self.forward_momentum(one), self.forward_momentum(two)
        losses = self.criterion(self(one), targets[1]), self.criterion(self(two), targets[0])
        return (losses[0] + losses[1]) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def byol() -> Subject:
    """BYOL, its batch norms over the samples of all ranks."""
    data = TensorDataset(*images(num_views=2))
    return Subject(module=BYOL(), data=data, flags={"sync_batchnorm": True})


class Averaged(Trained):
    """A classifier with timm's average of its weights."""

    def __init__(self, network: nn.Module) -> None:
        from timm.utils import ModelEmaV3

        super().__init__(network)
        self.average = ModelEmaV3(network, decay=0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update(self.network)


def vit() -> Subject:
    """Timm's ViT with four blocks, and its exponential average."""
    import_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    network = VisionTransformer(
        img_size=8, patch_size=4, num_classes=5, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2.0
    )
    labels = torch.randint(5, (NUM_SAMPLES,), generator=generator())
    return Subject(module=Averaged(network), data=TensorDataset(*images(), labels))


def _series() -> Any:
    """Return pytorch-forecasting's data set: two series, a known and an unknown variable."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer

    steps = range(20)
    rows = [
        {
            "series": str(number),
            "time": step,
            "value": float((step * (number + 2)) % 7 + number) + 1.0,
            "price": float(step % 3),
        }
        for number in range(2)
        for step in steps
    ]
    return TimeSeriesDataSet, GroupNormalizer, pd.DataFrame(rows)


SGD = {"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}, "learning_rate": 0.01}


def _forecast(make: Callable[[Any], L.LightningModule], **options: Any) -> Subject:
    dataset_class, normalizer, frame = _series()
    dataset = dataset_class(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=6,
        min_encoder_length=6,
        max_prediction_length=2,
        min_prediction_length=2,
        time_varying_unknown_reals=["value"],
        target_normalizer=normalizer(groups=["series"]),
        **options,
    )
    full = torch.utils.data.Subset(dataset, range(NUM_SAMPLES))
    return Subject(module=make(dataset), data=full, collate=dataset._collate_fn)


def tft() -> Subject:
    """The Temporal Fusion Transformer, without dropout."""
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    def make(dataset: Any) -> L.LightningModule:
        return TemporalFusionTransformer.from_dataset(
            dataset,
            hidden_size=8,
            attention_head_size=2,
            hidden_continuous_size=4,
            dropout=0.0,
            loss=QuantileLoss([0.1, 0.5, 0.9]),
            log_interval=-1,
            **SGD,
        )

    return _forecast(
        make,
        static_categoricals=["series"],
        time_varying_known_reals=["price"],
        add_relative_time_idx=True,
    )


def nbeats() -> Subject:
    """NBeats with a trend and a seasonality, without dropout."""
    from pytorch_forecasting import NBeats

    def make(dataset: Any) -> L.LightningModule:
        return NBeats.from_dataset(
            dataset,
            num_blocks=[2, 2],
            num_block_layers=[2, 2],
            widths=[16, 16],
            dropout=0.0,
            log_interval=-1,
            **SGD,
        )

    return _forecast(make)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "tft": tft,
    "nbeats": nbeats,
    "byol": byol,
    "lora": lora,
    "clip": clip,
    "deepseek": deepseek,
    "vit": vit,
    **SMALL,
}
