"""`lightning-dynmo plan`: what the pipeline would look like, and whether its chain is the module's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_dynmo._torch import tree_flatten
from lightning_dynmo.module import pipeline_inputs, pipeline_layers
from lightning_dynmo.ownership import LayerChain, outside_tensors, shared_parameters
from lightning_dynmo.pipeline import batch_size_of, check_num_microbatches, choose_num_microbatches, split_batch
from lightning_dynmo.pipeline.borders import as_arguments, call_layer, infer_borders
from lightning_dynmo.pipeline.microbatches import Inputs
from lightning_dynmo.planning import Assignment, initial_assignment
from lightning_dynmo.refusals import refuse_unsupported
from lightning_dynmo.reporting import format_bytes
from lightning_dynmo.strategy import DynMoStrategy


def plan(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Prints layers, shared and outside parameters and the split; then checks the chain against the forward.

    Args:
        trainer: As it would train; its devices are the stages.
        module: The module, on the CPU.
        datamodule: Its data; without one, the module's own.

    Raises:
        TypeError: If the module is no pipeline.
        ValueError: If training would be refused, or the chain and the forward differ.
    """
    console = Console(highlight=False, soft_wrap=True)
    module.trainer = trainer
    module.configure_model()
    module = trainer.precision_plugin.convert_module(module)  # type: ignore[assignment]
    layers = pipeline_layers(module)
    refusal = None
    try:
        refuse_unsupported(trainer, module, trainer.precision_plugin)
        chain = LayerChain(module, layers)
    except ValueError as error:
        refusal = error
    strategy = trainer.strategy if isinstance(trainer.strategy, DynMoStrategy) else DynMoStrategy()
    num_ranks = strategy.ranks_of_pipeline(trainer.num_devices * trainer.num_nodes)
    num_stages = num_ranks * strategy.stages_per_rank
    console.print(_layer_table(type(module).__name__, layers))
    _print_odd_parameters(console, module, layers)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assignment = initial_assignment(strategy.balance, counts, [type(layer).__name__ for layer in layers], num_stages)
    console.print(_stage_table(layers, assignment))
    console.print("Memory: parameters and buffers, and for what is trainable gradients and AdamW's two moments.")
    console.print("Activations come on top: up to one set per stage and microbatch in flight.")
    if refusal is not None:
        console.print("Chain equals forward: not checked, since training would be refused:")
        raise refusal
    batch = _first_batch(trainer, module, datamodule)
    if batch is None:
        console.print("Chain equals forward: not checked, since there is no training data.")
        return
    num_microbatches = strategy.num_microbatches
    if num_microbatches == "auto":
        num_microbatches = choose_num_microbatches(batch_size_of(batch), num_stages)
    check_num_microbatches(strategy.schedule, num_microbatches, num_ranks, num_stages)
    inputs = pipeline_inputs(module, chain, split_batch(batch, num_microbatches)[0])
    difference = _difference_to_forward(trainer, module, chain, inputs)
    _print_messages(console, trainer, chain, inputs, assignment)
    where = f"one of {num_microbatches} microbatches of {batch_size_of(batch) // num_microbatches} samples"
    console.print(f"Chain equals forward: {'yes' if difference is None else 'no'} ({where}, in evaluation mode)")
    if difference is not None:
        raise ValueError(
            f"{difference}. The pipeline runs the chain, so it would train another model. Make "
            f"{type(module).__name__}.configure_pipeline() return what forward runs, layer by layer."
        )


def _layer_table(model: str, layers: Sequence[nn.Module]) -> Table:
    table = _new_table(f"Layers of {model}", "layer", "class", "parameters", "bytes", "trainable")
    for index, layer in enumerate(layers):
        parameters = list(layer.parameters())
        table.add_row(
            str(index),
            type(layer).__name__,
            f"{sum(parameter.numel() for parameter in parameters):,}",
            format_bytes(_state_bytes(layer)),
            _trainable(parameters),
        )
    return table


def _stage_table(layers: Sequence[nn.Module], assignment: Assignment) -> Table:
    table = _new_table(f"First split, balance={list(assignment.balance)}", "stage", "layers", "parameters", "memory")
    for stage in range(assignment.num_stages):
        indices = assignment.layers_of(stage)
        mine = [layers[index] for index in indices]
        table.add_row(
            str(stage),
            str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}",
            f"{sum(parameter.numel() for layer in mine for parameter in layer.parameters()):,}",
            format_bytes(sum(_training_bytes(layer) for layer in mine)),
        )
    return table


def _print_messages(
    console: Console, trainer: Trainer, chain: LayerChain, inputs: Inputs, assignment: Assignment
) -> None:
    """Prints the bytes that each stage sends on; skip connections and side values count in every message."""
    borders = infer_borders(chain, inputs, trainer.precision_plugin.forward_context)
    parts = []
    for stage in range(assignment.num_stages - 1):
        sent = sum(_bytes(tensor) for tensor in borders[assignment.layers_of(stage)[-1]].tensors)
        parts.append(f"stage {stage} to {stage + 1} {format_bytes(sent)}")
    console.print(f"Sent forward per microbatch: {', '.join(parts) or 'nothing'}")


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "class" else "right")
    return table


def _print_odd_parameters(console: Console, module: nn.Module, layers: Sequence[nn.Module]) -> None:
    shared = shared_parameters(module, layers)
    console.print(f"Shared by several layers: {'none' if not shared else ''}")
    for name, users in shared.items():
        console.print(f"  {name}: layers {', '.join(map(str, users))}")
    outside = [(name, tensor) for name, tensor in outside_tensors(module, layers) if isinstance(tensor, nn.Parameter)]
    console.print(f"Parameters outside the chain: {'none' if not outside else ''}")
    for name, parameter in outside:
        console.print(f"  {name}: {parameter.numel():,}, {'trainable' if parameter.requires_grad else 'not trainable'}")


def _trainable(parameters: Sequence[nn.Parameter]) -> str:
    kinds = {parameter.requires_grad for parameter in parameters}
    return {frozenset(): "-", frozenset({True}): "yes", frozenset({False}): "no"}.get(frozenset(kinds), "partly")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_bytes(layer: nn.Module) -> int:
    return sum(_bytes(tensor) for tensor in [*layer.parameters(), *layer.buffers()])


def _training_bytes(layer: nn.Module) -> int:
    return _state_bytes(layer) + 3 * sum(
        _bytes(parameter) for parameter in layer.parameters() if parameter.requires_grad
    )


def _first_batch(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> Any:
    """Returns the first training batch, or None where there is no training data."""
    if datamodule is not None:
        datamodule.trainer = trainer
    source = datamodule if datamodule is not None else module
    source.prepare_data()
    source.setup("fit")
    if not is_overridden("train_dataloader", source):
        return None
    batch, _, _ = next(iter(CombinedLoader(source.train_dataloader())))
    return batch


def _difference_to_forward(trainer: Trainer, module: LightningModule, chain: LayerChain, inputs: Inputs) -> str | None:
    """Runs the chain layer by layer, then the module's own forward, and says where they differ first."""
    module.eval()
    context = trainer.precision_plugin.forward_context
    with torch.no_grad(), torch.random.fork_rng(), context():
        expected = _run_chain(chain, inputs)
    seen: list[tuple[int, Any]] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output, index=index: seen.append((index, output)))
        for index, layer in enumerate(chain.layers)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(), context():
            actual = module(*inputs.args, **inputs.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    difference = _difference(expected[-1], actual)
    if difference is None:
        return None
    order = [index for index, _ in seen]
    if order != list(range(len(chain))):
        return f"forward calls the layers in the order {order}, the chain has 0 to {len(chain) - 1}"
    for index, output in seen:
        at_layer = _difference(expected[index], output)
        if at_layer is not None:
            return f"They differ first at {chain.name(index)}: {at_layer}"
    return f"All layers agree, but forward returns something else than the last layer does: {difference}"


def _run_chain(chain: LayerChain, inputs: Inputs) -> list[Any]:
    """Returns the output of every layer."""
    outputs: list[Any] = []
    values: tuple[Any, ...] = inputs.args
    for index, layer in enumerate(chain.layers):
        try:
            outputs.append(call_layer(layer, values, inputs.kwargs))
        except Exception as error:
            before = chain.name(index - 1) if index else "the batch"
            raise ValueError(
                f"{chain.name(index)} cannot run on what {before} gives it: {type(error).__name__}: {error}. Each "
                "layer gets what the one before returned, and the keyword arguments that its forward names."
            ) from error
        values = as_arguments(outputs[-1])
    return outputs


def _difference(left: Any, right: Any) -> str | None:
    """Returns how the chain's output (left) and the forward's (right) differ, or None if they are equal."""
    (left_leaves, left_structure), (right_leaves, right_structure) = tree_flatten(left), tree_flatten(right)
    if left_structure != right_structure:
        return f"the chain gives a {type(left).__name__}, forward a {type(right).__name__}"
    for ours, theirs in zip(left_leaves, right_leaves, strict=True):
        if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
            if ours != theirs:
                return f"the chain gives {ours!r}, forward {theirs!r}"
        elif (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"the chain gives {ours.dtype} {list(ours.shape)}, forward {theirs.dtype} {list(theirs.shape)}"
        elif not torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True):
            return f"max difference {(ours.double() - theirs.double()).abs().max().item():.3g}"
    return None
