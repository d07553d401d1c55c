"""TextDataModule: where its text comes from and how it is cut."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dynmo import data
from lightning_dynmo.data import ByteWindows, TextDataModule, default_corpus

SMALL = {"context_length": 10, "batch_size": 2}


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the default corpus, built once: it takes seconds."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        default_corpus()
    return folder


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    """A text of 1000 bytes in which every 4 bytes are different, so that windows can be found again."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number:04d}" for number in range(250)))
    return path


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and a corpus that is quick to build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "_docstrings", lambda: ["From the sources."])
    return tmp_path


def as_text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode()


def batches(loader: DataLoader[tuple[Tensor, Tensor]] | list[DataLoader[tuple[Tensor, Tensor]]]) -> list[list[Tensor]]:
    assert isinstance(loader, DataLoader)
    return list(loader)


class TestDefaultCorpus:
    def test_is_more_than_a_megabyte_of_english(self, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(corpus_folder))

        corpus = default_corpus()

        assert 1_000_000 < len(corpus) < 10_000_000
        words = corpus.decode().lower().split()
        # In English prose, "the" is every 15th to 20th word; code would have far fewer.
        assert 0.03 < words.count("the") / len(words) < 0.1
        assert sum(byte < 128 for byte in corpus) / len(corpus) > 0.99

    def test_trains_without_a_path(self, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(corpus_folder))
        module = TextDataModule()
        module.prepare_data()
        module.setup("fit")

        inputs, targets = next(iter(module.train_dataloader()))

        assert inputs.shape == targets.shape == (16, 128)
        assert inputs.dtype == targets.dtype == torch.int64

    def test_docstrings_are_distinct_and_leave_tests_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("b.py", "a.py", "test/c.py", "site-packages/d.py", "package/e.py"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'"""Of {path.name}."""\n\ndef function():\n    """Of a function."""\n')
        (tmp_path / "broken.py").write_text("def")
        (tmp_path / "latin.py").write_bytes(b'# coding: latin-1\n"""Caf\xe9."""\n')
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

        assert data._docstrings() == ["Of a.py.", "Of a function.", "Of b.py.", "Café.", "Of e.py."]

    def test_is_the_same_with_and_without_cache(self, quick_build: Path) -> None:
        built = default_corpus()
        cached = default_corpus()

        assert built == cached
        assert built.endswith(b"From the sources.")
        assert len(list(quick_build.rglob("*.txt"))) == 1

    def test_reads_the_cache(self, quick_build: Path) -> None:
        default_corpus()
        next(quick_build.rglob("*.txt")).write_text("From the cache.")

        assert default_corpus() == b"From the cache."

    def test_another_python_version_has_another_file(self, quick_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        default_corpus()
        monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
        default_corpus()

        assert len(list(quick_build.rglob("*.txt"))) == 2

    def test_processes_that_start_together_see_whole_files(self, quick_build: Path) -> None:
        start = threading.Barrier(8)
        results: list[bytes] = []

        def build() -> None:
            start.wait()
            results.append(default_corpus())

        threads = [threading.Thread(target=build) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(results) == 8
        assert len(set(results)) == 1
        assert [path.suffix for path in quick_build.rglob("*.*")] == [".txt"]  # no temporary files are left

    def test_an_interrupted_write_leaves_nothing_behind(
        self, quick_build: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(source: str, target: Path) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)

        assert default_corpus().endswith(b"From the sources.")
        assert list(quick_build.rglob("*.*")) == []

    def test_works_where_nothing_can_be_written(self, quick_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (quick_build / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(quick_build / "file"))

        assert default_corpus().endswith(b"From the sources.")

    def test_works_without_a_home(self, quick_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)

        assert default_corpus().endswith(b"From the sources.")

    def test_a_python_without_documentation_is_an_error(
        self, quick_build: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data, "_docstrings", list)
        monkeypatch.setattr(data, "_topics", list)

        with pytest.raises(FileNotFoundError, match=r"no documentation and no sources .* path="):
            default_corpus()
        assert list(quick_build.rglob("*.txt")) == []


class TestWindows:
    def test_targets_are_inputs_moved_on_by_one(self) -> None:
        windows = ByteWindows(torch.arange(31, dtype=torch.uint8), context_length=10)

        assert len(windows) == 3
        for index in range(3):
            inputs, targets = windows[index]
            assert inputs.tolist() == list(range(10 * index, 10 * index + 10))
            assert targets.tolist() == list(range(10 * index + 1, 10 * index + 11))
            assert inputs.dtype == targets.dtype == torch.int64

    @pytest.mark.parametrize(("num_bytes", "num_windows"), [(0, 0), (1, 0), (10, 0), (11, 1), (20, 1), (21, 2)])
    def test_count(self, num_bytes: int, num_windows: int) -> None:
        assert len(ByteWindows(torch.zeros(num_bytes, dtype=torch.uint8), context_length=10)) == num_windows

    def test_ends(self) -> None:
        windows = ByteWindows(torch.arange(31, dtype=torch.uint8), context_length=10)

        with pytest.raises(IndexError, match="Window 3 of 3"):
            windows[3]
        with pytest.raises(IndexError, match="Window -1 of 3"):
            windows[-1]


class TestSplit:
    def test_validation_is_the_tail_and_disjoint(self, text_path: Path) -> None:
        module = TextDataModule(text_path, val_fraction=0.2, **SMALL)
        module.setup()

        train_bytes = {as_text(row) for inputs, _ in batches(module.train_dataloader()) for row in inputs}
        val = "".join(as_text(row) for inputs, _ in batches(module.val_dataloader()) for row in inputs)

        text = text_path.read_text()
        assert text[800:].startswith(val)
        assert len(val) == 180  # 19 windows fit, of which the last is no full batch
        assert len(train_bytes) == 78
        assert all(window in text[:800] for window in train_bytes)

    def test_only_full_batches(self, text_path: Path) -> None:
        module = TextDataModule(text_path, context_length=10, batch_size=7, val_fraction=0.2)
        module.setup()

        for loader in (module.train_dataloader(), module.val_dataloader()):
            assert {inputs.shape for inputs, _ in batches(loader)} == {(7, 10)}

    def test_no_validation(self, text_path: Path) -> None:
        module = TextDataModule(text_path, val_fraction=0.0, **SMALL)
        module.setup()

        assert module.val_dataloader() == []
        assert len(module.train_dataloader()) == 49

    def test_order_depends_on_the_seed_alone(self, text_path: Path) -> None:
        def order(seed: int, global_seed: int) -> list[str]:
            torch.manual_seed(global_seed)
            module = TextDataModule(text_path, seed=seed, **SMALL)
            module.setup()
            return [as_text(row) for inputs, _ in batches(module.train_dataloader()) for row in inputs]

        assert order(seed=0, global_seed=1) == order(seed=0, global_seed=2)
        assert order(seed=0, global_seed=1) != order(seed=1, global_seed=1)
        assert order(seed=0, global_seed=1) != sorted(order(seed=0, global_seed=1))

    def test_epochs_differ(self, text_path: Path) -> None:
        module = TextDataModule(text_path, **SMALL)
        module.setup()
        loader = module.train_dataloader()

        assert not torch.equal(next(iter(loader))[0], next(iter(loader))[0])

    def test_max_bytes_takes_the_beginning(self, text_path: Path) -> None:
        module = TextDataModule(text_path, max_bytes=100, val_fraction=0.0, context_length=9, batch_size=11)
        module.setup()

        (inputs, _), *rest = batches(module.train_dataloader())

        assert not rest
        assert sorted(as_text(row) for row in inputs) == sorted(
            text_path.read_text()[i : i + 9] for i in range(0, 99, 9)
        )

    def test_second_setup_does_nothing(self, text_path: Path) -> None:
        module = TextDataModule(text_path, **SMALL)
        module.setup("fit")
        text_path.unlink()

        module.setup("validate")

    def test_loading_in_processes_gives_the_same(self, text_path: Path) -> None:
        def order(num_workers: int) -> list[str]:
            module = TextDataModule(text_path, num_workers=num_workers, **SMALL)
            module.setup()
            return [as_text(row) for inputs, _ in batches(module.train_dataloader()) for row in inputs]

        assert order(num_workers=1) == order(num_workers=0)


class TestPaths:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "sub").mkdir()
        (tmp_path / "b.txt").write_text("B" * 100)
        (tmp_path / "a.md").write_text("A" * 100)
        (tmp_path / "sub" / "c.txt").write_text("C" * 100)
        (tmp_path / "d.log").write_text("D" * 100)
        return tmp_path

    def test_file(self, folder: Path) -> None:
        assert data._read_text(folder / "d.log") == b"D" * 100
        assert data._read_text(str(folder / "d.log")) == b"D" * 100

    def test_folder(self, folder: Path) -> None:
        assert data._read_text(folder) == b"A" * 100 + b"\n\n" + b"B" * 100 + b"\n\n" + b"C" * 100

    def test_list_keeps_its_order(self, folder: Path) -> None:
        assert data._read_text([str(folder / "d.log"), folder / "sub"]) == b"D" * 100 + b"\n\n" + b"C" * 100

    def test_module_takes_them(self, folder: Path) -> None:
        module = TextDataModule([folder / "b.txt", folder], val_fraction=0.0, **SMALL)
        module.setup()

        assert len(module.train_dataloader()) == 20


class TestErrors:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            FileNotFoundError, match=r"no file or folder '.*absent\.txt' .* correct `path`, or leave it out"
        ):
            TextDataModule(tmp_path / "absent.txt").setup()

    def test_folder_without_text(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"has no \.txt or \.md files; name the files"):
            TextDataModule(tmp_path).setup()

    def test_empty_list(self) -> None:
        with pytest.raises(ValueError, match="`path` is an empty list"):
            TextDataModule([]).setup()

    def test_shorter_than_a_window(self, text_path: Path) -> None:
        with pytest.raises(ValueError, match=r"text\.txt.* has 1000 bytes, too short .* or context_length=999\."):
            TextDataModule(text_path, context_length=1000).setup()
        TextDataModule(text_path, context_length=999, batch_size=1, val_fraction=0.0).setup()

    def test_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").touch()

        with pytest.raises(ValueError, match=r"has 0 bytes, too short .*; use a longer text\."):
            TextDataModule(tmp_path / "empty.txt").setup()

    def test_max_bytes_is_named_when_it_is_the_cause(self, text_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a larger max_bytes"):
            TextDataModule(text_path, max_bytes=10, context_length=20).setup()

    @pytest.mark.parametrize(("val_fraction", "part"), [(0.05, "validation"), (0.95, "training")])
    def test_fewer_windows_than_a_batch(self, text_path: Path, val_fraction: float, part: str) -> None:
        message = (
            rf"The {part} part .* has 50 bytes: 4 windows of 10 bytes, fewer than one batch of 8; .* context_length=6"
        )
        with pytest.raises(ValueError, match=message):
            TextDataModule(text_path, context_length=10, batch_size=8, val_fraction=val_fraction).setup()

    def test_loaders_before_setup(self, text_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"call `setup\(\)` first"):
            TextDataModule(text_path).train_dataloader()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
            ({"max_bytes": 0}, "`max_bytes` must be at least 1, got 0"),
            ({"val_fraction": 1.0}, r"`val_fraction` must be in \[0, 1\), got 1.0"),
        ],
    )
    def test_arguments(self, arguments: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TextDataModule(**arguments)  # type: ignore[arg-type]
