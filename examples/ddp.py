"""DistributedDataParallel on two processes: gradients are averaged, every process makes the same step."""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ghor


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(49, 7, bias=False), torch.nn.Linear(7, 7))
    ghor.constrain(model[0], "weight", ghor.Stiefel())
    model = DistributedDataParallel(model)
    optimizer = ghor.optim.AdamW(model, lr=1e-2)

    x = torch.randn(512, 49)[rank::2]  # each process has its half
    target = x[:, :7].argmax(dim=1)
    for step in range(201):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        ghor.check(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (folder,), nprocs=2)
