"""The GPT example: its model, its data, its yardstick, and whole runs of the program."""

import math
from pathlib import Path

import pytest
import torch

from examples.train_gpt import GPT, Text, bigram_loss, warm_up_and_decay
from tests.examples.commands import ignoring_advice, last_losses, run_example

pytestmark = ignoring_advice()

STAGES = ("shard_ddp", "zero1", "zero2", "zero3")
SMALL = ("--model.num_layers=1", "--model.width=32", "--data.context=16", "--data.batch_size=4")


def test_a_later_byte_does_not_change_an_earlier_prediction() -> None:
    gpt = GPT(context=8, num_layers=2, width=32).eval()
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 200
    before, after = gpt(text), gpt(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_training_without_an_end_is_scheduled() -> None:
    """Of `max_epochs=-1` alone Lightning estimates infinitely many steps."""
    assert [warm_up_and_decay(step, 2, math.inf) for step in (0, 2, 10**6)] == [0.5, 1.0, 1.0]


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = GPT(width=32, tie_embeddings=True), GPT(width=32)
    assert tied.head.weight is tied.byte_embedding.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_residual_outputs_start_smaller_and_biases_at_zero() -> None:
    gpt = GPT(num_layers=2)
    assert gpt.blocks[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert gpt.blocks[0].down.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not gpt.blocks[0].down.bias.any()


def test_generated_text_continues_the_prompt_and_is_the_same_every_time() -> None:
    gpt = GPT(context=8, num_layers=1, width=32)
    sample = gpt.generate("abc", num_bytes=20)
    assert sample.startswith("abc")
    assert sample == gpt.generate("abc", num_bytes=20)


def test_a_block_is_paired_with_the_bytes_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 10, encoding="utf-8")
    data = Text(path, context=4, batch_size=2)
    data.setup("fit")
    assert [tensor[1].tolist() for tensor in data.train_blocks.tensors] == [
        list(b"efgh"),
        list(b"fghi"),
    ]
    assert len(data.train_blocks) == (90 - 1) // 4
    assert len(data.val_blocks) == (10 - 1) // 4


def test_the_bigram_model_predicts_from_counted_pairs() -> None:
    a, b, c = torch.tensor([[97]]), torch.tensor([[98]]), torch.tensor([[99]])
    seen, unseen = math.log(25.6 + 1) - math.log(1.1), math.log(25.6 + 1) - math.log(0.1)
    assert bigram_loss(a, b, a, b) == pytest.approx(seen, rel=1e-5)
    assert bigram_loss(a, b, a, c) == pytest.approx(unseen, rel=1e-5)
    assert bigram_loss(a, b, c, a) == pytest.approx(math.log(256), rel=1e-5)


def test_documentation_of_cpython_is_the_default_text() -> None:
    data = Text()
    data.setup("fit")
    assert len(data.train_blocks) * data.context > 200_000
    assert 1.5 < data.bigram_loss < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", *(f"{stage}_in_process" for stage in STAGES)])
def test_it_beats_the_bigram_model_under_every_stage(
    strategy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("She sells sea shells; she shall sell all she sees. " * 80, encoding="utf-8")
    run_example(
        monkeypatch,
        "train_gpt",
        *SMALL,
        f"--data.path={text}",
        f"--trainer.strategy={strategy}",
        f"--trainer.devices={1 if strategy == 'auto' else 2}",
        "--trainer.max_steps=150",
        "--model.learning_rate=1e-2",
    )
    output = capsys.readouterr().out
    loss, bigram = last_losses(output)
    assert loss < bigram
    assert "a sample:\n\nThe " in output
