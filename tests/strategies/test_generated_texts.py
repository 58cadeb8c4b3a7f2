"""Texts of different lengths that ranks generate with weights in shards."""

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring("Using `DistributedSampler`")

END, NUM_WORDS, NUM_NEW = 10, 13, 12


class Writer(L.LightningModule):
    def __init__(self, texts: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        torch.manual_seed(0)
        self.net = LlamaForCausalLM(
            LlamaConfig(vocab_size=NUM_WORDS, num_hidden_layers=2, **sizes, initializer_range=1.0)
        )
        self.texts = texts

    def written(self, words: Tensor) -> Tensor:
        mask, ends = torch.ones_like(words), {"eos_token_id": END, "pad_token_id": 0}
        found: Tensor = self.net.generate(
            words, attention_mask=mask, max_new_tokens=NUM_NEW, **ends
        )
        return found

    def validation_step(self, words: Tensor, batch_idx: int) -> None:
        self.texts.append((words, self.written(words)))

    def __deepcopy__(self, memo: object) -> "Writer":
        return Writer(self.texts)


def test_ranks_whose_texts_end_at_other_words_waited_for_each_other() -> None:
    """One gathered the weights for its next word, which the other did not need."""
    words = torch.randint(4, NUM_WORDS, (12, 1), generator=torch.Generator().manual_seed(1))
    texts: list[tuple[Tensor, Tensor]] = []
    trainer = quiet_trainer(strategy="zero3_in_process", devices=2)
    trainer.validate(Writer(texts), DataLoader(words, batch_size=1), verbose=False)
    alone = Writer([])
    lengths = set()
    for given, found in texts:
        expected = alone.written(given)
        lengths.add(expected.shape[1])
        assert torch.equal(found[:, : expected.shape[1]], expected)
    assert len(texts) == 12
    assert len(lengths) > 2
    assert not hasattr(trainer.lightning_module.net, "_is_fsdp_managed_module")
