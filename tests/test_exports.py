"""Public classes are exported, settings have defaults and texts, and balancers and schemes keep their contracts."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator

import pytest
from lightning.pytorch import Callback

import lightning_dynmo
from examples import add_a_balancer, add_a_scheme
from lightning_dynmo import (
    Assignment,
    Balancer,
    BalancingProblem,
    DynamismCallback,
    DynMoStrategy,
    ProfileRecorderCallback,
)
from lightning_dynmo.callbacks import FreezingRule


def subclasses(base: type) -> Iterator[type]:
    for name in (module.name for module in pkgutil.walk_packages(lightning_dynmo.__path__, "lightning_dynmo.")):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    todo = [base]
    while todo:
        for found in todo.pop().__subclasses__():
            todo.append(found)
            yield found


def own(base: type) -> list[type]:
    """Returns the package's concrete subclasses and those of the examples."""
    names = ("lightning_dynmo.", "examples.")
    return [
        found
        for found in subclasses(base)
        if found.__module__.startswith(names)
        and not inspect.isabstract(found)
        and getattr(sys.modules[found.__module__], found.__name__) is found
    ]


@pytest.mark.parametrize("base", [Balancer, DynamismCallback, FreezingRule])
def test_every_public_class_is_exported(base: type) -> None:
    found = [entry for entry in own(base) if entry.__module__.startswith("lightning_dynmo.")]
    assert found
    for entry in found:
        assert getattr(lightning_dynmo, entry.__name__) is entry
        assert entry.__name__ in lightning_dynmo.__all__


@pytest.mark.parametrize(
    "entry", [DynMoStrategy, ProfileRecorderCallback, *own(DynamismCallback), *own(FreezingRule), *own(Balancer)]
)
def test_every_setting_has_a_default_and_a_text(entry: type) -> None:
    assert entry.__doc__
    for name, parameter in inspect.signature(entry).parameters.items():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD
        assert parameter.default is not inspect.Parameter.empty, name
        assert f"{name}:" in entry.__doc__, name
    assert entry() is not None


@pytest.mark.parametrize("balancer", [entry() for entry in own(Balancer)], ids=lambda found: type(found).__name__)
@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_balancers_keep_their_contract(balancer: Balancer, stages: int) -> None:
    loads = [3.0, 1.0, 0.0, 5.0, 2.0, 2.0, 1.5]
    current = Assignment.uniform(len(loads), stages)
    plan = balancer.balance(BalancingProblem(loads, current))
    assert (plan.num_layers, plan.num_stages) == (len(loads), stages)
    assert balancer.balance(BalancingProblem(loads, current)) == plan
    assert (
        type(balancer)().balance(BalancingProblem([load * 1e-6 for load in loads], current)) == plan
    )  # no matter the unit


def test_the_examples_are_among_those_that_are_checked() -> None:
    assert add_a_balancer.GreedyBalancer in own(Balancer)
    assert add_a_scheme.LISACallback in own(DynamismCallback)
    assert all(issubclass(entry, Callback) for entry in own(DynamismCallback))
