"""A checkpoint written as another kind of file: the same elements, and a run that goes on."""

import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate
from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.errors import CheckpointError, ConfigError
from tests.checkpoint.sharded.runs import fit
from tests.examples.commands import ignoring_advice
from tests.processes import run_alone

pytestmark = ignoring_advice(
    "torch.distributed is disabled", "Be aware that when using `ckpt_path`"
)
OUTPUTS = ("out.ckpt", "out.pt", "out.safetensors", "out")


class Something:
    """An object of a class that nobody trusts."""


def weights_of(path: Path) -> dict[str, Tensor]:
    """Read an output as others do."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values())
        parts = [safetensors.torch.load_file(path / name) for name in sorted(names)]
        return {name: tensor for part in parts for name, tensor in part.items()}
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    loaded = torch.load(path, weights_only=True)
    return loaded["state_dict"] if path.suffix == ".ckpt" else loaded


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("output", OUTPUTS)
def test_each_output_has_the_weights_of_each_format(
    output: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    expected = weights_of(saved["full"])
    seen: list[tuple[int, int]] = []
    for kind, source in saved.items():
        out = tmp_path / kind / output
        options = Consolidation(max_shard_bytes=500)
        consolidate(source, out, options, lambda *numbers: seen.append(numbers))
        assert_same(weights_of(out), expected)
        assert seen[-1][0] == seen[-1][1] > 0
        assert list(out.parent.iterdir()) == [out]


def test_a_single_device_resumes_a_consolidated_folder(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.ckpt"
    consolidate(saved["sharded"], out)
    found = fit("auto", ckpt_path=out)
    expected = fit("auto", ckpt_path=saved["full"])
    assert_same(found.state_dict(), expected.state_dict())
    resumed = torch.load(out, weights_only=True)["optimizer_states"][0]
    full = torch.load(saved["full"], weights_only=True)["optimizer_states"][0]
    assert resumed["param_groups"] == full["param_groups"]
    for number, entries in full["state"].items():
        assert_same(resumed["state"][number], entries)


def test_weights_only_leaves_out_what_training_needs(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    for kind, source in saved.items():
        out = tmp_path / f"{kind}.ckpt"
        consolidate(source, out, Consolidation(weights_only=True))
        loaded = torch.load(out, weights_only=True)
        assert not {"optimizer_states", "lr_schedulers", "callbacks"} & loaded.keys()
        assert loaded["global_step"] == 2
        assert_same(loaded["state_dict"], weights_of(saved["full"]))


def test_formats_and_prefixes_of_weights(saved: dict[str, Path], tmp_path: Path) -> None:
    options = Consolidation(dtype=torch.bfloat16, prefix="blocks.")
    out = tmp_path / "out.safetensors"
    consolidate(saved["sharded"], out, options)
    expected = {
        name.removeprefix("blocks."): tensor.bfloat16()
        for name, tensor in weights_of(saved["full"]).items()
        if name.startswith("blocks.")
    }
    assert_same(weights_of(out), expected)
    with pytest.raises(ConfigError, match=r"begin with 'none'; the first are \w+"):
        consolidate(saved["sharded"], out, Consolidation(prefix="none"))
    assert_same(weights_of(out), expected)


def odd_tensors() -> dict[str, Tensor]:
    tied = torch.randn(3, 5)
    return {
        "tied": tied,
        "tied_again": tied,
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "slice": torch.arange(20, dtype=torch.int16)[5:9],
        "scalar": torch.tensor(True),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "param": nn.Parameter(torch.randn(2)),
    }


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_odd_tensors_of_a_file_come_out_as_they_went_in(suffix: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.ckpt", tmp_path / f"out{suffix}"
    weights = odd_tensors()
    torch.save({"state_dict": weights, "epoch": 3}, source)
    consolidate(source, out)
    found = weights_of(out)
    bits = {name: tensor.detach().contiguous().view(-1) for name, tensor in weights.items()}
    for name, tensor in bits.items():
        assert found[name].shape == weights[name].shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.view(torch.uint8)), (
            name
        )
    if suffix != ".safetensors":
        assert found["tied"].data_ptr() == found["tied_again"].data_ptr()


def test_versions_of_modules_go_along(tmp_path: Path) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    torch.save({"state_dict": module.state_dict()}, tmp_path / "in.ckpt")
    consolidate(tmp_path / "in.ckpt", tmp_path / "out.pt", Consolidation(dtype=torch.float16))
    found = torch.load(tmp_path / "out.pt")
    assert isinstance(found, OrderedDict)
    assert vars(found) == vars(module.state_dict())


def test_objects_are_needed_by_whole_checkpoints_alone_and_only_loaded_when_trusted(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "in.ckpt", tmp_path / "out.ckpt"
    content = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"it": Something()}}
    torch.save(content, source)
    consolidate(source, tmp_path / "out.safetensors")
    assert_same(weights_of(tmp_path / "out.safetensors"), content["state_dict"])
    with pytest.raises(CheckpointError, match="Something"):
        consolidate(source, out)
    assert not out.exists()
    consolidate(source, out, Consolidation(trust=True))
    loaded = torch.load(out, weights_only=False)
    assert isinstance(loaded["hyper_parameters"]["it"], Something)


@pytest.mark.parametrize("root", ["model", "state_dict", ""])
def test_folders_of_others(root: str, tmp_path: Path) -> None:
    weights = {"layer.weight": torch.randn(3, 4), "layer.bias": torch.randn(3)}
    flat_optimizer = {"state.layer.weight.exp_avg": torch.zeros(3, 4)}
    content = {root: weights} if root else dict(weights)
    dcp.save({**content, "optimizer": flat_optimizer}, checkpoint_id=tmp_path / "in")
    consolidate(tmp_path / "in", tmp_path / "out.safetensors")
    assert_same(weights_of(tmp_path / "out.safetensors"), weights)
    with pytest.raises(CheckpointError, match="--weights-only"):
        consolidate(tmp_path / "in", tmp_path / "out.ckpt")
    consolidate(tmp_path / "in", tmp_path / "out.ckpt", Consolidation(weights_only=True))
    assert_same(weights_of(tmp_path / "out.ckpt"), weights)


def test_what_is_damaged_is_not_consolidated_and_the_output_stays(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    folder, out = tmp_path / "copy", tmp_path / "out.pt"
    out.write_bytes(b"before")
    shutil.copytree(saved["sharded"], folder)
    shard = next(folder.glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=shard.name):
        consolidate(folder, out)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        consolidate(folder, out)
    damaged = bytearray(saved["full"].read_bytes())
    damaged[damaged.index(weights_of(saved["full"])["embed.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "copy.ckpt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"of 'state_dict.embed.weight'"):
        consolidate(tmp_path / "copy.ckpt", out)
    assert out.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("nothing", "out.pt", "There is no checkpoint"),
        ("empty", "out.pt", "without .metadata, expected a sharded checkpoint"),
        ("text.ckpt", "out.pt", "is no checkpoint"),
        ("text.safetensors", "out.pt", "no file of safetensors"),
        ("list.pt", "out.pt", "holds a list"),
        ("numbers.pt", "out.pt", "expected 'state_dict', or tensors by name"),
        ("complex.pt", "out.safetensors", "'c' is of torch.complex128"),
        ("complex.pt", "out.onnx", "'.onnx', expected .ckpt"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_by_name(
    source: str, output: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("text.ckpt", "text.safetensors"):
        (tmp_path / name).write_text("some text, long enough to be read")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    torch.save({"c": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "complex.pt")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        consolidate(tmp_path / source, tmp_path / output)
    assert not (tmp_path / output).exists()


def test_safetensors_with_a_wrong_header_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, tmp_path / "in.pt")
    consolidate(tmp_path / "in.pt", whole)
    content = whole.read_bytes()
    for at, cut in enumerate((7, 40, len(content) - 1)):
        damaged = tmp_path / f"{at}.safetensors"
        damaged.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="no file of safetensors"):
            open_source(damaged)
    swapped = content.replace(b'"shape":[6]', b'"shape":[5]')
    (tmp_path / "swapped.safetensors").write_bytes(swapped)
    with pytest.raises(CheckpointError, match="has 24 bytes"):
        open_source(tmp_path / "swapped.safetensors")


def test_remote_paths(saved: dict[str, Path], tmp_path: Path) -> None:
    expected = weights_of(saved["full"])
    for kind, source in saved.items():
        folder = f"memory://out/{kind}"
        consolidate(f"file://{source}", "memory://out/a.ckpt")
        consolidate("memory://out/a.ckpt", folder, Consolidation(max_shard_bytes=500))
        consolidate(folder, tmp_path / "back.pt")
        assert_same(weights_of(tmp_path / "back.pt"), expected)


@pytest.mark.parametrize("is_remote", [False, True])
def test_weights_in_hugging_face_layout_take_the_place_of_earlier_ones(
    saved: dict[str, Path], tmp_path: Path, *, is_remote: bool
) -> None:
    """A folder that `consolidate` itself had written was refused for holding other files."""
    import fsspec

    folder = "memory://again/hf" if is_remote else str(tmp_path / "hf")
    filesystem, inner = fsspec.core.url_to_fs(folder)
    consolidate(saved["full"], folder, Consolidation(max_shard_bytes=500))
    filesystem.pipe(f"{inner}/config.json", b"{}")
    consolidate(saved["sharded"], folder)  # into one file, so that none of several may be left
    names = {Path(name).name for name in filesystem.ls(inner, detail=False)}
    assert names == {"model.safetensors", "config.json"}
    consolidate(folder, tmp_path / "back.pt")
    assert_same(weights_of(tmp_path / "back.pt"), weights_of(saved["full"]))


def test_a_model_whose_index_never_came_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    """A model whose index never came was taken for one of fewer tensors."""
    consolidate(saved["full"], tmp_path / "hf", Consolidation(max_shard_bytes=500))
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors\.index\.json"):
        consolidate(tmp_path / "hf", tmp_path / "out.pt")


def test_a_remote_folder_is_read_where_it_lies(saved: dict[str, Path], tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in saved["sharded"].iterdir():
        memory.pipe(f"/folder/{file.name}", file.read_bytes())
    consolidate("memory://folder", tmp_path / "out.ckpt")
    assert_same(weights_of(tmp_path / "out.ckpt"), weights_of(saved["full"]))


MEMORY = """
import resource, sys
import torch
import torch.distributed.checkpoint as dcp
from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

root, step = sys.argv[1:]
if step == "write":
    names = [f"layer.{at}.weight" for at in range(40)]
    tensor = torch.randn(1024, 1024)
    dcp.save({"state_dict": {name: tensor for name in names}}, checkpoint_id=f"{root}/big")
    dcp.save({"state_dict": {"layer.0.weight": tensor[:8]}}, checkpoint_id=f"{root}/small")
else:
    outputs = ("a.ckpt", "a.pt", "a.safetensors", "hf")
    for output in outputs:
        consolidate(f"{root}/small", f"{root}/small_{output}", Consolidation())
    before = peak()
    for output in outputs:
        consolidate(f"{root}/big", f"{root}/{output}", Consolidation(max_shard_bytes=50_000_000))
    consolidate(f"{root}/a.ckpt", f"{root}/b.safetensors")
    consolidate(f"{root}/hf", f"{root}/c.ckpt")
    print("above", (peak() - before) // 2**20, "MiB")
"""


@pytest.mark.slow
def test_a_consolidation_takes_the_memory_of_a_few_tensors(tmp_path: Path) -> None:
    for step in ("write", "consolidate"):
        finished = run_alone("-c", MEMORY, str(tmp_path), step)
        assert finished.returncode == 0, finished.output
    assert (tmp_path / "a.safetensors").stat().st_size > 160 * 2**20
    above = int(finished.output.rpartition("above ")[2].partition(" ")[0])
    assert above < 60  # of tensors of 4 MiB
