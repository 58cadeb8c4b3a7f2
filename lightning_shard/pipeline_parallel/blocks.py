"""The blocks of a model: the one list of repeated modules that a pipeline cuts into stages.

    LightningModule
    └ model
      ├ embed
      ├ layers     ModuleList of 12 x Block     the block list, "model.layers"
      ├ norm
      └ head

A list is found when its children are of one class and it has most of the parameters that such lists
have; lists within a block do not count. Where two are about as heavy, the user says which. A list
of differing layers is found when it has nearly all parameters and repeated blocks have few.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_shard.core.modules import largest_layers, num_parameters
from lightning_shard.data_parallel.torch_private import (
    COMPILED_MODULE,
    is_compiled,
    is_compiled_function,
)
from lightning_shard.errors import ConfigError

_CALLED = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_MOST = 2 / 3  # of the parameters of all lists of repeated blocks
_NEARLY_ALL = 0.9  # of the model's parameters


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """The modules that a pipeline's stages are made of, in the order in which they are called.

    Attributes:
        path: Path of the list in the model; empty when the model itself is the list.
    """

    path: str
    modules: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.modules)

    def name(self, index: int) -> str:
        """Return the path of one block, for messages."""
        return f"{self.path}.{index}".lstrip(".")


def find_blocks(model: nn.Module, path: str | None = None) -> BlockList:
    """Find the block list of a model, or take the one that `path` names.

    Args:
        model: Any module; its parameters may be on any device, meta included.
        path: Path of the list as in `named_modules`, such as "model.layers"; the wrappers of
            `torch.compile` may be left out. None finds the list.

    Raises:
        ConfigError: No list fits or several do, `path` names none, or one module is in the list
            twice.
    """
    found = _find(model) if path is None else _resolve(model, path)
    blocks = BlockList(path=found, modules=all_children(model.get_submodule(found)))
    first_of: dict[nn.Module, int] = {}
    for index, block in enumerate(blocks.modules):
        first = first_of.setdefault(block, index)
        if first != index:
            raise ConfigError(
                f"The blocks {blocks.name(first)!r} and {blocks.name(index)!r} are the same "
                f"module, which may have to be on two stages; expected {len(blocks)} different "
                f"ones. Give each place a block of its own, or name another list with blocks=...."
            )
    return blocks


def check_calls(model: nn.Module, blocks: BlockList) -> None:
    """Check that a pipeline can intercept the calls of single blocks.

    Raises:
        ConfigError: A block has no forward, or `torch.compile` was applied to a module that
            contains the blocks.
    """
    for index, block in enumerate(blocks.modules):
        # a compiled block has its forward on the instance
        if type(block).forward is nn.Module.forward and "forward" not in vars(block):
            raise ConfigError(
                f"The block {blocks.name(index)!r} is a {type(block).__name__}, which a step does "
                f"not call; expected modules with a forward. Make one module of what each holds, "
                f"and call that."
            )
    names = blocks.path.split(".") if blocks.path else []
    paths = [".".join(names[:stop]) for stop in range(len(names) + 1)]
    for path in paths:
        module = model.get_submodule(path)
        if _is_compiled(module):
            raise ConfigError(
                f"{path or type(model).__name__!r} is compiled as a whole, but a pipeline cuts it "
                f"between its blocks; expected compiled blocks at most. Compile each block instead:"
                f" for block in the {len(blocks)} of {blocks.path!r}: block.compile()."
            )


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` was applied to a module, or to its methods as Lightning does."""
    functions = (vars(module).get(name) for name in _CALLED)
    return is_compiled(module) or any(map(is_compiled_function, functions))


def all_children(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the children, unlike `children()` with one that is registered twice listed twice."""
    return tuple(child for child in module._modules.values() if child is not None)


def _find(model: nn.Module) -> str:
    sizes = dict(_repeated(model))
    mixed = _mixed(model)
    if mixed is not None and 2 * sum(sizes.values()) < num_parameters(model):
        return mixed
    if not sizes:
        raise ConfigError(
            f"Use strategy='zero3', which needs no blocks, or put layers that are called one after "
            f"the other into one nn.Sequential: {type(model).__name__} has no list of repeated "
            f"blocks to cut into stages; expected a ModuleList or Sequential of two or more "
            f"modules of one class. {_lists_of(model)}"
        )
    heaviest = max(sizes, key=lambda path: sizes[path])
    if sizes[heaviest] < _MOST * sum(sizes.values()):
        raise ConfigError(_which_one(model, sizes, heaviest))
    return heaviest


def _repeated(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield path and parameters of the outermost lists of children of one class."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) or not _is_list(module):
            continue
        children = all_children(module)
        inner = {type(child._modules.get(COMPILED_MODULE) or child) for child in children}
        if len(children) > 1 and len(inner) == 1:  # of one class, compiled or not
            inside += (f"{path}." if path else "",)
            if numel := num_parameters(module):
                yield path, numel


def _mixed(model: nn.Module) -> str | None:
    """Return the innermost list that has nearly all parameters, in at least two of its children."""
    found = None
    enough = _NEARLY_ALL * num_parameters(model)
    for path, module in model.named_modules():
        if _is_list(module) and num_parameters(module) >= enough:
            found = path if sum(map(bool, map(num_parameters, module.children()))) > 1 else found
    return found


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _resolve(model: nn.Module, path: str) -> str:
    """Return a named list's path with the wrappers that it leads through."""
    names: list[str] = [name for name, _ in model.named_modules(remove_duplicate=False)]
    by_name = {_uncompiled(name): name for name in names}
    found = by_name.get(_uncompiled(path))
    if found is None:
        near = difflib.get_close_matches(_uncompiled(path), by_name, n=3, cutoff=0.5)
        nearest = f" The nearest are {', '.join(map(repr, near))}." if near else ""
        raise ConfigError(
            f"blocks={path!r} names no module of {type(model).__name__}.{nearest} "
            f"{_lists_of(model)}"
        )
    container = model.get_submodule(found)
    num_children = len(all_children(container))
    if not (_is_list(container) or isinstance(container, nn.ModuleDict)) or not num_children:
        raise ConfigError(
            f"blocks={path!r} is a {type(container).__name__} of {num_children} modules; expected "
            f"a ModuleList, Sequential or ModuleDict of blocks. {_lists_of(model)}"
        )
    return found


def _uncompiled(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != COMPILED_MODULE)


def _lists_of(model: nn.Module) -> str:
    """Name the model's largest lists of layers, for an error message."""
    lists = {
        path: num_parameters(one)
        for path, one in model.named_modules()
        if _is_list(one) and len(all_children(one)) > 1
    }
    largest = sorted((path for path in lists if lists[path]), key=lambda path: -lists[path])[:6]
    if not largest:
        return f"It has no ModuleList or Sequential of several layers. {largest_layers(model)}"
    return (
        f"Its largest lists are {_with_sizes(model, {path: lists[path] for path in largest})}; "
        f"name the one to cut: blocks={largest[0]!r}."
    )


def _which_one(model: nn.Module, sizes: Mapping[str, int], best: str) -> str:
    """Advise which of several lists to name, and say on which stage the others stay."""
    paths = list(sizes)
    before, after = paths[: paths.index(best)], paths[paths.index(best) + 1 :]
    stay = [
        f"{', '.join(others)} stays full on the {stage} stage"
        for others, stage in ((before, "first"), (after, "last"))
        if others
    ]
    return (
        f"Name the list to cut, such as blocks={best!r}, or use strategy='zero3', which needs no "
        f"blocks: {type(model).__name__} has several lists of repeated blocks, "
        f"{_with_sizes(model, sizes)}; expected one that has most of the parameters. With "
        f"blocks={best!r} {', and '.join(stay)}."
    )


def _with_sizes(model: nn.Module, sizes: Mapping[str, int]) -> str:
    return ", ".join(
        f"{path!r} ({len(all_children(model.get_submodule(path)))} modules, {numel:,} parameters)"
        for path, numel in sizes.items()
    )
