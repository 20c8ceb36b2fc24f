"""MODEL on the command line: a zoo name, `file.py:function`, `package.module:function`, `hf:file`.

A function returns `(module, args, kwargs)`: an `nn.Module` and an example batch for it. It may
take any of `batch`, `seq`, `layers` and `hidden`, which the options of the same names set. The
file may define `RULES`, a dict from operator names to rule makers.

`shardfold models`: what the zoo holds.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from shardfold.errors import ModelError, nearest
from shardfold.zoo.catalog import Entry, entry, names

if TYPE_CHECKING:
    from torch import nn

    from shardfold.api import Planner
    from shardfold.operators import Rules

CONFIG = "hf:"
Sizes = Mapping[str, Any]
"""The options that resize a model: `batch`, `seq`, `layers`, `hidden`; None where not given."""


@dataclass(frozen=True, slots=True)
class Example:
    """A model, a batch for it, and the rules that came with it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rules: Rules = field(default_factory=dict)


def load_model(text: str, sizes: Sizes, device: str = "meta") -> Example:
    """The model that `text` names, at the sizes that were given; a function picks its device."""
    if text.startswith(CONFIG):
        return _from_config(text.removeprefix(CONFIG), sizes, device)
    source, colon, function = text.rpartition(":")
    if colon:
        return _from_function(source, function, sizes)
    _refuse_bare_path(text)
    from shardfold import zoo

    return Example(*zoo.build(text, **sizes, device=device))


@contextmanager
def planner_for(text: str, sizes: Sizes, **given: Any) -> Iterator[Planner]:
    """A planner of the MODEL that a text names, with progress shown and other libraries quiet."""
    from shardfold.api import Planner
    from shardfold.cli.printing import progress, quiet

    with progress() as watch:
        with quiet():
            example = load_model(text, sizes)
        with quiet(mute=True):
            yield Planner(
                example.module,
                example.args,
                example.kwargs,
                rules=example.rules,
                watch=watch,
                **given,
            )


def _from_config(path: str, sizes: Sizes, device: str) -> Example:
    from shardfold import zoo

    if sizes.get("hidden") is not None:
        raise ModelError(f"--hidden does not go with {CONFIG}{path}: edit the configuration.")
    kept = {name: size for name, size in sizes.items() if name != "hidden"}
    return Example(*zoo.from_config(path, **kept, device=device))


def _refuse_bare_path(text: str) -> None:
    """A path alone names no model: say how to write it."""
    suffix = Path(text).suffix
    if suffix == ".py":
        raise ModelError(f"{text} is a file: name the function that builds it, {text}:make.")
    if suffix == ".json":
        raise ModelError(
            f"{text} is a file: for a Hugging Face configuration write {CONFIG}{text}."
        )


def _from_function(source: str, function: str, sizes: Sizes) -> Example:
    is_file = source.endswith(".py") or os.sep in source
    module = _import_file(source) if is_file else _import_module(source)
    maker = _function(module, source, function)
    name = f"{function}() of {source}"
    given = {size: value for size, value in sizes.items() if value is not None}
    _check_takes(maker, name, given)
    try:
        made = maker(**given)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} raised {_last_line(error)}") from error
    return Example(*_checked(made, name), rules=_rules(module, source))


def _import_file(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        known = [str(file) for file in sorted(path.parent.glob("*.py"))]
        raise ModelError(f"There is no file {source}. {nearest(source, known) if known else ''}")
    if (known_module := _already_run(path)) is not None:
        return known_module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{source} is no Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # As python does for a script: its folder is searched, and it can be found by its name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{source} could not be imported: {_last_line(error)}") from error
    _RUN[_state(path)] = module
    return module


# A file is run once while it stays as it is: torch takes the first operator away where a second
# file registers one of its name, and models that were built with the first would call freed memory.
_RUN: dict[tuple[Path, int, int], ModuleType] = {}


def _already_run(path: Path) -> ModuleType | None:
    """Return the module of a file that was run before, here or by an import of its name."""
    state = _state(path)
    imported = sys.modules.get(path.stem)
    if imported is not None and imported not in _RUN.values():
        file = getattr(imported, "__file__", None)
        if file is not None and Path(file).resolve() == path.resolve():
            _RUN[state] = imported
    return _RUN.get(state)


def _state(path: Path) -> tuple[Path, int, int]:
    """Which file, and which of its contents."""
    stat = path.stat()
    return path.resolve(), stat.st_mtime_ns, stat.st_size


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ModelError(
                f"There is no module {error.name}, searched here and in the environment. "
                f"For a file write path/to/file.py:function."
            ) from error
        raise ModelError(f"{name} could not be imported: {_last_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} could not be imported: {_last_line(error)}") from error


def _function(module: ModuleType, source: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    hint = nearest(name, own) if own else "It defines no functions."
    raise ModelError(f"{source} has no function {name!r}. {hint}")


def _check_takes(maker: Callable[..., Any], name: str, given: Mapping[str, int]) -> None:
    parameters = inspect.signature(maker).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for size in given:
        if size not in parameters:
            raise ModelError(f"{name} takes no {size}: leave --{size} out, or add the parameter.")


def _checked(made: Any, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a function returned, if it is a module, positional and keyword arguments."""
    wanted = "(module, args, kwargs): an nn.Module, a tuple and a dict, such as (model, (x,), {})"
    if not isinstance(made, tuple) or len(made) != 3:
        raise ModelError(f"{name} must return {wanted}; it returned {_type(made)}.")
    module, args, kwargs = made
    from torch import nn

    is_right = (
        isinstance(module, nn.Module),
        isinstance(args, tuple | list),
        isinstance(kwargs, dict),
    )
    if not all(is_right):
        got = ", ".join(map(_type, made))
        raise ModelError(f"{name} must return {wanted}; it returned ({got}).")
    return module, tuple(args), kwargs


def _rules(module: ModuleType, source: str) -> Rules:
    from shardfold.operators import Operator

    rules = getattr(module, "RULES", {})
    if isinstance(rules, Mapping) and all(
        isinstance(kind, str) and (callable(own) or isinstance(own, Operator))
        for kind, own in rules.items()
    ):
        return rules
    raise ModelError(
        f"RULES in {source} must map operator names to functions of a Call, or to Operators."
    )


def _type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__


def _last_line(error: BaseException) -> str:
    """The error's own line, and where in the user's code it was raised."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    here = [
        frame
        for frame in frames
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    if not here:
        return text
    return f"{text} ({Path(here[-1].filename).name}, line {here[-1].lineno})"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    r"""List the models of the zoo, with the batch that each is planned for.

    \b
    shardfold models
    shardfold models --json
    """
    entries = [entry(name) for name in names()]
    if as_json:
        click.echo(json.dumps([asdict(known) for known in entries], indent=2))
        return
    _print([known for known in entries if not known.is_tiny])


def _print(entries: list[Entry]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        caption="Each has a laptop-sized variant with the same structure: alexnet-tiny, ... "
        "hf: from Hugging Face transformers (pip install 'shardfold\\[hf]').",
        caption_justify="left",
    )
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("seq", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for known in entries:
        origin = "hf" if "Hugging Face" in known.source else ""
        seq = "" if known.seq is None else str(known.seq)
        table.add_row(known.name, known.summary, str(known.batch), seq, origin)
    Console().print(table)
