"""Small configurations, data in MNIST's format, faults, and what records say."""

import gzip
import hashlib
import json
import os
import struct

import torch

from ghor_lab import checkpoint, data
from ghor_lab.config import Config
from ghor_lab.record import FORMAT, encode

SMALL = {"encoder_layers": 2, "decoder_layers": 2, "decoder_output_layers": 2}
DECODER = {"layers": 1, "width": 16, "heads": 2, "context": 8}
PENDULUM = Config("pendulum", "geometric-adam", (0, 1), 2, 1e-3, 5050, network=SMALL)
MNIST = Config("mnist", "geometric-adam", (0,), 2, 1e-3, 16, network={"blocks": 1})
TEXT = Config("text", "adamw", (0,), 2, 3e-3, 2, every=3, warmup=2, network=DECODER)
TIMES = {"seconds", "ms", "step_cpu_ms", "peak_mib", "time", "started", "crc"}


def randn(shape, gen):
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def strip(value, keys=TIMES):
    """Without times and sizes of memory."""
    if isinstance(value, dict):
        return {k: strip(v, keys) for k, v in value.items() if k not in keys}
    return [strip(v, keys) for v in value] if isinstance(value, list) else value


def facts(path):
    """The lines of a record that have to repeat to the bit."""
    return [strip(json.loads(line)) for line in path.read_bytes().splitlines()]


def weights(path):
    """The bits of a checkpoint beside a record."""

    def bits(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
        if isinstance(value, dict):
            return {k: bits(v) for k, v in value.items() if k not in TIMES}
        return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value

    return bits(checkpoint.load(path.with_suffix(".ckpt")))


class Stop(Exception):
    """Ends a run after an epoch."""


def stop_at(epoch):
    def report(now, line):
        if now == epoch:
            raise Stop

    return report


def killed(call):
    """The exit code of a process that makes this call, which may end it at once: -9 says that it did."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(monkeypatch, module, name, number):
    """End the process, as a kill does, when a function of a module is called that often."""
    real, calls = getattr(module, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            os._exit(9)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)


# -- data ----------------------------------------------------------------------------------------------------


def pack(array):
    """As IDX file."""
    head = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape)
    return head + bytes(array.flatten().tolist())


SHAPES = ((50, 28, 28), (50,), (20, 28, 28), (20,))
ARRAYS = [
    torch.randint(
        0, 10 + 246 * (len(s) > 1), s, generator=torch.Generator().manual_seed(i), dtype=torch.uint8
    )
    for i, s in enumerate(SHAPES)
]
RAW = {name: pack(array) for name, array in zip(data.NAMES, ARRAYS, strict=True)}


def never(folder):
    raise AssertionError("looked for in a package although it was there")


TINY = data.Dataset(
    "tiny", "TINY", tuple(hashlib.sha256(raw).hexdigest() for raw in RAW.values()), (), never, SHAPES
)


def fill(folder, packed=False):
    """The files of TINY."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in RAW.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(raw) if packed else raw)
    return folder


# -- records -------------------------------------------------------------------------------------------------


def write(folder, experiment, optimizer, seeds, losses, line=lambda loss: {}, data=None, **more):
    """A record with these losses, (epochs, seeds), and whatever else its configuration has; its path.

    `line` are further entries of an epoch.
    """
    config = {"experiment": experiment, "optimizer": optimizer, "seeds": seeds, "epochs": len(losses)}
    config |= {"lr": 1e-3, "label": None, "network": {}, **more}
    known = {k: v for k, v in config.items() if k in Config.__dataclass_fields__}
    header = {
        "kind": "run",
        "format": FORMAT,
        "name": Config(**known).name,
        "config": known,
        "started": "2026",
        "data": data,
    }
    path = folder / f"{header['name']}.jsonl"
    rows = [
        {
            "kind": "epoch",
            "epoch": i,
            "loss": loss,
            "last_loss": loss,
            "test_accuracy": [80.0] * len(seeds),
            "drift": None if optimizer == "standard-adam" else [1e-7] * len(seeds),
            "seconds": 6.0,
            "ms": {"ad": 3.0, "step": 1.0, "other": 0.1},
            "peak_mib": 512.0,
            **line(loss),
        }
        for i, loss in enumerate(losses, 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    end = {"kind": "end", "epochs": len(losses)}
    path.write_bytes(b"".join(map(encode, [header, *rows, end])))
    return path
