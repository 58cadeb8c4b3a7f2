"""Any path as a checkpoint whose tensors are not read: what kind it is decides its content.

a folder with .metadata                           torch.distributed.checkpoint
a folder with model.safetensors[.index.json]      Hugging Face
a file that begins as an archive                  torch.save: .ckpt, .pt
*.safetensors                                     safetensors
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.conversion.safetensors_files import read_safetensors
from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.checkpoint.files.places import (
    file_sizes,
    fresh_place,
    inside,
    local_path,
    opened,
    remote_place,
)
from lightning_shard.checkpoint.files.reading import ArchiveFile, is_archive, read_file, verify_file
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.entries import (
    is_flattened,
    nothing_kept,
    parts_of,
    stored_entries,
)
from lightning_shard.checkpoint.sharded.folder import StoredFolder, verify_whole
from lightning_shard.checkpoint.unread import bytes_in, exchanged, is_unread, present, tensors_in
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError

Kind = Literal["sharded", "full", "weights", "safetensors", "huggingface"]
INDEX_OF_SAFETENSORS = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PART = re.compile(r".*-\d+-of-\d+\.safetensors")
_STATES = "optimizer_states"


def folder_checkpoint(
    folder: StoredFolder, meta: Mapping[str, Any], *, weights_only: bool
) -> dict[str, Any]:
    """Return a folder's checkpoint; no tensor is read."""
    weights, states, others = parts_of(folder)
    checkpoint = {**nothing_kept(), **meta, "state_dict": weights}
    if weights_only:
        return checkpoint
    if states:
        checkpoint["optimizer_states"] = [numbered(one, folder.path) for one in states]
    if CHECKPOINT_KEY in folder.roots:
        kept = stored_entries(folder)
        checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), **kept}
    return checkpoint | others


def numbered(state: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Return an optimizer's state by the numbers that torch gives its parameters."""
    if is_flattened(state):  # as torchtitan saves it
        raise _unknown_form(path)
    numbers: dict[Any, int] = {}
    groups = []
    for group in state["param_groups"]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise _unknown_form(path)
        own = list(group["params"])
        numbers |= {name: len(numbers) + at for at, name in enumerate(own)}
        groups.append({**group, "params": [numbers[name] for name in own]})
    if not groups and (state["state"] or len(state) > 2):
        raise _unknown_form(path)
    entries = {numbers.get(name, name): one for name, one in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _unknown_form(path: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} holds an optimizer's state without groups that list its parameters, expected "
        f"those of torch's get_optimizer_state_dict. Give --weights-only for the weights alone."
    )


@dataclass
class Source:
    """A checkpoint that was opened."""

    path: Any
    kind: Kind
    checkpoint: dict[str, Any]
    folder: StoredFolder | None = None

    @property
    def weights(self) -> dict[str, Any]:
        """The weights by name, with what else the `state_dict` holds."""
        weights: dict[str, Any] = self.checkpoint["state_dict"]
        return weights


def open_source(
    path: Any, *, objects: bool = False, trust: bool = False, weights_only: bool = False
) -> Source:
    """Open a checkpoint, of which no tensor is read."""
    filesystem, inner = remote_place(path)
    if not filesystem.exists(inner):
        raise CheckpointNotFoundError(
            f"There is no checkpoint {str(path)!r}, expected a file or a folder. Check the path."
        )
    if filesystem.isdir(inner):
        return _open_folder(path, objects=objects, trust=trust, weights_only=weights_only)
    if str(path).endswith(_SUFFIX):
        return _of_weights(path, "safetensors", read_safetensors(path))
    archive = ArchiveFile(path) if is_archive(path) else None
    if archive is not None and not (objects and archive.has_objects):
        return _of_content(path, archive.content)
    return _of_content(path, _loaded(path, trust))


def _open_folder(path: Any, *, objects: bool, trust: bool, weights_only: bool) -> Source:
    names = set(file_sizes(path))
    if INDEX_FILE in names:
        folder = StoredFolder(path, not trust)
        meta = folder.meta() if objects else {}
        if folder.meta_name in names and not objects:
            meta = ArchiveFile(inside(path, folder.meta_name)).content
        checkpoint = folder_checkpoint(folder, meta, weights_only=weights_only)
        return Source(path, "sharded", checkpoint, folder)
    if any(name.endswith(_SUFFIX) for name in names):
        return _of_weights(path, "huggingface", read_hugging_face(path))
    raise CheckpointError(
        f"{str(path)!r} is a folder without {INDEX_FILE}, expected a sharded checkpoint (its "
        f"{INDEX_FILE} is written last: saving may not have come to its end), or safetensors. It "
        f"holds {', '.join(sorted(names)[:5]) or 'nothing'}."
    )


def read_hugging_face(path: Any) -> dict[str, Any]:
    """Return the tensors of a folder of safetensors by name; none is read."""
    names = file_sizes(path)
    if INDEX_OF_SAFETENSORS not in names:
        if any(map(_PART.fullmatch, names)):  # the index is written last
            raise CheckpointError(
                f"{str(path)!r} lacks {INDEX_OF_SAFETENSORS}, expected it beside files of which "
                f"each is one of several: writing may not have come to its end. Copy the whole "
                f"folder."
            )
        files = [inside(path, name) for name in sorted(names) if name.endswith(_SUFFIX)]
        return {name: one for file in files for name, one in read_safetensors(file).items()}
    try:
        with opened(inside(path, INDEX_OF_SAFETENSORS)) as file:
            places: Mapping[str, str] = json.loads(file.read())["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{inside(path, INDEX_OF_SAFETENSORS)} cannot be read ({error!r}), expected the index "
            f"of a model in Hugging Face layout. Copy it again from where it is whole."
        ) from error
    missing = [name for name in files if name not in names]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} lacks {', '.join(missing)}, expected the {len(files)} files of its "
            f"index. Copy the whole folder."
        )
    held = {name: read_safetensors(inside(path, name)) for name in files}
    for name, where in places.items():
        if name not in held[where]:
            raise CheckpointError(
                f"{inside(path, where)} holds no {name!r}, expected it as the index says. Copy "
                f"the whole folder again."
            )
    return {name: held[where][name] for name, where in places.items()}


def _loaded(path: Any, trust: bool) -> Any:
    """Load a file with its objects: local ones are mapped into memory."""
    place = local_path(path)
    if place is None:
        return read_file(path, "cpu", weights_only=not trust)
    try:
        return torch.load(place, "cpu", weights_only=not trust, mmap=True)
    except Exception:  # told by name, or it is of torch before 1.6
        return read_file(path, "cpu", weights_only=not trust)


def _of_content(path: Any, content: Any) -> Source:
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(content).__name__}, expected a checkpoint or a "
            f"state_dict. Load it with torch.load."
        )
    whole = present(content)
    if not isinstance(whole.get("state_dict"), Mapping):
        if not any(is_unread(value) for value in whole.values()):
            raise CheckpointError(
                f"{str(path)!r} holds {', '.join(map(repr, list(whole)[:5])) or 'nothing'}, "
                f"expected 'state_dict', or tensors by name."
            )
        return _of_weights(path, "weights", whole)
    return Source(path, "full", whole)


def _of_weights(path: Any, kind: Kind, weights: Mapping[str, Any]) -> Source:
    return Source(path, kind, {**nothing_kept(), "state_dict": weights})


def verify(path: Any) -> bool:
    """Compare a checkpoint with the checksums that it has, and say whether it has any."""
    filesystem, inner = fresh_place(path)
    if not filesystem.isdir(inner):
        return filesystem.isfile(inner) and verify_file(path)
    return filesystem.isfile(inside(inner, INDEX_FILE)) and verify_whole(path)


class UnreadStates(Sequence[Any]):
    """The optimizers' states, which are read when somebody asks for one: a model needs none."""

    def __init__(self, states: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._states, self._read = states, read

    @override
    def __len__(self) -> int:
        return len(self._states)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._read(self._states[index])


def whole_checkpoint(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder to the CPU, which is compared with its checksums first."""
    verify(path)
    checkpoint = open_source(path, objects=True, trust=weights_only is False).checkpoint

    def read(nested: Any) -> Any:
        return exchanged(nested, lambda one: _mapped(one.read(), map_location))

    states = checkpoint.pop(_STATES, None)
    whole: dict[str, Any] = read(checkpoint)
    if states is not None:
        whole[_STATES] = UnreadStates(states, read)
    return whole


def _mapped(tensor: Tensor, map_location: Any) -> Tensor:
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if isinstance(map_location, (str, int, torch.device)):
        return tensor.to(map_location)
    storage = map_location(tensor.untyped_storage(), "cpu")
    return tensor if storage is None else tensor.to(storage.device)


_KINDS = {
    "sharded": "sharded: a folder of torch.distributed.checkpoint",
    "full": "full: a file of torch.save",
    "weights": "weights: a state_dict in a file of torch.save",
    "safetensors": "safetensors: one file",
    "huggingface": "safetensors: a folder in Hugging Face layout",
}
_SCORES = {"monitor", "best_model_score", "current_score", "best_score", "best_model_path"}
_VERSIONS = "pytorch-lightning_version"


def describe(path: Any, *, check: bool = False) -> dict[str, Any]:
    """Return what there is to say of a checkpoint.

    Args:
        path: A folder or a file, local or any path of fsspec's.
        check: Whether it is read and compared with its checksums.

    Returns:
        "missing" lists what it lacks; "damaged" says what is wrong, None where nothing is, or where
        nobody has looked; "verified" is whether it was read and compared with checksums.

    Raises:
        CheckpointError: There is none, or its list of contents is damaged.
    """
    source = _opened(path)
    verified, damaged = _verified(path) if check else (False, None)
    checkpoint = source.checkpoint
    sizes = file_sizes(path)
    return {
        "path": str(path),
        "format": source.kind,
        "what": _KINDS[source.kind],
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        **_writer(source, sizes),
        "epoch": _plain(checkpoint.get("epoch")) if "loops" in checkpoint else None,
        "global_step": _plain(checkpoint.get("global_step")) if "loops" in checkpoint else None,
        "weights": _weights(source),
        "optimizers": [_optimizer(one) for one in checkpoint.get("optimizer_states", ())],
        "metrics": list(_metrics(checkpoint.get("callbacks"))),
        "hyper_parameters": _plain(checkpoint.get("hyper_parameters", {})),
        "missing": [] if source.folder is None else source.folder.lacking(),
        "verified": verified,
        "damaged": damaged,
    }


def _opened(path: Any) -> Source:
    try:
        return open_source(path)
    except CheckpointError:  # of optimizers, where the rest may be there
        return open_source(path, weights_only=True)


def _verified(path: Any) -> tuple[bool, str | None]:
    try:
        return verify(path), None
    except CheckpointError as error:
        return True, str(error)


def _writer(source: Source, sizes: Mapping[str, int]) -> dict[str, Any]:
    section = source.checkpoint.get(CHECKPOINT_KEY) or {}
    layout = section.get("layout") or {}
    versions = {name: str(one) for name, one in (section.get("versions") or {}).items()}
    if source.kind in ("sharded", "full") and "loops" in source.checkpoint:
        versions.setdefault("lightning", str(source.checkpoint.get(_VERSIONS)))
    ranks = layout.get("ranks")
    if ranks is None and source.kind == "sharded":
        names = [name for name in sizes if name.endswith(".distcp")]
        ranks = len({name.strip("_").partition("_")[0] for name in names}) or None
    return {
        "format_number": section.get("format"),
        "scheme": layout.get("scheme"),
        "mesh": _plain(layout.get("mesh")),
        "ranks": ranks,
        "versions": versions,
        "kept": sorted(set(section) - {"format", "layout", "versions", "random"}),
    }


def _weights(source: Source) -> dict[str, Any]:
    tensors = {name: value for name, value in source.weights.items() if is_unread(value)}
    unique = {id(one): one for one in tensors.values()}.values()
    dtypes: Counter[str] = Counter()
    for one in unique:
        dtypes[_name(one)] += one.shape.numel()
    return {
        "elements": sum(one.shape.numel() for one in unique),
        "bytes": sum(map(bytes_in, unique)),
        "dtypes": dict(dtypes.most_common()),
        "tensors": {
            name: {"shape": list(one.shape), "dtype": _name(one)} for name, one in tensors.items()
        },
        "others": [name for name in source.weights if name not in tensors],
    }


def _optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    keeps: Counter[str] = Counter()
    for entries in state.get("state", {}).values():
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            keeps[str(key)] += bytes_in(value) if is_unread(value) else 0
    groups: Sequence[Mapping[str, Any]] = state.get("param_groups", ())
    return {
        "groups": [
            {
                "parameters": len(group.get("params", ())),
                **{key: _plain(one) for key, one in group.items() if key != "params"},
            }
            for group in groups
        ],
        "keeps": dict(keeps),
        "bytes": sum(map(bytes_in, tensors_in(state))),
    }


def _metrics(callbacks: Any) -> Iterator[dict[str, Any]]:
    """Yield what the callbacks that watch a metric knew of it."""
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if isinstance(state, Mapping) and _SCORES & state.keys():
            told = {key: _plain(value) for key, value in state.items() if key in _SCORES}
            yield {"callback": str(name).partition("{")[0], **told}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: small tensors are read, other objects become their kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_unread(value):
        if value.shape.numel() == 1:
            return value.read().item()
        return f"{_name(value)} {tuple(value.shape)}"
    if isinstance(value, Mapping) and (value or type(value) is dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type(value).__name__


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
