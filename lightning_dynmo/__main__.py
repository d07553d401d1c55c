"""``python -m lightning_dynmo`` is the same as ``lightning-dynmo``."""

from lightning_dynmo.cli import main

if __name__ == "__main__":
    main()
