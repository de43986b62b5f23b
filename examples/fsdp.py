"""FSDP2 on two processes, and a checkpoint that one process loads.

`heads`, a batch of matrices, is split into whole matrices: its step sends nothing. `net[0].weight` is split
within the matrix: for its step, gradient and weight are gathered, and every process computes it.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ghor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.Parameter(torch.randn(3, 49, 7))
        self.net = torch.nn.Sequential(torch.nn.Linear(21, 7, bias=False), torch.nn.Linear(7, 7))
        ghor.constrain(self, "heads", ghor.Stiefel())
        ghor.constrain(self.net[0], "weight", ghor.Stiefel())

    def forward(self, x):
        return self.net(torch.einsum("bi,hij->bhj", x, self.heads).flatten(1))


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = fully_shard(Model())
    optimizer = ghor.optim.AdamW(model, lr=1e-2)  # after fully_shard, as always; declared spaces are found

    x = torch.randn(512, 49)[rank::2]  # each process has its half
    target = x[:, :7].argmax(dim=1)
    for step in range(101):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (folder,), nprocs=2)
        model = Model()  # on this one process
        optimizer = ghor.optim.AdamW(model, lr=1e-2)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    ghor.check(model)
