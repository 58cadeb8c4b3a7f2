"""The subcommands of `lightning-shard`: a LightningCLI with this package's strategies.

Errors of its parser name what a misspelt option or class was meant to be: jsonargparse says which
key it does not know, and not which one stands next to it.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from traceback import extract_tb, print_exception
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.cli.arguments import check_configurations
from lightning_shard.core.call_site import went_through_user_code
from lightning_shard.core.extras import missing_in
from lightning_shard.core.options import check_num_ranks
from lightning_shard.errors import CheckpointError, ConfigError


class ConfiguredCLI(LightningCLI):
    """LightningCLI with any model and data module, which raises what a class's constructor raised.

    jsonargparse tells of that in an error of its own about types, without a traceback.
    """

    def __init__(self, **options: Any) -> None:
        self._raised: Exception | None = None
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=NearestNamesParser,
            **options,
        )

    @override
    def before_instantiate_classes(self) -> None:
        self.parser.add_instantiator(self._instantiate, object, subclasses=True)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            raised = self._raised or _of_user_code(error)
            if raised is None:
                raise
            raise raised from None

    def _instantiate(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except Exception as error:
            self._raised = error
            raise


class ShardCLI(ConfiguredCLI):
    """Lightning's command line with this package's strategies, and `--debug`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(save_config_kwargs={"overwrite": True}, **options)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if isinstance(self.parser, NearestNamesParser) and parser is not self.parser:
            self.parser.of_subcommands.append(parser)
        parser.add_argument(
            "--debug",
            action="store_true",
            help="Show the traceback of an error of lightning_shard, not only its message.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_configurations(parser.prog)
        super().parse_arguments(parser, args)
        given = self.config.get(self.config.get("subcommand", ""), self.config)
        _check_strategy(given.get("trainer.strategy"))
        if (devices := str(given.get("trainer.devices"))).isdecimal():
            check_num_ranks(int(devices))  # of which Lightning makes a list
        if (number := given.get("trainer.accumulate_grad_batches", 1)) < 1:
            raise ConfigError(f"got accumulate_grad_batches={number}, expected 1 or more.")
        _check_checkpoint(given.get("ckpt_path"))

    def after_fit(self) -> None:
        """Refuse to end well, on one rank, where a fit was to train and its data had no batch."""
        trainer = self.trainer
        trains = trainer.limit_train_batches and trainer.max_epochs and trainer.max_steps
        num_batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if trains and trainer.is_global_zero and not num_batches:
            raise ConfigError(
                "The training loader had no batch, expected one at least: look at the path of the "
                "data, at what filters it, and at drop_last where it is shorter than a batch."
            )


def _check_strategy(name: Any) -> None:
    """Refuse the misspelt path of a class, which is taken for the name of a strategy."""
    module, _, last = str(name).rpartition(".")
    names = dir(sys.modules[module]) if isinstance(name, str) and module in sys.modules else []
    if advice := next(_nearest(last, names, f"names of {module}"), None):
        raise ConfigError(f"--trainer.strategy={name}: {advice}.")


def _check_checkpoint(path: Any) -> None:
    """Refuse what cannot be resumed from or tested, before a model is made; no tensor is read."""
    if path is None or str(path).startswith("registry") or str(path) in ("last", "best", "hpc"):
        return
    if _VERSION not in open_source(path, objects=True).checkpoint:
        raise CheckpointError(
            f"--ckpt_path={path} has no {_VERSION!r}, expected a checkpoint of a Trainer. Weights "
            f"alone are loaded by the model itself: load_state_dict."
        )


def find_classes_here() -> None:
    """Let classes of the working directory be found, as `python -m` does."""
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)


def run() -> int:
    """Run the subcommand in `sys.argv` and return the process's exit code."""
    find_classes_here()
    ShardCLI()
    return 0


_VERSION = "pytorch-lightning_version"
_LACKS_MODEL = re.compile(r"arguments are required: (?:\w+\.)?model$")
_UNSAID = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value type:", "Expected a path but"),
    *("Expected a <class 'NoneType'>", "Given value: Namespace(", "Given value: NestedArg("),
)
_AS_PYTHON_HAS_IT = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>|typing\.")
_OF_CLASS = re.compile(r"class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted")
_OF_MODULE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_OF_COMMAND = re.compile(
    r"(?:does not accept option '|Option '|unrecognized arguments: --)([\w.-]+)"
)


class NearestNamesParser(LightningArgumentParser):
    """Lightning's parser, which names the nearest options in an error about an unknown one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.of_subcommands: list[LightningArgumentParser] = []

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        advice = list(self._advice(message))
        if not self.exit_on_error:  # of a class in a configuration
            super().error("\n".join((message, *advice)), ex)
        if ex is not None and "--debug" in sys.argv:
            print_exception(ex)
        command = self.prog.replace(" [options]", "")
        told = "; ".join(advice) or _of_an_import(ex) or _in_one_line(message)
        self.exit(2, f"{command}: {told} (see {command} --help)\n")

    def _advice(self, message: str) -> Iterator[str]:
        yield from missing_in(message)
        if _LACKS_MODEL.search(message):
            yield "there is no model: give --model my_file.MyModel, or a --config that has one"
        for path, option in dict.fromkeys(_OF_CLASS.findall(message)):
            yield from _nearest(option, _options_of(path), f"options of {path}")
        for module, name in dict.fromkeys(_OF_MODULE.findall(message)):
            yield from _nearest(name, dir(import_module(module)), f"names of {module}")
        if not _OF_CLASS.search(message):
            for option in dict.fromkeys(_OF_COMMAND.findall(message)):
                yield from _nearest(option, self._options(), "options")

    def _options(self) -> set[str]:
        parsers = (self, *self.of_subcommands)
        return {key for one in parsers for key, _ in one.get_defaults().items()}


def _of_user_code(error: BaseException | None) -> BaseException | None:
    """Return what user code has raised, of which jsonargparse tells in an error of its own."""
    while error is not None and not went_through_user_code(error):
        error = error.__cause__
    return error


def _of_an_import(error: BaseException | None) -> str:
    """Return what importing a module of the user's has raised, and where."""
    raised = _of_user_code(error)
    if raised is None:
        return ""
    at = extract_tb(raised.__traceback__)[-1]
    return f"{type(raised).__name__} in {at.filename}, line {at.lineno}: {raised}"


def _in_one_line(message: str) -> str:
    """Return what jsonargparse says of the innermost key: what was expected, and what was given."""
    innermost = message[max(message.rfind("Parser key"), 0) :]
    lines = [line.strip(" -") for line in innermost.splitlines()]
    until = next((at for at, line in enumerate(lines, 1) if line.startswith("Given value:")), None)
    said = [line for line in lines[:until] if line and not line.startswith(_UNSAID)]
    return _AS_PYTHON_HAS_IT.sub(r"\1", "; ".join(dict.fromkeys(said))).replace(":; ", ": ")


def _nearest(name: str, known: Iterable[str], what: str) -> Iterator[str]:
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        yield f"{name!r} is unknown; the nearest {what}: {', '.join(near)}"
    elif what.startswith("options of"):
        yield f"{name!r} is unknown; the {what}: {', '.join(sorted(known))}"


def _options_of(class_path: str) -> set[str]:
    """Return what a class and its bases are constructed with, keywords handed on as well."""
    module, _, name = class_path.rpartition(".")
    if not module:
        return set()  # a short name: jsonargparse has found the class, and does not say where
    kind = getattr(import_module(module), name)
    own = [signature(one.__init__) for one in kind.__mro__ if "__init__" in vars(one)]
    return {option for each in own for option in each.parameters} - {"self", "args", "kwargs"}
