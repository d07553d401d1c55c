"""Turns a checkpoint that is a folder into a plain Lightning checkpoint file.

python -m lightning_dynmo.consolidate FOLDER [--output_file FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_dynmo.atomic import replacing
from lightning_dynmo.pipeline import is_folder, load_folder


def consolidate_checkpoint(folder: str | os.PathLike[str], output_file: str | os.PathLike[str] | None = None) -> Path:
    """Writes what a checkpoint folder holds as one file, as if it had been saved without folders.

    Works in one process, which must have room for all of it.

    Args:
        folder: A checkpoint saved with ``DynMoStrategy(save_distributed_checkpoint=True)``.
        output_file: Where to; by default beside the folder, with ``.consolidated`` after its name.

    Returns:
        Where the file is.

    Raises:
        ValueError: If `folder` is not such a checkpoint.
        FileExistsError: If `output_file` exists.
    """
    folder = Path(folder)
    output = Path(output_file) if output_file is not None else folder.with_name(f"{folder.name}.consolidated")
    if not is_folder(folder):
        raise ValueError(f"{folder} is not a folder. Give a checkpoint saved with save_distributed_checkpoint=True.")
    if output.exists():
        raise FileExistsError(f"{output} exists. Remove it, or choose another output_file.")
    checkpoint = load_folder(folder)
    checkpoint["state_dict"] = dict(checkpoint["state_dict"])
    for state in checkpoint.get("optimizer_states", []):
        if "state" in state:
            state["state"] = dict(state["state"])
    with replacing(output) as file:
        torch.save(checkpoint, file)
    return output


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m lightning_dynmo.consolidate", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="checkpoint saved with save_distributed_checkpoint=True")
    parser.add_argument("--output_file", help="by default beside the folder, with '.consolidated' after its name")
    options = parser.parse_args(arguments)
    try:
        path = consolidate_checkpoint(options.folder, options.output_file)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
