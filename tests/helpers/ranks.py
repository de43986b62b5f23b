"""Processes that run functions of the tests together, over gloo. They are started once and serve many tests.

They are forks of a process that has imported torch and done nothing with it: importing takes longer than most
tests.
"""

import contextlib
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

SECONDS = (
    120  # to wait for an answer: calls take a second or so, imports some more, a busy machine makes it many
)

_running = {}

IMPORTED = [
    "ghor",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",  # warns of torch.jit when imported
    "torch.distributed.tensor",
]


def forks():
    """The context of multiprocessing whose processes are such forks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def into_a_file(rank, path, function, args):
    """function(rank, *args) with what it prints in a file: forks have the output of the process they come
    from.

    The process group is kept to the end of the process. If a DDP model has the last reference to it, torch
    joins the group's threads with Python's lock in its hands, and one of them may want that lock: both then
    wait for ever.
    """
    import torch.distributed as dist

    with path.open("ab") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    begin, kept = dist.init_process_group, []

    def init_process_group(*args, **options):
        begin(*args, **options)
        kept.append(dist.group.WORLD)

    dist.init_process_group = init_process_group
    function(rank, *args)
    sys.stdout.flush()
    os._exit(0)


def ranks(size=2):
    """The processes, started when first asked for."""
    if size not in _running or not _running[size].alive():
        _running[size] = Ranks(size)
    return _running[size]


class Ranks:
    """`run(function, *args)` calls function(rank, *args) in all processes, and returns what they return."""

    def __init__(self, size):
        context = forks()
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(store), there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers()  # they are there

    def alive(self):
        return all(p.is_alive() for p in self.processes)

    def run(self, function, *args):
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        return self._answers()

    def _answers(self):
        answers, errors, end = {}, {}, time.monotonic() + SECONDS
        while len(answers) + len(errors) < len(self.pipes) and time.monotonic() < end:
            for rank, pipe in enumerate(self.pipes):
                if rank not in answers and rank not in errors and pipe.poll(0.005):
                    try:
                        ok, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        ok, value = False, "the process has ended"
                    (answers if ok else errors)[rank] = value
                    if not ok:  # the others may wait for it in vain
                        end = min(end, time.monotonic() + 5)
        if errors or len(answers) < len(self.pipes):
            self.stop()
            told = "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())
            raise AssertionError(told or f"no answer in {SECONDS} s")
        return [answers[rank] for rank in range(len(self.pipes))]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank, size, store, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.9's own checkpoints
    pipe.send_bytes(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = True, function(rank, *args)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own way would share memory
