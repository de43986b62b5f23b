"""Memory and time of one contender, in a process of its own: `measure.py memory`. Linux only.

It ends where a step, the set-up or the memory exceeds its budget; the row then says which.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import seconds
from kernels import held
from workloads import CONTENDERS, WORKLOADS, Workload

TEN = 10  # steps that are timed together, so that what is done every ten steps counts with its share
BUDGET = {"step": 1.0, "set-up": 15.0, "memory": 6.0}  # seconds, seconds, GiB beyond what libraries take


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def resident() -> int:
    """Resident bytes after free memory was given back to the system; resets the peak (VmHWM)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else a freed block of the last step hides an allocation of the next
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


@contextmanager
def phase(name: str, limit: float) -> Iterator[None]:
    """Announce what is going on, and end the process if it takes longer than `limit` seconds."""
    print(json.dumps({"stopped": f"the {name} takes more than {limit:g} s"}), flush=True)
    signal.setitimer(signal.ITIMER_REAL, limit)  # no handler: it also ends a process deep inside LAPACK
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def measure(w: Workload, contender: str, rounds: int) -> dict[str, Any]:
    """Set-up, steps, memory."""
    n = w.shapes[0][-1]
    small = CONTENDERS[contender](replace(w, shapes=((*w.shapes[0][:-2], 4 * n, n),)))
    for _ in range(TEN + 1):  # imports, threads, buffers of libraries: not counted
        small.step()
    del small
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(BUDGET["memory"] * 2**30), -1))
    base = resident()
    with phase("set-up", BUDGET["set-up"]):
        c = CONTENDERS[contender](w)
    with phase("first step", BUDGET["set-up"]):
        first = seconds(c.step)
    together = TEN if first < BUDGET["step"] else 1
    with phase("steps", 60 + 20 * BUDGET["step"]):
        times = [seconds(lambda: [c.step() for _ in range(together)]) / together for _ in range(rounds)]
    kept = resident() - base
    for _ in range(together):
        c.step()
    own = sum(p.nbytes for p in c.params) * 2  # the weights and their gradients
    return {
        "ms": [1e3 * t for t in times],
        "first_ms": 1e3 * first,
        "held_bytes": kept - own,
        "peak_bytes": status("VmHWM") - base - own,
        "state_bytes": sum(x.nbytes for x in held(c.holder, c.params).values()) - own // 2,
        "stopped": f"a step takes {median(times):.1f} s" if median(times) > BUDGET["step"] else None,
    }


def child(w: Workload, contender: str, rounds: int, threads: int) -> dict[str, Any]:
    """A row, of a new process; without "ms" it says in "stopped" why."""
    task = json.dumps([w.name, contender, rounds, threads])
    done = subprocess.run([sys.executable, __file__, task], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode in (0, -signal.SIGALRM) and lines:
        return dict(lines[-1])
    if "allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return {"stopped": f"it needs more than {BUDGET['memory']:g} GiB"}
    return {"stopped": f"it failed: {(done.stderr.splitlines() or [str(done.returncode)])[-1]}"}


if __name__ == "__main__":
    name, contender, rounds, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    (workload,) = (w for w in WORKLOADS if w.name == name)
    print(json.dumps(measure(workload, contender, rounds)), flush=True)
