"""A safetensors file: the length of a header in 8 bytes, the header in JSON, the numbers of all tensors."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghor.adapters.files import write_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; ValueError or KeyError if it is damaged."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ValueError(f"its header has {start - 8} bytes, and the file {len(data)}")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > len(data):
            raise ValueError(f"it ends within {name}, after {len(data)} of {end} bytes")
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{file} has {name} in {entry['dtype']}; what can be read here is {', '.join(DTYPES)}: save "
                "it in one of these"
            )
        dtype = DTYPES[entry["dtype"]]
        numbers = (
            torch.frombuffer(data[begin:end], dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
        )
        tensors[name] = numbers.view(entry["shape"])
    return tensors


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, as `safetensors.torch.save_file` does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, end, names = [], 0, {dtype: name for name, dtype in DTYPES.items()}
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        chunks.append(ctypes.string_at(t.data_ptr(), t.nbytes))
        begin, end = end, end + t.nbytes
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_file(file, b"".join([len(text).to_bytes(8, "little"), text, *chunks]))
