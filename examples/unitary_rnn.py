"""The copying problem: a recurrent layer, unitary or unconstrained, repeats ten symbols after a delay.

What the constraint is for shows in the powers of the trained matrix: W^k says what is left of a state
k steps later.
"""

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


def stretch(W: torch.Tensor, steps: int) -> torch.Tensor:
    """The singular values of W^k, k = 0, ..., steps: (steps + 1, n), in float64."""
    powers = [torch.eye(len(W), dtype=torch.complex128)]
    for _ in range(steps):
        powers.append(powers[-1] @ W.to(torch.complex128))
    return torch.linalg.svdvals(torch.stack(powers))


def run(steps: int = 300, n: int = 64) -> Figure:
    """Adam with the same learning rate for both."""
    figure = Figure(figsize=(3.5, 2.7), layout="constrained")
    axes = figure.add_subplot(xlabel="steps later, k", yscale="log")
    for name, unitary, colour in (("free", False, "#e08214"), ("unitary", True, "#3f51b5")):
        torch.manual_seed(0)
        model, gen = Recurrent(n, unitary), torch.Generator().manual_seed(1)
        opt = ghor.optim.Adam(ghor.param_groups(model), lr=3e-3)
        for _ in range(steps):
            x, y = batch(32, gen)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        values = stretch(model.W.detach(), DELAY)
        low, high = values.amin(1), values.amax(1)
        print(f"{name}: loss {loss.item():.4f}, singular values of W^{DELAY} {low[-1]:.2g} to {high[-1]:.2g}")
        axes.fill_between(range(DELAY + 1), low, high, color=colour, alpha=0.3, linewidth=0)
        axes.plot(values.median(1).values, color=colour, linewidth=2, label=f"{name}, loss {loss.item():.3f}")
    figure.suptitle("What is left of a state: singular values of $W^k$", fontsize=9)
    axes.set_ylim(1e-17, 1e7)
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run().savefig("unitary_rnn.svg")
