"""The average through a codec: exact where it is, and elsewhere nothing is lost for good."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_shard.data_parallel.compression import (
    Codec,
    Compressor,
    OneBit,
    PowerSGD,
    TopK,
    Turn,
)
from lightning_shard.data_parallel.compression.compressor import scale_up
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import (
    SHIPPED,
    Exact,
    average,
    full,
    gradient,
    make_exchange,
    mean,
    state_of,
)


class Sign(Codec):
    """The codec of 30 lines of the documentation."""

    error_feedback = True

    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        return values.abs().mean()[None], values >= 0

    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        scale, positive = fields
        return torch.where(positive, scale, -scale)


LOSSY: dict[str, Compressor] = {**SHIPPED, "sign": Sign()}
WITH_FEEDBACK = ["topk", "onebit", "sign"]
SIZES = [1, 2, 3, 4]
ENDS = [True, False]  # each rank keeps all, or its own segment


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_an_exact_codec_gives_the_average(num_ranks: int, keeps_all: bool) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(Exact(), keeps_all=keeps_all)
        got = full(exchange, average(exchange, gradient(exchange.buffer, rank, 0)))
        torch.testing.assert_close(got, mean(exchange.buffer, [0], num_ranks))

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_ranks_hold_the_same_bits(name: str, num_ranks: int) -> None:
    def fn(rank: int) -> Tensor:
        exchange = make_exchange(LOSSY[name], keeps_all=True)
        steps = [average(exchange, gradient(exchange.buffer, rank, step)) for step in range(3)]
        return torch.stack(steps)

    first, *others = run_ranks(fn, num_ranks)
    assert first is not None
    assert all(torch.equal(first, other) for other in others if other is not None)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize(("name", "error"), [("fp16", 2**-9), ("bf16", 2**-6), ("int8", 2 / 127)])
def test_rounding_is_close(name: str, error: float, keeps_all: bool) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(LOSSY[name], keeps_all=keeps_all)
        got = full(exchange, average(exchange, gradient(exchange.buffer, rank, 0)))
        exact = mean(exchange.buffer, [0], 3)
        assert (got - exact).abs().max() <= error * 4  # the greatest of so many values is below 4

    run_ranks(fn, 3)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("name", [*WITH_FEEDBACK, "powersgd"])
def test_what_was_sent_and_what_was_kept_make_up_the_full(name: str, keeps_all: bool) -> None:
    """Over any number of steps the averages and the residual add up to the exact averages."""

    def fn(rank: int) -> None:
        exchange = make_exchange(LOSSY[name], keeps_all=keeps_all)
        buffer = exchange.buffer
        steps = [average(exchange, gradient(buffer, rank, step)) for step in range(5)]
        sent = buffer.views(full(exchange, torch.stack(steps).sum(0)))
        kept = state_of(exchange)["residual"]
        for tensor, exact in buffer.views(mean(buffer, range(5), 3)).items():
            total = sent[tensor] + kept[tensor] if tensor in kept else sent[tensor]
            torch.testing.assert_close(total, exact, rtol=1e-4, atol=1e-4)

    run_ranks(fn, 3)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_seen_by_all_and_kept_by_none(
    name: str, keeps_all: bool, bad: float
) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(LOSSY[name], keeps_all=keeps_all)
        average(exchange, gradient(exchange.buffer, rank, 0))
        poisoned = gradient(exchange.buffer, rank, 1)
        if rank == 1:
            poisoned[3] = bad
        got = full(exchange, average(exchange, poisoned))
        assert got.isnan().any()
        for kind in state_of(exchange).values():
            assert all(tensor.isfinite().all() for tensor in kind.values())
        after = full(exchange, average(exchange, gradient(exchange.buffer, rank, 2)))
        assert after.isfinite().all()

    run_ranks(fn, 2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_skipped_step_leaves_a_ranks_residual(momentum: float) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(TopK(ratio=0.1, momentum=momentum), keeps_all=False)
        average(exchange, gradient(exchange.buffer, rank, 0))
        before = state_of(exchange)
        average(exchange, torch.full((exchange.buffer.numel,), torch.nan))
        after = state_of(exchange)
        for kind, tensors in before.items():
            assert all(torch.equal(after[kind][name], tensors[name]) for name in tensors), kind

    run_ranks(fn, 2)


@pytest.mark.parametrize("name", ["topk", "powersgd", "powersgd16"])
def test_a_change_of_the_loss_scale_changes_nothing_but_the_scale(name: str) -> None:
    def fn(rank: int) -> None:
        plain, now = make_exchange(LOSSY[name], keeps_all=True), torch.ones(())
        scaled = make_exchange(LOSSY[name], keeps_all=True, loss_scale=now.clone)
        for step, scale in enumerate([1.0, 1024.0, 2.0]):
            now.fill_(scale)
            values = gradient(plain.buffer, rank, step)
            got = average(scaled, values * scale)
            torch.testing.assert_close(got, average(plain, values) * scale)

    run_ranks(fn, 2)


def test_a_scale_that_the_format_does_not_have_multiplies_values_that_fit() -> None:
    values = torch.full((3,), 2.0**-8, dtype=torch.float16)
    scale_up(values, torch.tensor(2.0**17))  # float16 ends at 65504
    assert values.tolist() == [512.0] * 3
    scale_up(values, None)
    assert values.tolist() == [512.0] * 3


def test_gaps_stay_out_of_it() -> None:
    """A decoded average has values in the gaps; in the next step's values they must not count."""

    def fn(rank: int) -> None:
        exchange = make_exchange(OneBit(warmup_steps=0, adam=False), keeps_all=True)
        other = make_exchange(OneBit(warmup_steps=0, adam=False), keeps_all=True)
        values = gradient(exchange.buffer, rank, 0)
        dirty = values.clone()
        for gap in (slice(*ends) for ends in exchange.buffer.layout.gaps):
            dirty[gap] = 1e6
        assert torch.equal(average(exchange, dirty), average(other, values))

    run_ranks(fn, 2)


@pytest.mark.parametrize("keeps_all", ENDS)
def test_topk_of_all_with_momentum_is_momentum(keeps_all: bool) -> None:
    """DGC's correction with nothing left out sends what each rank's SGD would have added up ..."""

    def fn(rank: int) -> None:
        exchange = make_exchange(TopK(ratio=0.5, momentum=0.9), keeps_all=keeps_all)
        buffer = exchange.buffer
        momentum, sent_before = torch.zeros(buffer.numel), torch.zeros(buffer.numel)
        waiting = torch.zeros(buffer.numel)
        for step in range(4):
            momentum = 0.9 * momentum + gradient(buffer, rank, step)
            waiting += momentum
            average(exchange, gradient(buffer, rank, step))
            kept = exchange._kept_values._residual.view(-1)[: buffer.numel]  # type: ignore[attr-defined]
            sent = (kept.abs() < 0.01 * waiting.abs()) & (waiting != 0)
            waiting[sent] -= waiting[sent].bfloat16().float()
            momentum[sent] = 0.0  # ... and starts anew where it was sent
            torch.testing.assert_close(kept, waiting)
            assert 0.45 < sent.float().mean() < 0.55
            assert not torch.equal(sent.float(), sent_before)
            sent_before = sent.float()

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    "codec",
    [OneBit(warmup_steps=2), TopK(ratio=0.2, warmup_steps=2, adam=True)],
    ids=["onebit", "topk"],
)
def test_momentum_travels_after_a_warm_up(codec: Codec) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(codec, keeps_all=True)
        buffer = exchange.buffer
        exact = torch.zeros(buffer.numel)
        for step in range(2):
            assert exchange.passes(gradient(buffer, rank, step))
            exact = 0.9 * exact + 0.1 * mean(buffer, [step], 2)
            assert not exchange.froze_variance
        momentum = state_of(exchange)["momentum"]
        for name, view in buffer.views(exact).items():
            torch.testing.assert_close(momentum[name], view, rtol=1e-5, atol=1e-6)
        values = gradient(buffer, rank, 2)
        assert not exchange.passes(values)
        got = average(exchange, values)
        assert exchange.froze_variance
        exact = buffer.views(0.9 * exact + 0.1 * mean(buffer, [2], 2))
        kept = state_of(exchange)
        num_anew = 0
        for name, view in buffer.views(got).items():
            torch.testing.assert_close(view + kept["residual"][name], exact[name])
            goes_on = kept["momentum"][name]
            if codec.is_sparse:  # each rank's own, which starts anew where it was sent
                waits = kept["residual"][name] == exact[name]
                torch.testing.assert_close(goes_on[waits], exact[name][waits])
                num_anew += int((goes_on == 0).sum())
            else:
                assert torch.equal(goes_on, view)  # all go on from the same one
        assert (num_anew > 0) == codec.is_sparse

    run_ranks(fn, 2)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("name", LOSSY)
def test_bytes_are_counted_as_the_group_counts_them(name: str, keeps_all: bool) -> None:
    def fn(rank: int) -> None:
        exchange = make_exchange(LOSSY[name], keeps_all=keeps_all)
        average(exchange, gradient(exchange.buffer, rank, 0))
        assert exchange.tally.sent_bytes == exchange.buffer.ranks.traffic.total_bytes
        passes = 2 if keeps_all else 1
        dense = passes * 2 * exchange.buffer.segment_numel * 4
        assert exchange.tally.raw_bytes == dense

    run_ranks(fn, 3)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("name", LOSSY)
def test_a_buffer_in_flight_does_not_disturb_another(name: str, keeps_all: bool) -> None:
    def fn(rank: int) -> None:
        numbers = range(3)
        alone = [make_exchange(LOSSY[name], keeps_all=keeps_all, number=n) for n in numbers]
        crowd = [make_exchange(LOSSY[name], keeps_all=keeps_all, number=n) for n in numbers]
        buffer = crowd[0].buffer
        numel = buffer.numel if keeps_all else buffer.segment_numel
        expected = [average(one, gradient(buffer, rank, n)) for n, one in enumerate(alone)]
        out = [torch.empty(numel) for _ in crowd]
        for number, exchange in enumerate(crowd):
            exchange.begin(gradient(buffer, rank, number), out[number])
            if number:
                crowd[number - 1].proceed()
        for exchange in crowd:
            exchange.wait()
        assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))

    run_ranks(fn, 2)


@pytest.mark.parametrize("name", [*WITH_FEEDBACK, "powersgd", "powersgd16"])
def test_a_state_is_taken_up_on_another_number_of_ranks(name: str) -> None:
    def first(rank: int) -> object:
        exchange = make_exchange(LOSSY[name], keeps_all=True)
        for step in range(3):
            average(exchange, gradient(exchange.buffer, rank, step))
        return state_of(exchange)

    state = run_ranks(first, 2)[0]
    assert isinstance(state, dict)

    def second(rank: int) -> None:
        exchange = make_exchange(LOSSY[name], keeps_all=False)
        exchange.load(state, step=3)
        assert exchange.step == 3
        again = state_of(exchange)
        assert again.keys() == state.keys()
        for kind, tensors in state.items():
            for tensor, value in tensors.items():
                torch.testing.assert_close(again[kind][tensor], value)

    run_ranks(second, 3)


def test_powersgd_finds_a_matrix_of_its_rank() -> None:
    """Warm start: the same matrix of rank 2 is found in a few steps, whatever the first guess."""

    def fn(rank: int) -> None:
        exchange = make_exchange(PowerSGD(rank=2), keeps_all=True)
        generator = torch.Generator().manual_seed(1)
        matrix = torch.randn(24, 2, generator=generator) @ torch.randn(2, 40, generator=generator)
        values = torch.zeros(exchange.buffer.numel)
        exchange.buffer.views(values)["matrix"].copy_(matrix)
        for _ in range(2):
            got = exchange.buffer.views(average(exchange, values))["matrix"]
        torch.testing.assert_close(got, matrix, rtol=1e-3, atol=1e-3)

    run_ranks(fn, 2)


def test_a_codec_whose_form_varies_is_told() -> None:
    class Varying(Exact):
        def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
            return (values[values > 0],)

    def fn(rank: int) -> None:
        exchange = make_exchange(Varying(), keeps_all=True)
        average(exchange, gradient(exchange.buffer, rank, 0))

    with pytest.raises(ConfigError, match=r"Rank 0: Varying\.encode .*Pad what varies"):
        run_ranks(fn, 2)


def test_a_codec_that_decodes_another_number_of_values_is_told() -> None:
    class Short(Exact):
        def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
            return fields[0][1:]

    def fn(rank: int) -> None:
        exchange = make_exchange(Short(), keeps_all=True)
        average(exchange, gradient(exchange.buffer, rank, 0))

    with pytest.raises(ConfigError, match=r"Short\.decode has returned .* expected torch\.float32"):
        run_ranks(fn, 2)


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize(
    "codec", [TopK(ratio=0.05), TopK(ratio=0.05, momentum=0.5)], ids=["topk", "dgc"]
)
def test_an_overflow_on_one_rank_leaves_what_the_others_keep_back(
    codec: Codec, keeps_all: bool
) -> None:
    """An overflow on one rank lost what the others kept back."""

    def fn(rank: int) -> None:
        exchange = make_exchange(codec, keeps_all=keeps_all)
        for step in range(3):
            average(exchange, gradient(exchange.buffer, rank, step))
        before = state_of(exchange)
        values = gradient(exchange.buffer, rank, 3)
        if rank == 0:
            values[3] = float("inf")
        assert average(exchange, values).isnan().all()
        after = state_of(exchange)
        for kind, tensors in before.items():
            for name, kept in tensors.items():
                assert torch.equal(after[kind][name], kept), (kind, name)

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    "codec", [TopK(ratio=0.5), TopK(ratio=0.5, momentum=0.5)], ids=["topk", "dgc"]
)
def test_a_sum_that_overflows_leaves_what_is_kept_of_the_other_segments(codec: Codec) -> None:
    """A sum that overflowed moved what had been kept of the other segments."""

    def fn(rank: int) -> None:
        exchange = make_exchange(codec, keeps_all=True)
        average(exchange, gradient(exchange.buffer, rank, 0))
        before = state_of(exchange)
        values = gradient(exchange.buffer, rank, 1)
        values[3] = 3e38  # finite; the sum of two is not
        assert average(exchange, values).isnan().all()
        for kind, tensors in state_of(exchange).items():
            for name, kept in tensors.items():
                assert torch.equal(kept, before[kind][name]), (kind, name)

    run_ranks(fn, 2)


@pytest.mark.parametrize("keeps_all", ENDS)
def test_a_residual_that_overflows_is_not_kept(keeps_all: bool) -> None:
    """A residual that overflowed was kept for good."""

    def fn(rank: int) -> None:
        exchange = make_exchange(TopK(ratio=0.01), keeps_all=keeps_all)
        much = torch.zeros(exchange.buffer.numel)
        for view in exchange.buffer.views(much).values():
            view.fill_(2e38)  # what is not sent comes to more than float32 holds
        average(exchange, much)
        before = state_of(exchange)
        assert full(exchange, average(exchange, much)).isnan().any()
        for kind, tensors in state_of(exchange).items():
            for name, kept in tensors.items():
                assert torch.equal(kept, before[kind][name]), (kind, name)

    run_ranks(fn, 1)


@pytest.mark.parametrize("keeps_all", ENDS)
def test_momentum_of_a_codec_that_is_not_sparse_began_anew_in_each_step(keeps_all: bool) -> None:
    class Heavy(Exact):
        error_feedback = True
        momentum = 0.5

    def fn(rank: int) -> None:
        exchange = make_exchange(Heavy(), keeps_all=keeps_all)
        momentum = torch.zeros(exchange.buffer.numel)
        for step in range(4):
            got = full(exchange, average(exchange, gradient(exchange.buffer, rank, step)))
            momentum = 0.5 * momentum + mean(exchange.buffer, [step], 2)
            torch.testing.assert_close(got, momentum)

    run_ranks(fn, 2)


def test_one_ranks_overflow_in_a_warm_up_leaves_the_others_momentum() -> None:
    """One rank's overflow in a warm-up moved the others' momentum."""

    def fn(rank: int) -> None:
        exchange = make_exchange(OneBit(warmup_steps=3), keeps_all=True)
        assert exchange.passes(gradient(exchange.buffer, rank, 0))
        before = state_of(exchange)["momentum"]
        values = gradient(exchange.buffer, rank, 1)
        if rank == 0:
            values[3] = float("inf")
        assert exchange.passes(values)  # the dense average has the inf: all ranks skip the step
        for name, kept in state_of(exchange)["momentum"].items():
            assert torch.equal(kept, before[name]), name

    run_ranks(fn, 2)


def test_a_codec_that_decodes_in_place_leaves_what_travels() -> None:
    """A codec that decodes in place changed what travelled."""

    class Halves(Codec):
        error_feedback = True

        def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
            return (values / 2,)

        def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
            return fields[0].mul_(2)

    def fn(rank: int) -> None:
        exchange = make_exchange(Halves(), keeps_all=True)
        for step in range(2):
            got = average(exchange, gradient(exchange.buffer, rank, step))
            torch.testing.assert_close(got, mean(exchange.buffer, [step], 2))

    run_ranks(fn, 2)
