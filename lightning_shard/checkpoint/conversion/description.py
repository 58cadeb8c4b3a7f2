"""What there is to say of a checkpoint, of which only small values are read; nothing of it is run.

Everything is numbers, texts, lists and dictionaries, so that scripts get it as JSON.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_shard.checkpoint.conversion.source import Source, open_source, verify
from lightning_shard.checkpoint.files.places import file_sizes
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.unread import bytes_in, is_unread, numel_of, tensors_in
from lightning_shard.errors import CheckpointError

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
    """Return who has written it, as far as it says so."""
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
        dtypes[_name(one)] += numel_of(one)
    return {
        "elements": sum(map(numel_of, unique)),
        "bytes": sum(map(bytes_in, unique)),
        "dtypes": dict(dtypes.most_common()),
        "tensors": {
            name: {"shape": list(one.shape), "dtype": _name(one)} for name, one in tensors.items()
        },
        "others": [name for name in source.weights if name not in tensors],
    }


def _optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's groups, and what it keeps of each parameter."""
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
        if numel_of(value) == 1:
            return value.read().item()
        return f"{_name(value)} {tuple(value.shape)}"
    if isinstance(value, Mapping) and (value or type(value) is dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type(value).__name__


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
