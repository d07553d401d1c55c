"""Text for language models that needs no download."""

import ast
import logging
import os
import platform
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

log = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")

# Installed packages are not part of the standard library, and tests, demos and code tables hold hardly any prose.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_bundled", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
# Part of the cache file's name: raise it whenever the rules that make the corpus change.
_CORPUS_VERSION = 1

Window = tuple[Tensor, Tensor]


class ByteWindows(Dataset[Window]):
    """Cuts bytes into windows that do not overlap.

    Item i is `(inputs, targets)`, both int64 `[T]`; the targets are the inputs moved on by one byte.

    Args:
        tokens: uint8 `[N]`.
        context_length: Bytes per window, T.
    """

    def __init__(self, tokens: Tensor, context_length: int) -> None:
        self.tokens = tokens
        self.context_length = context_length

    def __len__(self) -> int:
        # The last target of a window is the first input of the next, so one byte is needed beyond the last window.
        return max(0, (len(self.tokens) - 1) // self.context_length)

    @override
    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index} of {len(self)}.")
        start = index * self.context_length
        window = self.tokens[start : start + self.context_length + 1].long()
        return window[:-1], window[1:]


class TextDataModule(LightningDataModule):
    """Text as bytes, in windows of fixed length, for next-byte prediction.

    A batch is `(inputs, targets)`, both int64 `[B, T]` with values below 256. Without a path, the text is the
    documentation of Python's standard library (about 2 MB of English), which every Python has on disk.

    The last part of the text is held out for validation. It is one piece, so no training window overlaps or lies
    between validation windows.

    Args:
        path: A text file, a folder (all its `.txt` and `.md` files, in sorted order), or a list of files and folders.
            Default: Python's own documentation.
        context_length: Bytes per window. Must not exceed the model's `context_length`.
        batch_size: Windows per batch. A pipeline cuts the batch into microbatches.
        val_fraction: Part of the text that is held out for validation, in `[0, 1)`. With 0 there is no validation.
        num_workers: Processes that load data; 0 loads in the training process.
        max_bytes: Use only the beginning of the text, for quick runs.
        seed: Decides the order of the training windows. The loader has a random generator of its own, so that all
            ranks of a pipeline read the same batches whatever else drew random numbers.

    Raises:
        ValueError: If a size is not positive or `val_fraction` is outside `[0, 1)`.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] | None = None,
        context_length: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        max_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("context_length", context_length), ("batch_size", batch_size), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"`val_fraction` must be in [0, 1), got {val_fraction}.")
        self.path = path
        self.context_length = context_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.max_bytes = max_bytes
        self.seed = seed
        self._train: ByteWindows | None = None
        self._val: ByteWindows | None = None

    @override
    def prepare_data(self) -> None:
        # Runs once per node, before `setup` runs on every rank: the ranks then find the text in the cache.
        if self.path is None:
            default_corpus()

    @override
    def setup(self, stage: str | None = None) -> None:
        """Reads the text and splits it. Does nothing the second time.

        Args:
            stage: Unused: all stages read the same text.

        Raises:
            FileNotFoundError: If the path does not exist or is a folder without text files.
            ValueError: If the text is too short for one batch of windows.
        """
        if self._train is not None:
            return
        corpus = default_corpus() if self.path is None else _read_text(self.path)
        corpus = corpus[: self.max_bytes]
        if len(corpus) <= self.context_length:
            raise ValueError(
                f"The text from {self._source} has {len(corpus)} bytes, too short for one window of "
                f"{self.context_length} bytes and its last target; {self._remedy(len(corpus) - 1)}."
            )
        # A bytearray, because torch warns about memory that it may not write to.
        tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        num_val = int(len(tokens) * self.val_fraction)
        train = self._windows(tokens[: len(tokens) - num_val], "training")
        self._val = self._windows(tokens[len(tokens) - num_val :], "validation") if self.val_fraction > 0 else None
        self._train = train

    @override
    def train_dataloader(self) -> DataLoader[Window]:
        """Loads shuffled training windows."""
        if self._train is None:
            raise RuntimeError("TextDataModule has no data yet; call `setup()` first.")
        return self._dataloader(self._train, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Window] | list[DataLoader[Window]]:
        """Loads validation windows in order. Without held-out text, there are no loaders."""
        if self._train is None:
            raise RuntimeError("TextDataModule has no data yet; call `setup()` first.")
        return self._dataloader(self._val, shuffle=False) if self._val is not None else []

    @override
    def test_dataloader(self) -> DataLoader[Window] | list[DataLoader[Window]]:
        """Loads the validation windows: the held-out text serves tests and predictions, too."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Window] | list[DataLoader[Window]]:
        """Loads the validation windows."""
        return self.val_dataloader()

    def _dataloader(self, windows: ByteWindows, shuffle: bool) -> DataLoader[Window]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            # A pipeline exchanges tensors of one fixed shape, so every batch has to split into full microbatches.
            drop_last=True,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _windows(self, tokens: Tensor, part: str) -> ByteWindows:
        windows = ByteWindows(tokens, self.context_length)
        if len(windows) < self.batch_size:
            raise ValueError(
                f"The {part} part of the text from {self._source} has {len(tokens)} bytes: {len(windows)} windows of "
                f"{self.context_length} bytes, fewer than one batch of {self.batch_size}; "
                f"{self._remedy((len(tokens) - 1) // self.batch_size)}, or a smaller batch_size"
                f"{', or another val_fraction (0 for no validation)' if self.val_fraction > 0 else ''}."
            )
        return windows

    def _remedy(self, fitting_context_length: int) -> str:
        longer = "use a longer text" if self.max_bytes is None else "use a longer text or a larger max_bytes"
        return f"{longer}, or context_length={fitting_context_length}" if fitting_context_length > 0 else longer

    @property
    def _source(self) -> str:
        return "Python's documentation" if self.path is None else repr(self.path)


def default_corpus() -> bytes:
    """Returns the documentation of Python's standard library: its reference topics and docstrings.

    Finding the docstrings takes a few seconds, so the text is kept in the user's cache folder, one file per Python
    version. Where nothing can be written, it is built each time.

    Returns:
        UTF-8 text, about 2 MB. The same bytes in every process that runs the same Python.

    Raises:
        FileNotFoundError: If this Python was installed without its documentation and sources.
    """
    path = _cache_path()
    if path is not None:
        try:
            return path.read_bytes()
        except OSError:
            log.debug("No corpus at %s yet; building it.", path)
    corpus = "\n\n".join([*_topics(), *_docstrings()]).encode()
    if not corpus:
        raise FileNotFoundError(
            f"This Python has no documentation and no sources in {sysconfig.get_path('stdlib')}; "
            f'give TextDataModule a text of your own, for example path="my_text.txt".'
        )
    if path is not None:
        _write_atomically(path, corpus)
    return corpus


def _topics() -> list[str]:
    """The pages that `help("topics")` lists: most of Python's language reference."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [topics[name] for name in sorted(topics)]


def _docstrings() -> list[str]:
    """All distinct docstrings of the standard library, in the order of its files."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    distinct: dict[str, None] = {}  # a set that keeps the order
    for folder, subfolders, files in os.walk(stdlib):
        # Changing the list in place tells `os.walk` where to go, and in which order.
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".py"):
                distinct.update(dict.fromkeys(_docstrings_of_file(Path(folder, file))))
    return list(distinct)


def _docstrings_of_file(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code in the library triggers warnings about its escapes
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # a file that this Python cannot read costs us its docstrings, nothing more
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _cache_path() -> Path | None:
    """Where the corpus is kept, or None if the user has no home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    name = f"stdlib-docs-{platform.python_implementation().lower()}-{platform.python_version()}-v{_CORPUS_VERSION}.txt"
    return folder / "lightning_dynmo" / name


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that other processes see all of it or nothing. A failure is logged and otherwise ignored."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: only within one file system is a rename atomic. The random name keeps ranks apart.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        log.info("The corpus is not cached, because %s cannot be written: %s", path, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _read_text(path: str | Path | Sequence[str | Path]) -> bytes:
    """Reads and joins files, with a blank line between them."""
    sources = [path] if isinstance(path, str | Path) else path
    files = [file for source in sources for file in _files(Path(source))]
    if not files:
        raise ValueError("`path` is an empty list; name at least one file or folder, or leave it out.")
    return b"\n\n".join(file.read_bytes() for file in files)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise FileNotFoundError(
                f"The folder {str(path)!r} has no {' or '.join(TEXT_SUFFIXES)} files; name the files themselves, "
                f"for example path={str(path / 'text.log')!r}."
            )
        return files
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file or folder {str(path)!r} (the current folder is {str(Path.cwd())!r}); correct `path`, "
            f"or leave it out to train on Python's own documentation."
        )
    return [path]
