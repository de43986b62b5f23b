"""The copying problem: a recurrent layer, unitary or unconstrained, repeats ten symbols after a delay."""

import math

import torch
from matplotlib.figure import Figure
from torch import nn

import ghor

SYMBOLS, LENGTH, DELAY = 8, 10, 60


class Recurrent(nn.Module):
    """h <- modReLU(W h + V x), W complex n x n, on Unitary() or unconstrained."""

    def __init__(self, n: int, unitary: bool) -> None:
        super().__init__()
        self.W = nn.Parameter(ghor.Unitary().random(n, n, dtype=torch.complex64))
        self.V = nn.Parameter(torch.randn(SYMBOLS + 2, n, dtype=torch.complex64) / n**0.5)
        self.bias = nn.Parameter(torch.zeros(n))
        self.read = nn.Linear(2 * n, SYMBOLS + 1)
        if unitary:
            ghor.constrain(self, "W", ghor.Unitary())

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        h, out = self.V.new_zeros(len(symbols), len(self.W)), []
        for x in self.V[symbols].unbind(1):
            z = h @ self.W + x
            size = z.abs() + 1e-6
            h = z * (torch.relu(size + self.bias) / size)
            out.append(h)
        return self.read(torch.view_as_real(torch.stack(out, 1)).flatten(-2))


def batch(size: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Symbols, blanks (8) and a mark (9); then blanks, and the symbols again."""
    word = torch.randint(SYMBOLS, (size, LENGTH), generator=gen)
    blank = torch.full((size, DELAY + LENGTH), SYMBOLS)
    mark = blank[:, :LENGTH].index_fill(1, torch.tensor([0]), SYMBOLS + 1)
    return torch.cat([word, blank[:, :DELAY], mark], 1), torch.cat([blank, word], 1)


def run(steps: int = 300, n: int = 64) -> Figure:
    """Adam with the same learning rate for both."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy", yscale="log")
    for name, unitary in (("unitary", True), ("free", False)):
        torch.manual_seed(0)
        model, gen, losses = Recurrent(n, unitary), torch.Generator().manual_seed(1), []
        opt = ghor.optim.Adam(ghor.param_groups(model), lr=3e-3)
        for _ in range(steps):
            x, y = batch(32, gen)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print(f"{name}: loss {losses[-1]:.4f} after {steps} steps")
        axes.plot(losses, label=name)
    axes.axhline(
        LENGTH * math.log(SYMBOLS) / (DELAY + 2 * LENGTH), color="0.6", linestyle="--", label="without memory"
    )
    axes.legend()
    return figure


if __name__ == "__main__":
    run().savefig("unitary_rnn.png")
