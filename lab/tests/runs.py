"""The command `ghor` in processes that can be killed at any point, and what their records say.

`Forks` is one process that has imported everything; what it forks is a fresh process after some milliseconds,
as torch has done nothing yet in its parent.
"""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS = 240  # to wait for a process: they take a second or so, on a busy machine many
LAB = Path(__file__).parents[1]
SOURCE = os.pathsep.join(map(str, (LAB / "src", LAB.parent / "src")))
SMALL = {"encoder_layers": 2, "decoder_layers": 2, "decoder_output_layers": 2}
PENDULUM = (
    *("run", "pendulum", "-o", "geometric-adam", "--seeds", "0-1", "--batch-size", "5050", "--no-compile"),
    *(word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")),
)
BOTH = (*PENDULUM, "-o", "momentum")
MNIST = (
    *("run", "mnist", "-o", "geometric-adam", "--batch-size", "16", "--no-compile", "--threads", "1"),
    *("--set", "blocks=1", "--dtype", "float64"),
)
TIMES = {"seconds", "ms", "step_cpu_ms", "peak_mib", "time", "started", "crc"}


# -- what the records say ------------------------------------------------------------------------------------


def facts(path, *but):
    """The lines of a record without times and sizes of memory (and other keys)."""
    return [strip(json.loads(line), TIMES | set(but)) for line in path.read_bytes().splitlines()]


def strip(value, keys):
    if isinstance(value, dict):
        return {k: strip(v, keys) for k, v in value.items() if k not in keys}
    return [strip(v, keys) for v in value] if isinstance(value, list) else value


def records(folder, *but):
    """All of them, by name."""
    return {p.name: facts(p, *but) for p in folder.glob("*.jsonl")}


def the_record(folder):
    (path,) = folder.glob("*.jsonl")
    return path


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def free(path):
    """Whether no process has the run in hand."""
    from ghor_lab.train import Busy, in_hand

    try:
        with in_hand(path):
            return True
    except Busy:
        return False


def weights(folder):
    """The bits of everything in the checkpoints, times left out."""
    import torch

    from ghor_lab import checkpoint

    def bits(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
        if isinstance(value, dict):
            return {k: bits(v) for k, v in value.items() if k not in TIMES}
        return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {p.name: bits(checkpoint.load(p)) for p in folder.glob("*.ckpt")}


# -- a small MNIST -------------------------------------------------------------------------------------------


def make_mnist(folder, train=50, test=20):
    """Files of random images in MNIST's format."""
    import torch

    gen, folder = torch.Generator().manual_seed(0), folder / "mnist"
    folder.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        for kind, high, shape in (("images-idx3", 256, (count, 28, 28)), ("labels-idx1", 10, (count,))):
            head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            body = torch.randint(0, high, shape, generator=gen, dtype=torch.uint8).numpy().tobytes()
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(head + body)


def small_mnist(folder):
    """Put these files in the place of MNIST's; their sums are those that they have at the first call."""
    from ghor_lab import data

    known = data.DATASETS["mnist"]
    files = []
    for file in known.files:
        raw = (Path(folder) / "mnist" / file.name).read_bytes()
        shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
        files.append(data.File(file.name, hashlib.sha256(raw).hexdigest(), shape))
    data.DATASETS["mnist"] = data.Dataset("mnist", tuple(files))


# -- processes -----------------------------------------------------------------------------------------------


@dataclass
class Done:
    code: int  # -9: killed
    text: str  # what it wrote to both streams


class Child:
    """A process of `Forks` that runs one command."""

    def __init__(self, server, pid, log, terminal):
        self.server, self.pid, self.log, self.terminal = server, pid, log, terminal
        self.done = None

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def wait(self):
        if self.done is None:
            code = self.server.ask({"wait": self.pid})["code"]
            text = self.terminal.text() if self.terminal else self.log.read_text(errors="replace")
            self.done = Done(code, text)
        return self.done


class Terminal:
    """A pseudo-terminal, read while it is written."""

    def __init__(self, columns):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.name, self.parts = os.ttyname(self.slave), []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        with contextlib.suppress(OSError):
            while part := os.read(self.master, 4096):
                self.parts.append(part)

    def text(self):
        os.close(self.slave)  # the last one that had it open: the reader sees the end
        self.reader.join(10)
        os.close(self.master)
        return b"".join(self.parts).decode(errors="replace")


class Forks:
    """Starts `ghor` with arguments in forks of a process that has imported it."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        environment["GHOR_CACHE"] = str(folder / "cache")
        for name in ("GHOR_DATA", "FORCE_COLOR", "NO_COLOR", "TERM"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def ask(self, question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the server has ended"
        return json.loads(answer)

    def start(self, *argv, fault=None, columns=None, **environment):
        self.count += 1
        log = self.folder / f"{self.count}.log"
        log.touch()  # a process may be killed before it opens it
        terminal = Terminal(columns) if columns else None
        job = {
            "argv": [str(word) for word in argv],
            "fault": fault or {},
            "log": terminal.name if terminal else str(log),
            "environment": {
                **environment,
                **({"TERM": "xterm", "COLUMNS": str(columns)} if terminal else {}),
            },
        }
        return Child(self, self.ask(job)["pid"], log, terminal)

    def run(self, *argv, code=0, **more):
        """The command's text; it must end with the code, and in no case with a stack trace."""
        done = self.start(*argv, **more).wait()
        assert "Traceback" not in done.text, done.text
        assert done.code == code, done.text
        return done.text

    def stop(self):
        self.process.kill()
        self.process.wait()


@cache
def forks():
    """Started when first asked for; serves all tests."""
    folder = Path(tempfile.mkdtemp(prefix="ghor-runs-"))
    folder.chmod(0o755)  # for a process that is not its owner
    server = Forks(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server


@cache
def undisturbed(*argv):
    """The folder of a command that was left alone."""
    out = forks().folder / f"undisturbed-{undisturbed.cache_info().currsize}"
    forks().run(*argv, "--out", out)
    return out


def until(ready, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


def serve():
    """Read jobs, fork, answer."""
    import torch._dynamo  # every optimizer of torch does when it is made
    import torch.nn.parallel.distributed  # noqa: F401

    import ghor_lab.cli
    import ghor_lab.train

    ghor_lab.train.commit = lambda: "0000000"  # that of the folder may change meanwhile
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                child(job)
            answer = {"pid": pid}
        print(json.dumps(answer), file=answers, flush=True)


def child(job):
    """One command; does not return."""
    code = 1
    try:
        os.setsid()
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs inherit that it is ignored
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        out = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY, 0o666)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(job["environment"])
        for name, value in job["fault"].items():
            FAULTS[name](value)
        code = command(job["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(argv):
    """`ghor` with arguments in this process; its exit code."""
    from ghor_lab import main

    sys.argv = ["ghor", *argv]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


# -- faults --------------------------------------------------------------------------------------------------


def kill():
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_line(number):
    """Before the line of that number, counted over all functions that write, move or remove files of a
    run."""
    import ghor_lab.files
    from ghor_lab import checkpoint, record, train

    watched = {ghor_lab.files.__file__, checkpoint.__file__}
    functions = {
        (record.__file__, "append"),
        *((train.__file__, n) for n in ("in_hand", "_train", "resume", "forget")),
    }
    count = 0
    atexit.register(lambda: print(f"{count} lines", file=sys.stderr))

    def lines(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == number:
                kill()
        return lines

    def calls(frame, event, argument):
        code = frame.f_code
        return lines if code.co_filename in watched or (code.co_filename, code.co_name) in functions else None

    sys.settrace(calls)


class Stream(io.FileIO):
    """Its writes count; at one of them half of the bytes are written, and then something happens."""

    left, then = 0, None

    def write(self, data):
        Stream.left -= 1
        if Stream.left == 0:
            super().write(data[: len(data) // 2])
            Stream.then()
        return super().write(data)


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_record(then):
    """At the n-th write to a record."""

    def install(number):
        Stream.left, Stream.then = number, staticmethod(then)
        normal = Path.open

        def opened(self, mode="r", buffering=-1, *more, **options):
            if self.suffix == ".jsonl" and "+" in mode:
                return Stream(self, mode.replace("b", ""))
            return normal(self, mode, buffering, *more, **options)

        Path.open = opened

    return install


def at_checkpoint(then):
    """At the n-th write of a checkpoint."""

    def install(number):
        Stream.left, Stream.then = number, staticmethod(then)
        os.fdopen = lambda handle, mode: Stream(handle, mode.replace("b", ""))

    return install


def wait_at_epoch(path):
    """After the first epoch: say so in a file, and stay."""
    from ghor_lab import train

    normal = train.append

    def append(record, values, size):
        result = normal(record, values, size)
        if values["kind"] == "epoch":
            Path(path).touch()
            threading.Event().wait(SECONDS)
        return result

    train.append = append


def slow_epochs(seconds):
    """Wait after every epoch, so that what is shown is shown long enough."""
    from ghor_lab import train

    normal = train.append

    def append(record, values, size):
        result = normal(record, values, size)
        time.sleep(seconds if values["kind"] == "epoch" else 0)
        return result

    train.append = append


def kill_at_batch(number):
    """Before the batch of that number, counted over the epochs."""
    from ghor_lab.tasks import Classification

    normal, left = Classification.batches, number

    def batches(self, epoch):
        nonlocal left
        for batch in normal(self, epoch):
            left -= 1
            if left == 0:
                kill()
            yield batch

    Classification.batches = batches


def forked_jobs(_):
    """The processes of --jobs are forks too, as this one is: they need not import everything."""
    import multiprocessing

    from ghor_lab import execute

    context = multiprocessing.get_context("fork")
    execute.multiprocessing.get_context = lambda method: context


def nobody(_):
    """Give up root's right to write everywhere, as late as the first file is opened."""
    from ghor_lab import train

    class Lock(train.FileLock):
        def acquire(self, *args, **options):
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            return super().acquire(*args, **options)

    train.FileLock = Lock


FAULTS = {
    "kill_at_line": kill_at_line,
    "kill_in_record": at_record(kill),
    "kill_in_checkpoint": at_checkpoint(kill),
    "full_at_record": at_record(full),
    "full_at_checkpoint": at_checkpoint(full),
    "largest_file": lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    "wait_at_epoch": wait_at_epoch,
    "slow_epochs": slow_epochs,
    "kill_at_batch": kill_at_batch,
    "forked_jobs": forked_jobs,
    "mnist": small_mnist,
    "nobody": nobody,
}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        small_mnist(sys.argv[1])
        sys.exit(command(sys.argv[2:]))
