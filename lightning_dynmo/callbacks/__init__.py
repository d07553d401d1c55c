"""One callback per scheme that changes the model while it trains; each has the pipeline rebalanced."""

from lightning_dynmo.callbacks.base import DynamismCallback, layers_of
from lightning_dynmo.callbacks.freezing import FreezingRule, LayerFreezingCallback, PipeTransformerRule
from lightning_dynmo.callbacks.pruning import GradualPruningCallback
from lightning_dynmo.callbacks.rebalance import RebalanceCallback
from lightning_dynmo.callbacks.recorder import ProfileRecorderCallback

__all__ = [
    "DynamismCallback",
    "FreezingRule",
    "GradualPruningCallback",
    "LayerFreezingCallback",
    "PipeTransformerRule",
    "ProfileRecorderCallback",
    "RebalanceCallback",
    "layers_of",
]
