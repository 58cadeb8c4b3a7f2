"""The private names of torch and Lightning stand in a few files: found in the source, not listed.

A name is private to another package when it begins with one underscore and

    from torch.x import _y, import torch._x     is imported,
    torch._x, Class._x                          hangs on something that was imported,
    anything._x, getattr(anything, "_x")        or is defined nowhere in this package.

What this package defines under the same name by accident is in `ALSO_OURS`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent
FOREIGN = (
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
)
MAY_TOUCH_THEM = {
    "backends/_c10d.py",
    "backends/debug_wrapper.py",
    "backends/in_process/rank_globals.py",
    "checkpoint/files/reading.py",
    "checkpoint/conversion/loading.py",
    "checkpoint/files/torch_archive.py",
    "checkpoint/sharded/boxed_tensor.py",
    "checkpoint/sharded/folder.py",
    "checkpoint/sharded/run_state.py",
    "data_parallel/torch_private.py",
    "elastic/_lightning.py",
    "elastic/elastic_sampler.py",
    "elastic/data_assignment.py",
    "elastic/loop.py",
    "fabric/_lightning.py",
    "fabric/registry.py",
    "environments/launchers/_copy.py",
    "environments/launchers/_lightning.py",
    "on_pytorch_lightning/counterparts.py",
    "pipeline_parallel/_torch.py",
    "precision/policy.py",
    "precision/plugins.py",
    "core/_lightning.py",
    "core/checkpoint_paths.py",
    "strategies/trainer/_lightning.py",
    "strategies/trainer/callbacks.py",
}
"""Each is named for it or says so in its docstring; a test of each fails when upstream changes."""

EXTENSION_POINTS = {
    # Tensor subclasses and functions on tensors cannot be written without these.
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._disabled_torch_function_impl",
    "torch.Tensor._make_wrapper_subclass",
    *(f"torch.utils._pytree.{name}" for name in ("tree_flatten", "tree_leaves", "tree_map_only")),
    # Names of operators are what programs save.
    *(f"torch._foreach_{name}_" for name in ("add", "copy", "zero")),
    "torch.ops.aten._foreach_zero_.default",
    "torch.ops.aten._grouped_mm",
    "torch.ops.aten._grouped_mm.default",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_mm",
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_foreach_", "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view"),
    # Every module, tensor, operation and process has these, as does a fixture of pytest.
    *("_modules", "_parameters", "_version", "_schema", "_fixtureinfo"),
    *("_replace", "_fields"),  # a named tuple's, and public
    *("_name_", "_value_"),  # an enumeration's, and documented
    # What Lightning calls of a class that derives from its own; mypy fails when there is no more.
    *("_after_closure", "_call_children_scripts", "_clip_gradients", "_configure_launcher"),
}
STRINGS_OF_OUR_OWN = {
    *("_parted", "_pytest"),
    "_proj_weight",  # the end of a name
}
OUR_PREFIXES = ("_lightning_shard_", "_pipeline_", "_tensor_parallel_")
ALSO_OURS = {"_computed", "_launcher", "_optimizer", "_results", "_sampler", "_trainer"}
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)")


def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_override(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith("override") for one in function.decorator_list)


def targets(statement: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(statement, ast.Assign):
        yield from (node for target in statement.targets for node in ast.walk(target))
    elif isinstance(statement, ast.AnnAssign):
        yield statement.target


def defined(tree: ast.Module) -> set[str]:
    """What a file defines: functions, classes, their attributes; not what it overrides."""
    names = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and not is_override(node)
        ):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
        if isinstance(node, (ast.ClassDef, ast.Module)):
            for statement in node.body:
                names.update(one.id for one in targets(statement) if isinstance(one, ast.Name))
    return names


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def imports(tree: ast.Module) -> dict[str, str]:
    """Return by name in a file what it stands for, of everything that is imported."""
    names = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def is_foreign(path: str) -> bool:
    return path.partition(".")[0] in FOREIGN


def touched(tree: ast.Module, ours: set[str]) -> set[str]:
    """Return the names in a file that are private to another package."""
    names = imports(tree)
    found = {path for path in imported(tree) if any(map(is_private, path.split(".")))}
    inner = {node.value for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            found.update(of_attributes(node, names, ours))
        elif isinstance(node, ast.Constant):
            found.update(in_strings(node.value, ours))
        elif isinstance(node, ast.FunctionDef) and is_override(node) and is_private(node.name):
            found.update({node.name} - ours)
    return found - EXTENSION_POINTS - STRINGS_OF_OUR_OWN


def imported(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_foreign(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_foreign(node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_attributes(node: ast.AST, names: dict[str, str], ours: set[str]) -> Iterator[str]:
    """Yield what is private in a chain of attributes, `a.b.c`."""
    path: list[str] = []
    chain = node
    while isinstance(chain, ast.Attribute):
        path.insert(0, chain.attr)
        chain = chain.value
    home = names.get(chain.id) if isinstance(chain, ast.Name) else None
    if home is not None:
        full = ".".join([home, *path])
        if is_foreign(home) and any(map(is_private, path)):
            yield full
        return
    is_own = isinstance(chain, ast.Name) and chain.id in ("self", "cls")
    for place, name in enumerate(path):
        if is_private(name) and (
            name not in ours or (name in ALSO_OURS and not (is_own and place == 0))
        ):
            yield name


def in_strings(text: object, ours: set[str]) -> Iterator[str]:
    """Yield a name that is written as a string, for `getattr`, `patch.object`, `vars`."""
    if not isinstance(text, str) or text in ours or text.startswith(OUR_PREFIXES):
        return
    if PRIVATE.fullmatch(text):
        yield text


def found_in(sources: dict[str, ast.Module]) -> dict[str, set[str]]:
    ours = set[str]().union(*map(defined, sources.values()))
    found = defaultdict(set)
    for name, tree in sources.items():
        if touching := touched(tree, ours):
            found[name] = touching
    return dict(found)


def test_private_names_of_other_packages_stand_in_the_files_that_may_touch_them() -> None:
    found = found_in(trees())
    assert {file: names for file, names in found.items() if file not in MAY_TOUCH_THEM} == {}
    assert found.keys() == MAY_TOUCH_THEM  # and no file may that need not


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.distributed import _x", "torch.distributed._x"),
        ("from torch._x import y", "torch._x.y"),
        ("import lightning.pytorch._x", "lightning.pytorch._x"),
        ("import torch\ntorch.x._y.z()", "torch.x._y.z"),
        ("from torch import nn as n\nn.Module._x", "torch.nn.Module._x"),
        ("def f(trainer): return trainer.fit_loop._x.y", "_x"),
        ("def f(trainer): trainer.fit_loop._x = 1", "_x"),
        ("class A(B):\n    def f(self): return self._x", "_x"),
        ("class A(B):\n    @override\n    def _x(self): ...", "_x"),
        ("class A:\n    def f(self): return super()._x()", "_x"),
        ("def f(a): return getattr(a, '_x', None)", "_x"),
        ("def f(a):\n    with patch.object(a, '_x', 1): ...", "_x"),
        ("class A:\n    def f(self, m): self._trainer = m._trainer", "_trainer"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert found_in({"file": ast.parse(source)}) == {"file": {name}}


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys._getframe()",
        "class A:\n    _x = 1\n    def f(self, other): return self._x, other._x",
        "class A:\n    def f(self): self._x = 1\ndef g(a): return a.b._x",
        "class A:\n    def f(self): self._trainer = self._trainer",
        "from torch.utils._pytree import tree_leaves",
        "def f(module): return module._parameters, module.__dict__",
    ],
)
def test_names_of_our_own_and_extension_points_are_not_private_to_others(source: str) -> None:
    assert found_in({"file": ast.parse(source)}) == {}
