"""Processes that run functions of the tests together, over gloo. They are started once and serve many tests."""

import contextlib
import multiprocessing as mp
import pickle
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

SECONDS = 120  # to wait for an answer: calls take a second or so, imports some more, a busy machine makes it many

_running = {}


def ranks(size=2):
    """The processes, started when first asked for."""
    if size not in _running or not _running[size].alive():
        _running[size] = Ranks(size)
    return _running[size]


class Ranks:
    """`run(function, *args)` calls function(rank, *args) in all processes, and returns what they return."""

    def __init__(self, size):
        context = mp.get_context("spawn")
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


def _serve(rank, size, store, pipe):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.optim  # warns of torch.jit when imported
    import torch.distributed.tensor

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    warnings.simplefilter("error")
    pipe.send_bytes(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = True, function(rank, *args)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own way would share memory
