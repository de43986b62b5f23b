"""`ghor run --executor ray`: the records of a plain run, whoever is killed on the way.

Ray's workers are processes of their own, which know nothing of the patched commit of the others; no run has
one here.
"""

import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import BOTH, forks, free, records, undisturbed, until

from ghor_lab.execute import knock
from ghor_lab.record import read

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ray>=2.50'"),
    pytest.mark.slow,
]

QUIET = {"GIT_DIR": os.devnull, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL = ("--executor", "ray", "--jobs", "2")
MANY = (*BOTH, "--epochs", "100")


def same(folder, argv):
    """In every field that is no time and no size of memory."""
    assert len(records(folder)) == 2
    assert records(folder, "commit") == records(undisturbed(*argv), "commit")
    return True


def lines(folder):
    """What is on the disk of each run, times included: an epoch that is computed again has others."""
    return {p: p.read_bytes().rpartition(b"\n")[0] for p in folder.glob("*.jsonl")}


def kept(before):
    """Nothing of it was computed again, and there was something."""
    assert all(p.read_bytes().startswith(raw) and len(raw.splitlines()) > 1 for p, raw in before.items())
    return len(before) == 2


def under_way(folder):
    until(lambda: sum(len(raw.splitlines()) > 1 for raw in lines(folder).values()) == 2)
    assert not any(read(p).finished for p in lines(folder))
    return True


def workers(folder):
    """The processes that train; Ray gives them the names of their tasks."""
    titles = {f"ray::{p.stem}".encode() for p in folder.glob("*.jsonl")}
    processes = [p for p in Path("/proc").glob("[0-9]*/cmdline") if command(p) in titles]
    return [int(p.parent.name) for p in processes]


def command(path):
    try:
        return path.read_bytes().rstrip(b"\0 ")
    except OSError:  # gone
        return b""


def test_the_same_records(tmp_path):
    argv = (*BOTH, "--epochs", "2")
    text = forks().run(*argv, *LOCAL, "--out", tmp_path, **QUIET)
    assert same(tmp_path, argv)
    assert text.count("epoch 2 of 2") == 2
    assert [line for line in text.splitlines() if "Ray" in line or "ray" in line] == []


def test_nobody_at_the_address(tmp_path):
    argv = (*MANY, "--executor", "ray", "--address", "127.0.0.1:1", "--out", tmp_path)
    assert "error: no Ray cluster can be reached at 127.0.0.1:1: " in forks().run(*argv, code=1, **QUIET)
    for address in ("ray://127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(OSError, match=f"at {address}: "):
            knock(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        knock(f"127.0.0.1:{server.getsockname()[1]}")
    knock("auto")  # Ray finds it


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_the_command_is_killed_and_given_again(tmp_path, number, code):
    """Its workers end with it; the records go on where they were."""
    child = forks().start(*MANY, *LOCAL, "--out", tmp_path, **QUIET)
    assert under_way(tmp_path)
    child.kill(number)
    done = child.wait()
    assert done.code == code, done.text
    assert "Traceback" not in done.text
    assert ("stopped. The same command resumes" in done.text) == (number == signal.SIGINT)
    until(lambda: not workers(tmp_path) and all(map(free, tmp_path.glob("*.jsonl"))), 30)
    before = lines(tmp_path)
    forks().run(*MANY, *LOCAL, "--out", tmp_path, **QUIET)
    assert kept(before)
    assert same(tmp_path, MANY)


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def address():
    """Of a cluster of two nodes with one core each."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **QUIET, "GHOR_CACHE": str(forks().folder / "cache"), "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_killed_workers_are_started_again(tmp_path, address):
    """Both of them, twice, on a cluster that was there before: at most the epoch under way is lost."""
    argv = (*MANY, "--executor", "ray", "--address", address, "--out", tmp_path)
    child = forks().start(*argv, **QUIET)
    for _ in range(2):
        assert under_way(tmp_path)
        until(lambda: len(workers(tmp_path)) == 2)
        for worker in workers(tmp_path):
            os.kill(worker, signal.SIGKILL)
        before = lines(tmp_path)
        until(lambda before=before: all(len(raw) > len(before[p]) for p, raw in lines(tmp_path).items()))
        assert kept(before)
    done = child.wait()
    assert done.code == 0, done.text
    assert same(tmp_path, MANY)
