"""Finding, checking and fetching data files, on tiny IDX files and with file:// for a mirror: no network."""

import gzip
import hashlib
import re
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ghor_lab import data

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SHAPES = ((6, 4, 4), (6,), (3, 4, 4), (3,))


def pack(array: torch.Tensor) -> bytes:
    return struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape) + bytes(
        array.flatten().tolist()
    )


ARRAYS = {
    name: torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
    for i, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
}
RAW = {name: pack(array) for name, array in ARRAYS.items()}
FILES = tuple(
    data.File(n, hashlib.sha256(RAW[n]).hexdigest(), shape) for n, shape in zip(NAMES, SHAPES, strict=True)
)
TINY = data.Dataset("tiny", FILES, aliases=("TINY",))


def never(folder: Path) -> Path:
    raise AssertionError("looked for in a package although it was there")


def fill(folder: Path, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in RAW.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def same(images: data.Images) -> bool:
    found = (images.train_images, images.train_labels, images.test_images, images.test_labels)
    assert found[1].dtype == found[3].dtype == torch.int64
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, ARRAYS.values(), strict=True))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("GHOR_DATA", raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tiny"


@pytest.fixture
def mirror(tmp_path):
    return fill(tmp_path / "mirror", packed=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "tiny", "TINY/raw"])
def test_a_given_folder_is_enough(tmp_path, cache, monkeypatch, place, packed):
    fill(tmp_path / "given" / place, packed)
    dataset = replace(TINY, package=never)
    assert same(data.load(dataset, tmp_path / "given"))
    monkeypatch.setenv("GHOR_DATA", str(tmp_path / "given"))
    assert same(data.load(dataset))
    assert not cache.exists()


def test_the_cache_comes_before_mirrors(cache, mirror):
    fill(cache)
    fill(mirror, packed=True)
    assert same(data.load(replace(TINY, mirrors=("file:///no/such/folder",), package=never)))


def test_mirrors_are_tried_in_order_and_kept(cache, mirror):
    dataset = replace(TINY, mirrors=("file:///no/such/folder", mirror.as_uri()), package=never)
    assert same(data.load(dataset))
    assert sorted(p.name for p in cache.iterdir()) == sorted(NAMES)  # raw, and no unfinished ones
    assert same(data.load(replace(TINY, package=never)))


def test_what_is_fetched_goes_to_the_given_folder(tmp_path, cache, mirror):
    assert same(data.load(replace(TINY, mirrors=(mirror.as_uri(),)), tmp_path / "given"))
    assert sorted(p.name for p in (tmp_path / "given" / "tiny").iterdir()) == sorted(NAMES)
    assert not cache.exists()


def test_files_that_are_not_those_of_the_given_folder_are_told_of(tmp_path, cache, capsys):
    """Once a process, also of a folder that has some of them."""
    fill(cache)
    given = tmp_path / "given"
    for _ in range(2):
        assert data.load(TINY, given).folders == (cache,)
    assert (
        capsys.readouterr().err == f"tiny: there is no {given}; used are those in the cache, {cache.parent}\n"
    )
    assert not given.exists()
    (fill(given) / NAMES[2]).unlink()
    assert data.load(TINY, given).folders == (given, cache)
    assert f"{given} lacks 1 of 4 files; used are" in capsys.readouterr().err
    assert data.load(TINY, cache.parent).folders == (cache,)
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, cache, mirror, capsys):
    (tmp_path / "given").touch()
    assert data.load(replace(TINY, mirrors=(mirror.as_uri(),)), tmp_path / "given").folders == (cache,)
    assert f"into {cache}, as {tmp_path / 'given'} cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-1], "bytes, and it has"),
        (lambda raw: raw[:3], "no IDX header"),
        (lambda raw: b"", "no IDX header"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "its SHA-256 is"),
        (lambda raw: pack(torch.zeros(7, 4, 4, dtype=torch.uint8)), r"says \(7, 4, 4\), not \(6, 4, 4\)"),
        (lambda raw: gzip.compress(raw)[:-9], "cannot be unpacked"),
        (lambda raw: raw[:2] + b"\x0d" + raw[3:], "not unsigned bytes"),
    ],
    ids=["cut", "header cut", "empty", "one bit", "shape", "gzip cut", "type"],
)
def test_a_wrong_file_is_named_removed_and_fetched_again(cache, mirror, capsys, damage, said):
    fill(cache)
    (cache / NAMES[0]).write_bytes(damage(RAW[NAMES[0]]))
    assert same(data.load(replace(TINY, mirrors=(mirror.as_uri(),))))
    assert (cache / NAMES[0]).read_bytes() == RAW[NAMES[0]]
    output = capsys.readouterr().err
    assert str(cache / NAMES[0]) in output
    assert "removed" in output
    assert re.search(said, output)


def test_files_of_others_are_left_alone(tmp_path, cache, mirror, capsys):
    given = fill(tmp_path / "given")
    other = pack(torch.ones(6, 4, 4, dtype=torch.uint8))  # as of another data set with the same names
    (given / NAMES[0]).write_bytes(other)
    assert same(data.load(replace(TINY, mirrors=(mirror.as_uri(),)), given))
    assert (given / NAMES[0]).read_bytes() == other
    assert "passed over" in capsys.readouterr().err


def test_a_wrong_mirror_is_passed_over(tmp_path, cache, mirror):
    wrong = fill(tmp_path / "wrong", packed=True)
    (wrong / f"{NAMES[2]}.gz").write_bytes(gzip.compress(RAW[NAMES[0]]))
    assert same(data.load(replace(TINY, mirrors=(wrong.as_uri(), mirror.as_uri()), package=never)))


@pytest.mark.parametrize("packed", [False, True])
def test_packages_come_last(cache, packed):
    dataset = replace(
        TINY, mirrors=("file:///no/such/folder",), package=lambda folder: fill(folder / "in", packed)
    )
    assert same(data.load(dataset))
    assert sorted(p.name for p in cache.iterdir()) == sorted(NAMES)


def test_nothing_to_be_had_says_what_was_tried(cache):
    def package(folder: Path) -> Path:
        data.run(["no-such-client", "pack"], folder)
        return folder

    with pytest.raises(
        data.Unavailable, match=r"(?s)tiny: train-images.*no/such/folder.*no-such-client.*GHOR_DATA"
    ):
        data.load(replace(TINY, mirrors=("file:///no/such/folder",), package=package))


def test_a_client_that_fails_is_quoted(tmp_path):
    with pytest.raises(OSError, match="last words"):
        data.run(["sh", "-c", "echo first; echo last words >&2; exit 3"], tmp_path)


def test_a_mirror_that_does_not_answer_costs_seconds(monkeypatch):
    monkeypatch.setattr(data, "CONNECT", 0.2)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: time.sleep(3))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        data.download("https://mirror.invalid/file.gz")
    assert time.monotonic() - start < 2


def test_long_downloads_show_progress(mirror, monkeypatch, capsys):
    ticks = iter(range(0, 1000, 4))
    monkeypatch.setattr(data.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(data, "CONNECT", 5)
    (mirror / "long").write_bytes(bytes(1 << 18))
    monkeypatch.setattr(data, "within", lambda seconds, call: call())
    assert data.download((mirror / "long").as_uri()) == bytes(1 << 18)
    assert "of 0.3 MB" in capsys.readouterr().err


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError("no space left")

    monkeypatch.setattr(data.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        data.store(b"x", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setattr(data.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / "ghor"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_folder() == Path.home() / ".cache" / "ghor"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="mnist, fashion-mnist"):
        data.load("cifar")


def test_the_table_is_whole():
    for dataset in data.DATASETS.values():
        assert [f.shape[0] for f in dataset.files] == [60000, 60000, 10000, 10000]
        assert all(len(f.sha256) == 64 for f in dataset.files)
        assert all(m.startswith("https://") for m in dataset.mirrors)
    assert len({f.sha256 for d in data.DATASETS.values() for f in d.files}) == 8
