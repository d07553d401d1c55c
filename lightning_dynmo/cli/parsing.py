"""What the command line adds to jsonargparse: settings of the alias `dynmo`, and short errors with near misses."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, get_loader, set_loader
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

import lightning_dynmo
from lightning_dynmo.strategy import DynMoStrategy

_OPTION = "--trainer.strategy"
_load_yaml = get_loader("yaml")


class BriefParser(ArgumentParser):
    """A parser whose errors say in a few lines what is wrong and what was probably meant."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers of nested settings raise their message, which becomes part of one that is shown.
        super().error(shorten(message) if self.exit_on_error else message, ex)


class DynMoParser(BriefParser, LightningArgumentParser):
    """Lightning's parser, with brief errors."""

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self._subcommands = super().add_subcommands(*args, **kwargs)
        return self._subcommands

    def add_subcommand_of(self, options: type, name: str) -> None:
        """Adds a subcommand that takes the arguments of a class and nothing else: no model, no Trainer.

        Args:
            options: The class, whose first line is the help.
            name: Of the subcommand.
        """
        about = str(inspect.getdoc(options)).splitlines()[0]
        usage = f"{self.prog} {name} [options]"
        parser = BriefParser(prog=self.prog, usage=usage, formatter_class=self.formatter_class)
        parser.add_class_arguments(options)
        self._subcommands.add_subcommand(name, parser, help=about)


def spell_out_strategies(arguments: Sequence[str]) -> list[str]:
    """Marks strategies that are given by a class's name, or by the alias ``dynmo``, as classes.

    jsonargparse takes such names for plain text: without settings of its own, the Trainer would look for an alias of
    that name, and the alias could have none.

    Args:
        arguments: Of the command line; in the configuration files that it names, values are replaced as they are read.
    """
    set_loader("yaml", _load_and_spell_out, exceptions=(yaml.YAMLError,))
    replaced = list(arguments)
    for position, argument in enumerate(replaced):
        if argument.startswith(f"{_OPTION}="):
            value = _spelled_out(argument.removeprefix(f"{_OPTION}="))
            replaced[position] = f"{_OPTION}={value if isinstance(value, str) else json.dumps(value)}"
        elif position and replaced[position - 1] == _OPTION:
            value = _spelled_out(argument)
            replaced[position] = value if isinstance(value, str) else json.dumps(value)
    return replaced


def _load_and_spell_out(text: str) -> Any:
    value = _load_yaml(text)
    sections = [value, *value.values()] if isinstance(value, dict) else []
    for section in sections:  # those of a subcommand, or of each subcommand
        trainer = section.get("trainer") if isinstance(section, dict) else None
        if isinstance(trainer, dict) and "strategy" in trainer:
            trainer["strategy"] = _spelled_out(trainer["strategy"])
    return value


def _spelled_out(strategy: Any) -> Any:
    if strategy == DynMoStrategy.strategy_name:
        return {"class_path": f"lightning_dynmo.{DynMoStrategy.__name__}"}
    if not isinstance(strategy, str) or not re.fullmatch(r"[\w.]+", strategy) or strategy in _aliases():
        return strategy
    return {"class_path": strategy} if "." in strategy or strategy in _class_names(Strategy) else strategy


def check_strategy_name(strategy: Any) -> None:
    """Checks the name of a strategy before the Trainer does, whose error does not say which one was meant.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if isinstance(strategy, str) and strategy not in _aliases():
        known = _aliases()
        choice = _meant(strategy, known) or f" Choose one of {', '.join(known)}."
        raise ValueError(f"Unknown strategy {strategy!r}.{choice}")


def shorten(message: str) -> str:
    """Returns jsonargparse's error message without types and values that say nothing, and with the nearest name."""
    found = re.match(r'Parser key "([^"]+)":', message)
    if not found:
        option = re.search(r"Subcommand '\w+' does not accept option 'trainer\.(\w+)'$", message)
        known = inspect.signature(Trainer).parameters
        return f"{message}.{_meant(option[1], known, prefix='trainer.')}" if option else message
    key = found[1]
    for pattern, explain in _EXPLANATIONS:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return f"{key}: {explain(*match.groups())}"
    lines = [line.strip() for line in message.splitlines()[1:] if not re.search(_NOISE, line)]
    return "\n".join([f"{key}:" if lines else message, *(f"  {line[:160]}" for line in lines[:6])])


def _unknown_option(path: str, option: str) -> str:
    known = _arguments(path)
    return f"{path} has no argument {option!r}." + (_meant(option, known) or f" It has: {', '.join(known)}.")


def _wrong_value(path: str, option: str, expected: str, value: str) -> str:
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value: .*)?$", expected, re.MULTILINE)
    nested = re.fullmatch(r"NestedArg\(key='\w+', val='?(.*?)'?\)", value)  # from the command line
    value = nested[1] if nested else value
    readable = [re.sub(r"<class '([\w.]+)'>|typing\.", r"\1", kind) for kind in kinds]
    return f"argument {option!r} of {path} is {value[:80]!r}, expected {' or '.join(readable)}."


def _unknown_member(module: str, name: str) -> str:
    members = dir(importlib.import_module(module))
    return f"module {module!r} has no {name!r}.{_meant(name, members, prefix=f'{module}.')}"


def _unknown_name(name: str) -> str:
    known = _class_names(Callback, LightningDataModule, LightningModule, Strategy) | set(lightning_dynmo.__all__)
    meant = _meant(name, [*_aliases(), *sorted(known)])
    return f"unknown name {name!r}.{meant or ' Give the import path of a class, such as lightning_dynmo.GPT.'}"


_NOISE = r"Does not validate|^\s*Subtypes:|Given value type|Errors:|<class 'NoneType'>|^\s*$"
_EXPLANATIONS: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"given class_path '([\w.]+)':\s*Option '([\w.]+)' is not accepted", _unknown_option),
    (
        r"given class_path '([\w.]+)':\s*Parser key \"(\w+)\":(.*?)Given value type: [^\n]*\n\s*Given value: ([^\n]*)",
        _wrong_value,
    ),
    (r"module '([\w.]+)' has no attribute '(\w+)'", _unknown_member),
    (r"Expected a dot import path string: (\w+)", _unknown_name),
)


def _meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" Did you mean {prefix + close[0]!r}?" if close else ""


def _aliases() -> list[str]:
    return ["auto", *StrategyRegistry.available_strategies()]


def _class_names(*bases: type) -> set[str]:
    """Returns the names of all known subclasses, which can be given without a path."""
    todo, found = list(bases), set()
    while todo:
        found.add(todo[-1].__name__)
        todo += todo.pop().__subclasses__()
    return found


def _arguments(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
