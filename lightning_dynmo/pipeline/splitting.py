"""Backward in two parts: the gradients of a stage's inputs at once, those of its weights when there is time.

[Note: split backward]
Nodes of the autograd graph from which an input can be reached make up the trunk. Computing the inputs' gradients runs
the whole trunk, and only it. A weight hangs on a node of the trunk, directly or over nodes of its own (a cast, a mask);
that node is run again later, from the gradients that came into it the first time, towards the weight alone.

Weights that hang on several nodes of the trunk (shared ones), or on none, have no such single place, so their gradients
are computed along with the inputs'. torch's own split loses the latter, and in some releases counts the former twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from lightning_dynmo._torch import tree_leaves


class SplitBackward:
    """Runs the first part when made, the second by `weights`.

    Args:
        outputs: What the stage returned; those that require a gradient.
        gradients: Their gradients; None for a loss.
        inputs: What the stage received; leaves that require a gradient, at least one.
        parameters: The stage's parameters.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        trainable = {_accumulator(parameter): parameter for parameter in parameters if parameter.requires_grad}
        roots = [_node(output) for output in outputs]
        trunk = _trunk(roots, {_accumulator(leaf) for leaf in inputs})
        places = _places(roots, trunk, set(trainable))
        self._later: dict[Node, list[nn.Parameter]] = {}
        now = []
        for accumulator, nodes in places.items():
            if len(nodes) == 1 and nodes[0] is not None:
                self._later.setdefault(nodes[0], []).append(trainable[accumulator])
            else:
                now.append(trainable[accumulator])
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        hooks = [node.register_prehook(_Keep(self._arrived, node)) for node in self._later]
        try:
            found = torch.autograd.grad(
                outputs, [*inputs, *now], gradients, retain_graph=bool(self._later), allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        self.inputs = found[: len(inputs)]
        """Gradients of the inputs; None for those that the outputs do not depend on."""
        for parameter, gradient in zip(now, found[len(inputs) :], strict=True):
            _accumulate(parameter, gradient)

    def weights(self) -> None:
        """Adds the gradients of the weights that are still missing to ``grad``."""
        for node, parameters in self._later.items():
            arrived = self._arrived.pop(node, ())
            edges = {GradientEdge(node, slot): value for slot, value in enumerate(arrived) if value is not None}
            if edges:
                # Hooks of users have run before, and must not change the gradient twice.
                again = node.register_prehook(partial(_instead, arrived))
                try:
                    found = torch.autograd.grad(
                        tuple(edges), parameters, tuple(edges.values()), retain_graph=True, allow_unused=True
                    )
                finally:
                    again.remove()
                for parameter, gradient in zip(parameters, found, strict=True):
                    _accumulate(parameter, gradient)
        self._later.clear()


class _Keep:
    """Keeps what comes into a node of the graph."""

    def __init__(self, arrived: dict[Node, tuple[Tensor | None, ...]], node: Node) -> None:
        self._arrived = arrived
        self._node = node

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._arrived[self._node] = gradients


def _instead(arrived: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return arrived


def refuse_reentrant(output: Any, inputs: Any, name: str) -> None:
    """Checks that a layer does not checkpoint its activations in a way that allows no backward in parts.

    Args:
        output: What the layer returned.
        inputs: What it was given; the search ends there.
        name: The layer, for the error.

    Raises:
        ValueError: If it does, and on every stage of such a schedule alike.
    """
    given = {value.grad_fn for value in tree_leaves(inputs) if isinstance(value, Tensor)}
    waiting = [value.grad_fn for value in tree_leaves(output) if isinstance(value, Tensor)]
    seen: set[Node | None] = {None, *given}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                f"{name} uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be split into "
                "inputs and weights, as this schedule does. Call checkpoint(..., use_reentrant=False) in it, or use "
                "schedule='interleaved1f1b'."
            )
        waiting.extend(child for child, _ in node.next_functions)


def _node(tensor: Tensor) -> Node:
    return tensor.grad_fn if tensor.grad_fn is not None else _accumulator(tensor)


def _accumulator(leaf: Tensor) -> Node:
    """Returns the node that adds up a leaf's gradient."""
    with torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    node: Node = view.grad_fn.next_functions[0][0]
    return node


def _trunk(roots: Sequence[Node], targets: set[Node]) -> set[Node]:
    """Returns the nodes below `roots` from which a target can be reached."""
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(parents)
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is not None:
                if child not in parents:
                    parents[child] = []
                    waiting.append(child)
                parents[child].append(node)
    trunk: set[Node] = set()
    waiting = [target for target in targets if target in parents]
    while waiting:
        node = waiting.pop()
        if node not in trunk:
            trunk.add(node)
            waiting.extend(parents[node])
    return trunk


def _places(roots: Sequence[Node], trunk: set[Node], weights: set[Node]) -> dict[Node, list[Node | None]]:
    """Returns for each weight the nodes of the trunk on which it hangs; None among them is for a root off the trunk."""
    places: dict[Node, list[Node | None]] = {}

    def hang(node: Node | None, branches: list[Node]) -> None:
        seen = set(branches)
        while branches:
            branch = branches.pop()
            if branch in weights:
                places.setdefault(branch, []).append(node)
            for child, _ in branch.next_functions:
                if child is not None and child not in seen and child not in trunk:
                    seen.add(child)
                    branches.append(child)

    for node in trunk:
        off = {child for child, _ in node.next_functions if child is not None and child not in trunk}
        if off:
            hang(node, list(off))
    hang(None, [root for root in roots if root not in trunk])
    return places


def _accumulate(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Adds to a parameter's gradient as autograd does, its hooks included."""
    if gradient is None:
        return
    with torch.no_grad():
        if parameter.grad is None:  # a copy: this may be the gradient of two weights, or one element expanded
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad += gradient
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
