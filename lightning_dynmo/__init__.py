"""Pipeline parallelism for PyTorch Lightning that stays balanced while the model changes."""

from lightning_dynmo.callbacks import (
    DynamismCallback,
    FreezingRule,
    GradualPruningCallback,
    LayerFreezingCallback,
    PipeTransformerRule,
    ProfileRecorderCallback,
    RebalanceCallback,
    layers_of,
)
from lightning_dynmo.consolidate import consolidate_checkpoint
from lightning_dynmo.data import TextDataModule
from lightning_dynmo.hf import hf_layers
from lightning_dynmo.models import GPT
from lightning_dynmo.module import PipelineModule
from lightning_dynmo.pipeline import PipelineError
from lightning_dynmo.planning import Assignment, Balancer, BalancingProblem, DiffusionBalancer, PartitionBalancer
from lightning_dynmo.strategy import DynMoStrategy
from lightning_dynmo.tokens import count_tokens
from lightning_dynmo.weights import load_layer_weights

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "Assignment",
    "Balancer",
    "BalancingProblem",
    "DiffusionBalancer",
    "DynMoStrategy",
    "DynamismCallback",
    "FreezingRule",
    "GradualPruningCallback",
    "LayerFreezingCallback",
    "PartitionBalancer",
    "PipeTransformerRule",
    "PipelineError",
    "PipelineModule",
    "ProfileRecorderCallback",
    "RebalanceCallback",
    "TextDataModule",
    "consolidate_checkpoint",
    "count_tokens",
    "hf_layers",
    "layers_of",
    "load_layer_weights",
]
