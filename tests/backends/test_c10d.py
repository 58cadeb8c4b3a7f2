"""The private names of torch that the backends need; a failure says what has changed."""

import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_shard.backends import _c10d
from lightning_shard.backends.objects import guard_torch


def test_the_module_globals_are_there() -> None:
    assert isinstance(c10d._world, c10d._World)
    assert callable(c10d.rendezvous)
    for name in (
        "_set_thread_isolation_mode",
        "_unregister_all_process_groups",
        "_set_global_rank",
    ):
        assert callable(getattr(torch._C._distributed_c10d, name))


def test_rank_groups_cover_every_property_of_a_world() -> None:
    properties = {n for n, v in vars(c10d._World).items() if isinstance(v, property)}
    own = vars(_c10d.RankGroups).keys()
    # These four keep their state in the instance, or only read the others.
    assert properties - own <= {"default_pg", "pg_coalesce_state", "comms", "pg_config_info"}


def test_the_backends_of_a_groups_devices(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        backends = _c10d.live_backends()
    finally:
        dist.destroy_process_group()
    assert backends
    assert all(isinstance(backend, dist.ProcessGroupGloo) for backend in backends)
    assert _c10d.live_backends() == []


def test_an_uncaught_error_began_with_the_number_of_each_rank_that_a_process_has_been(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(3):
        store = _c10d.HashStore()
        _c10d.init_default_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()
    sys.excepthook(ValueError, ValueError("mine"), None)
    assert capsys.readouterr().err == "[rank0]: ValueError: mine\n"


def test_new_groups_are_made_by_the_helper_that_is_replaced() -> None:
    parameters = list(inspect.signature(c10d._new_process_group_helper).parameters)
    assert parameters[:7] == [
        "group_size",
        "group_rank",
        "global_ranks_in_group",
        "backend",
        "store",
        "group_name",
        "backend_options",
    ]
    assert "_new_process_group_helper(" in inspect.getsource(c10d._new_group_with_tag)
    assert "rendezvous(" in inspect.getsource(c10d.init_process_group)


def test_object_collectives_pack_and_unpack_with_the_functions_that_are_replaced() -> None:
    assert list(inspect.signature(c10d._object_to_tensor).parameters)[:1] == ["obj"]
    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "send_object_list"):
        assert "_object_to_tensor(" in inspect.getsource(getattr(c10d, name))
    for name in ("all_gather_object", "recv_object_list", "scatter_object_list"):
        assert "_tensor_to_object(" in inspect.getsource(getattr(c10d, name))


def test_object_collectives_take_the_argument_that_torch_2_14_adds() -> None:
    """Its `weights_only`: what comes is loaded as `torch.load` does, which runs no code."""
    guard_torch()
    for weights_only in ((), (False,), (True,)):
        data, size = c10d._object_to_tensor({"a": torch.ones(2)}, "cpu", None, *weights_only)
        assert c10d._tensor_to_object(data, size, None, *weights_only)["a"].sum() == 2
    data, size = c10d._object_to_tensor(Path("a"), "cpu", None, True)
    with pytest.raises(pickle.UnpicklingError):
        c10d._tensor_to_object(data, size, None, True)


def test_the_random_state_tracker_of_dtensor() -> None:
    import torch.distributed.tensor._random as tensor_random

    assert hasattr(tensor_random, "_rng_tracker")


def test_the_name_that_does_not_warn_is_used() -> None:
    renamed = hasattr(dist, "reduce_scatter_single")
    suffixes = ("_single", "_single") if renamed else ("_tensor", "_into_tensor")
    assert _c10d.reduce_scatter_flat.__name__ == "reduce_scatter" + suffixes[0]
    assert _c10d.all_gather_flat.__name__ == "all_gather" + suffixes[1]


def test_both_take_output_then_input() -> None:
    scatter = list(inspect.signature(_c10d.reduce_scatter_flat).parameters)
    gather = list(inspect.signature(_c10d.all_gather_flat).parameters)
    assert scatter == ["output", "input", "op", "group", "async_op"]
    assert [name.split("_")[0] for name in gather] == ["output", "input", "group", "async"]


def test_torchs_recorder_is_attached_to_no_group_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 asked groups in Python for the default backend that they do not have."""
    recorded = set[str]()
    monkeypatch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", recorded, raising=False)
    monkeypatch.setattr(c10d.Backend, "register_backend", lambda *_, **__: None)
    _c10d.register_backend("in_python", lambda *_: None, ["cpu"])
    assert recorded == {"in_python"}
