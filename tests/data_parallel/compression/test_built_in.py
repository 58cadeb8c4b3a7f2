"""What each codec keeps of its values, and how many bytes it makes of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_shard.data_parallel.compression import (
    BF16,
    FP16,
    Codec,
    Int4,
    Int8,
    OneBit,
    TopK,
    Turn,
)
from lightning_shard.data_parallel.compression.built_in import greatest, pack_bits, unpack_signs
from lightning_shard.data_parallel.compression.codec import all_sound, form_of, read_row, write_row
from lightning_shard.errors import ConfigError

CODECS: dict[str, Codec] = {
    "fp16": FP16(),
    "bf16": BF16(),
    "int8": Int8(),
    "int8 nearest": Int8(rounding="nearest"),
    "int4": Int4(),
    "int4 of odd blocks": Int4(block=7, rounding="nearest"),
    "topk": TopK(),
    "topk warm-up": TopK(warmup_steps=8),
    "onebit": OneBit(),
}
TURN = Turn(step=3, seed=5)
few = settings(max_examples=40)


def values_of(numel: int, seed: int, exponent: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 2.0**exponent


values = st.builds(values_of, st.integers(1, 5000), st.integers(0, 99), st.integers(-100, 100))


def through(codec: Codec, given_values: Tensor, turn: Turn = TURN) -> Tensor:
    return codec.decode(codec.encode(given_values, turn), given_values.numel())


@pytest.mark.parametrize("name", CODECS)
@few
@given(values=values)
def test_values_come_back_finite_and_in_their_shape(name: str, values: Tensor) -> None:
    before = values.clone()
    decoded = through(CODECS[name], values)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    assert torch.isfinite(decoded).all()
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_come_back_as_zeros(name: str) -> None:
    assert torch.equal(through(CODECS[name], torch.zeros(3000)), torch.zeros(3000))


@pytest.mark.parametrize("name", CODECS)
@few
@given(numel=st.integers(1, 5000))
def test_the_form_depends_on_the_number_of_values_alone(name: str, numel: int) -> None:
    codec = CODECS[name]
    forms = {
        form_of(codec.encode(some, Turn(TURN.step, seed)))
        for seed, some in enumerate([torch.zeros(numel), torch.ones(numel), torch.randn(numel)])
    }
    assert len(forms) == 1


@pytest.mark.parametrize(("codec", "bits"), [(FP16(), 11), (BF16(), 8)], ids=["fp16", "bf16"])
@few
@given(values=values)
def test_sixteen_bits_keep_that_many_digits(codec: Codec, bits: int, values: Tensor) -> None:
    smallest = values.abs().max() * 2.0**-25  # what half precision holds with all digits
    kept = values.abs() > smallest
    error = (through(codec, values) - values).abs()
    assert (error <= values.abs() * 2.0**-bits)[kept].all()


def test_fp16_holds_what_would_overflow_or_vanish_in_half_precision() -> None:
    for size in (1e30, 1e-30):
        torch.testing.assert_close(
            through(FP16(), torch.tensor([size, -size / 3])),
            torch.tensor([size, -size / 3]),
            rtol=2**-11,
            atol=0.0,
        )


@few
@given(values=values, rounding=st.sampled_from(["nearest", "stochastic"]))
def test_whole_numbers_err_by_a_step_of_their_block(values: Tensor, rounding: Any) -> None:
    for codec, steps in ((Int8(256, rounding), 127), (Int4(128, rounding), 7)):
        error = (through(codec, values) - values).abs()
        allowed = 0.5001 if rounding == "nearest" else 1.0001
        for block, errors in zip(values.split(codec.block), error.split(codec.block), strict=True):
            assert errors.max() <= allowed * block.abs().max() / steps


def test_int4_has_two_values_in_a_byte() -> None:
    some = torch.arange(-7.0, 8.0)
    scales, packed = Int4().encode(some, TURN)
    assert (scales.numel(), packed.nbytes) == (1, 8)
    assert torch.equal(through(Int4(), some), some)


def test_stochastic_rounding_is_right_on_average_and_the_same_each_time() -> None:
    some = torch.linspace(-1, 1, 256)
    rounds = torch.stack([through(Int8(), some, Turn(0, seed)) for seed in range(400)])
    assert (rounds.mean(0) - some).abs().max() < 5 * (1 / 127) / 2 / 400**0.5
    assert not torch.equal(rounds[0], rounds[1])
    assert torch.equal(rounds[0], through(Int8(), some, Turn(0, 0)))


@few
@given(values=values, ratio=st.floats(0.001, 1.0))
def test_topk_keeps_the_greatest_as_they_are(values: Tensor, ratio: float) -> None:
    decoded = through(TopK(ratio=ratio), values)
    sent = decoded != 0
    assert torch.equal(decoded[sent], values[sent].bfloat16().float())
    assert int(sent.sum()) == min(values.numel(), -int(-ratio * values.numel() // 1))
    if not sent.all():
        assert values[~sent].abs().max() <= values[sent].abs().min()


@pytest.mark.parametrize("numel", [1 << 16, (1 << 16) + 1, 200_000])
def test_topk_finds_places_beyond_sixteen_bits(numel: int) -> None:
    values = torch.zeros(numel)
    places = torch.tensor([0, (1 << 15) - 1, 1 << 15, (1 << 16) - 1, numel - 1]).unique()
    values[places] = torch.arange(1.0, len(places) + 1)
    assert torch.equal(through(TopK(ratio=len(places) / numel), values), values)


def test_topk_sends_what_is_too_great_for_its_format_as_finite() -> None:
    values = torch.full((8,), torch.finfo(torch.float32).max)
    assert through(TopK(ratio=1.0), values).isfinite().all()


@pytest.mark.parametrize(("num_summed", "times"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_topk_keeps_more_of_a_sum(num_summed: int, times: int) -> None:
    decoded = through(TopK(ratio=0.01), torch.randn(1000), Turn(0, 0, num_summed))
    assert int((decoded != 0).sum()) == 10 * times


@few
@given(
    numel=st.integers(30_000, 80_000),
    share=st.floats(0.0001, 0.3),
    kind=st.sampled_from(["normal", "few levels", "zeros", "sorted", "periodic"]),
)
def test_a_sample_finds_the_greatest_of_many(numel: int, share: float, kind: str) -> None:
    sizes = values_of(numel, seed=1, exponent=0).abs()
    if kind == "few levels":
        sizes = sizes.round()
    elif kind == "zeros":
        sizes[torch.arange(numel) % 50 != 0] = 0.0
    elif kind == "sorted":
        sizes = sizes.sort().values
    elif kind == "periodic":
        sizes[:: numel // 8192] = 0.0  # all that is sampled
    count = max(1, int(share * numel))
    places = greatest(sizes, count)
    assert places.unique().numel() == count
    expected = sizes.topk(count).values
    assert torch.equal(sizes[places].sort(descending=True).values, expected)


def test_the_share_of_topk_falls_in_four_stages() -> None:
    codec = TopK(ratio=0.01, warmup_steps=8)
    got = [codec.ratio_at(step) for step in range(9)]
    assert got == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01, 0.01]


@few
@given(values=values)
def test_onebit_keeps_signs_and_each_blocks_mean_magnitude(values: Tensor) -> None:
    decoded = through(OneBit(block=1024), values)
    assert torch.equal(decoded >= 0, values >= 0)
    for block, got in zip(values.split(1024), decoded.split(1024), strict=True):
        assert got.abs().unique().numel() == 1
        torch.testing.assert_close(got.abs().mean(), block.abs().mean())


@few
@given(bits=st.lists(st.booleans(), max_size=40))
def test_bits_come_back(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.numel() == -(-len(bits) // 8)
    assert unpack_signs(packed, len(bits)).tolist() == [1.0 if bit else -1.0 for bit in bits]


def test_bits_lie_lowest_first() -> None:
    assert pack_bits(torch.tensor([True, False, True] + 6 * [False] + [True])).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("name", "least"), [("fp16", 1.99), ("bf16", 1.99), ("int8", 3.9), ("topk", 99), ("onebit", 31)]
)
def test_how_many_times_fewer_bytes(name: str, least: float) -> None:
    numel = 100_000
    form = form_of(CODECS[name].encode(torch.randn(numel), TURN))
    assert 4 * numel / form.num_bytes >= least


def test_tensors_come_back_from_a_row_of_bytes() -> None:
    tensors = [
        torch.tensor([[True, False, True]]),
        torch.randn(5, dtype=torch.float64),
        torch.arange(3, dtype=torch.int8),
        torch.randn(2, 2).T,
        torch.empty(0),
    ]
    form = form_of(tensors)
    rows = torch.zeros(2, form.num_bytes, dtype=torch.uint8)
    write_row(rows[0], form, tensors, torch.tensor(True))
    write_row(rows[1], form, tensors, torch.tensor(False))
    for got, tensor in zip(read_row(rows[1], form), tensors, strict=True):
        assert torch.equal(got, tensor)
    assert all_sound(rows[:1])
    assert not all_sound(rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Int8(block=0),
        lambda: Int8(rounding="up"),  # type: ignore[arg-type]
        lambda: TopK(ratio=0.0),
        lambda: TopK(momentum=1.0),
        lambda: TopK(adam=True),
        lambda: TopK(adam=True, momentum=0.9, warmup_steps=5),
        lambda: OneBit(block=512),
        lambda: OneBit(block=1025),
        lambda: OneBit(warmup_steps=0),
    ],
)
def test_settings_that_cannot_work(make: object) -> None:
    with pytest.raises(ConfigError, match=r"needs|must be"):
        make()  # type: ignore[operator]
