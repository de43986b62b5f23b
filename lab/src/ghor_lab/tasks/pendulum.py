"""The paper's second experiment: a symplectic autoencoder of the pendulum's trajectories, lifted to R^4.

    theta'' = sin(theta),    q = (sin theta, cos theta),    p = (theta' cos theta, -theta' sin theta)

from 10 x 10 starts on [0, 2 pi] x [-2, 2], at t = 0, 0.1, ..., 10: 10,100 points. All seeds of a run are
trained at once, a network each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from ..networks import SymplecticAutoencoder, symplecticity
from .task import Task, brief, drift, generator

GRID = 10  # initial angles, and initial velocities
STEPS, STEP = 100, 0.1
SAMPLE = [13, 24, 37, 62, 85]  # trajectories that are drawn


def integrate() -> Tensor:
    """(theta, theta') of all trajectories, (100, 101, 2), with an error below 1e-9 at every point.

    Trajectory 10 i + j starts at the i-th angle with the j-th velocity.
    """
    theta, velocity = np.meshgrid(np.linspace(0, 2 * np.pi, GRID), np.linspace(-2, 2, GRID), indexing="ij")
    count = GRID * GRID
    solution = solve_ivp(
        lambda t, y: np.concatenate([y[count:], np.sin(y[:count])]),
        (0, STEPS * STEP),
        np.concatenate([theta.ravel(), velocity.ravel()]),
        method="DOP853",
        t_eval=np.linspace(0, STEPS * STEP, STEPS + 1),
        # all at once: the tolerance is for the mean, and errors grow by e^10 near the unstable equilibrium
        rtol=1e-13,
        atol=1e-14,
        max_step=STEP,  # the interpolation between steps is of lower order than the steps
    )
    return torch.from_numpy(solution.y).reshape(2, count, STEPS + 1).permute(1, 2, 0).contiguous()


def lift(angles: Tensor) -> Tensor:
    """(..., 2) -> (..., 4): the point (q, p) of an angle and its velocity."""
    theta, velocity = angles.unbind(-1)
    sin, cos = theta.sin(), theta.cos()
    return torch.stack([sin, cos, velocity * cos, -velocity * sin], -1)


class Pendulum(Task):
    """The loss, and the error, is ||z - decoder(encoder(z))|| / ||z|| over the batch, for each seed."""

    model: SymplecticAutoencoder

    def network(self) -> SymplecticAutoencoder:
        seeds = self.config.seeds
        generators = [generator(seed) for seed in seeds]
        sizes = self.config.network
        return SymplecticAutoencoder(**sizes, copies=len(seeds), generators=generators, **self.factory)

    def read(self) -> None:
        self.z = lift(integrate())  # (100, 101, 4)
        self.points = self.z.flatten(0, 1).to(self.device, self.dtype)
        self.steps = self.whole_batches(len(self.points), "points")

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """(copies, 4, batch): every seed has its own order; an incomplete last batch is dropped."""
        size, count = self.config.batch_size, len(self.points)
        order = torch.stack([torch.randperm(count, generator=generator(s, epoch)) for s in self.config.seeds])
        shuffled = self.points.mT[:, order.to(self.device)].transpose(0, 1)  # (copies, 4, 10100)
        for i in range(self.steps):
            yield shuffled[..., i * size : (i + 1) * size].contiguous()

    def losses(self, batch: Tensor, backward: bool = True) -> list[float]:
        """The copies share nothing, so the gradient of the sum is that of each."""
        with torch.set_grad_enabled(backward):
            made = torch.cat(self.model.features_first(*batch.chunk(2, 1)), 1)
            distance = torch.linalg.vector_norm(batch - made, dim=(1, 2))
            errors = distance / torch.linalg.vector_norm(batch, dim=(1, 2))
            if backward:
                errors.sum().backward()
        return errors.tolist()

    def evaluate(self) -> dict[str, Any]:
        """The drift, and how symplectic encoder and decoder are at five points of the data, in float64."""
        model, z = copy.deepcopy(self.model).double(), self.points[:: len(self.points) // 4].double()
        with torch.no_grad():
            latent = model.encoder(z)
        found = {
            "encoder": brief(symplecticity(model.encoder, z).tolist()),
            "decoder": brief(symplecticity(model.decoder, latent).tolist()),
        }
        return {"drift": drift(self.model, len(self.config.seeds)), "symplecticity": found}

    @torch.no_grad()
    def sample(self) -> dict[str, Any]:
        """Five trajectories, and what the first seed's network makes of them."""
        z = self.z[SAMPLE].to(self.device, self.dtype)
        made = self.model(z.flatten(0, 1))

        def rounded(x: Tensor) -> Any:
            return (x.double() * 1e5).round().div(1e5).tolist()

        return {
            "seed": self.config.seeds[0],
            "t": rounded(torch.linspace(0, STEPS * STEP, STEPS + 1, dtype=torch.float64)),
            "original": rounded(z),
            "reconstruction": rounded(made[0].view(z.shape)),
        }
