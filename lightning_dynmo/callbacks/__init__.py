"""One callback per scheme that changes the model while it trains; each has the pipeline rebalanced."""

from lightning_dynmo.callbacks.base import DynamismCallback
from lightning_dynmo.callbacks.freezing import FreezingRule, LayerFreezingCallback, PipeTransformerRule
from lightning_dynmo.callbacks.rebalance import RebalanceCallback

__all__ = [
    "DynamismCallback",
    "FreezingRule",
    "LayerFreezingCallback",
    "PipeTransformerRule",
    "RebalanceCallback",
]
