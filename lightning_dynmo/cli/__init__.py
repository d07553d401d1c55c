"""The command line: ``lightning-dynmo fit|validate|test|predict|plan --config <file>``, and ``simulate``."""

from lightning_dynmo.cli.app import main

__all__ = ["main"]
