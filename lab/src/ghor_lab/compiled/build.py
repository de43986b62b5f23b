"""Compile C files into libraries on first use, with the machine's compiler, and keep them in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from ..files import cache_folder, store

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi")


def build(source: Path, **defines: int) -> ctypes.CDLL:
    """The library made from a C file and values for its names; RuntimeError says why there is none.

    It is kept in the cache folder. A file's name contains the digest of its content, because loading a
    damaged library ends the process.
    """
    label = source.stem.removesuffix("_core")
    try:
        compiler = _compiler()
        version = _run([*compiler, "--version"])
        # -march=native: another processor needs another file
        key = _digest(repr((source.read_bytes(), FLAGS, version, processor(), defines)).encode())
        folder = cache_folder()
        for path in sorted(folder.glob(f"{label}-{key}-*.so")):
            if path.stem.endswith(_digest(path.read_bytes())):
                return ctypes.CDLL(str(path))
            path.unlink(missing_ok=True)
            warnings.warn(f"{path} was damaged: removed and made again", stacklevel=2)
        with tempfile.TemporaryDirectory(prefix="ghor-") as scratch:
            made = Path(scratch) / "made.so"
            _run(
                [*compiler, *FLAGS, *(f"-D{k}={v}" for k, v in defines.items()), str(source), "-o", str(made)]
            )
            content = made.read_bytes()
        path = folder / f"{label}-{key}-{_digest(content)}.so"
        store(content, path)
        return ctypes.CDLL(str(path))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"it could not be compiled or loaded: {error}") from None


def _compiler() -> list[str]:
    """CC, which may contain arguments, or the first compiler found."""
    if given := shlex.split(os.environ.get("CC", "")):
        return given
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError("there is no C compiler (cc, gcc, clang, or the one named by CC)")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def processor() -> str:
    """The processor, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))
