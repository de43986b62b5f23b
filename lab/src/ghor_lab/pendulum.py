"""The pendulum of the paper's second experiment: trajectories lifted to R^4, and the reconstruction error."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from ghor_lab.networks.phase_space import PhaseSpaceMap

from .data import say
from .files import cache_folder, store

GRID = 10  # initial angles, and initial velocities
STEPS, STEP = 100, 0.1  # t = 0, 0.1, ..., 10
SHAPE = (GRID * GRID, STEPS + 1, 2)


@dataclass(frozen=True)
class Trajectories:
    """100 trajectories of 101 points in float64.

    t is (101,), theta and velocity are (100, 101), z is (100, 101, 4).
    """

    t: Tensor
    theta: Tensor
    velocity: Tensor
    z: Tensor


def integrate() -> Tensor:
    """(theta, theta') of all trajectories, (100, 101, 2).

    theta'' = sin(theta) from a grid on [0, 2 pi] x [-2, 2]. Trajectory 10 i + j starts at the i-th angle with
    the j-th velocity. The error is below 1e-9 at every point.
    """
    theta, velocity = np.meshgrid(np.linspace(0, 2 * np.pi, GRID), np.linspace(-2, 2, GRID), indexing="ij")
    count = GRID * GRID

    def field(t: float, y: np.ndarray) -> np.ndarray:
        return np.concatenate([y[count:], np.sin(y[:count])])

    # All at once. The tolerance applies to the mean over the trajectories, and errors grow by e^10 near
    # the unstable equilibrium.
    solution = solve_ivp(
        field,
        (0, STEPS * STEP),
        np.concatenate([theta.ravel(), velocity.ravel()]),
        method="DOP853",
        t_eval=np.linspace(0, STEPS * STEP, STEPS + 1),
        rtol=1e-13,
        atol=1e-14,
        max_step=STEP,  # the interpolation between steps is of lower order than the steps
    )
    if not solution.success:
        raise RuntimeError(f"the pendulum could not be integrated: {solution.message}")
    return torch.from_numpy(solution.y).reshape(2, count, STEPS + 1).permute(1, 2, 0).contiguous()


def lift(theta: Tensor, velocity: Tensor) -> Tensor:
    """(...) and (...) -> (..., 4): q = (sin theta, cos theta), p = (theta' cos theta, -theta' sin theta)."""
    sin, cos = theta.sin(), theta.cos()
    return torch.stack([sin, cos, velocity * cos, -velocity * sin], -1)


def pack(angles: Tensor) -> bytes:
    """(theta, theta') as a file: the SHA-256 of the numbers, a newline, then float64, little-endian."""
    content = angles.numpy().astype("<f8").tobytes()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unpack(raw: bytes) -> Tensor:
    """The inverse of `pack`; ValueError says what is wrong with a damaged file."""
    digest, content = raw[:64], raw[65:]
    if len(content) != 8 * math.prod(SHAPE):
        raise ValueError(f"it has {len(raw)} bytes, not {65 + 8 * math.prod(SHAPE)}")
    found = hashlib.sha256(content).hexdigest()
    if digest != found.encode():
        raise ValueError(f"the SHA-256 of its numbers is {found}, not {digest.decode(errors='replace')}")
    return torch.from_numpy(np.frombuffer(content, "<f8").astype(np.float64)).reshape(SHAPE)


def load(folder: str | Path | None = None) -> Trajectories:
    """The trajectories from `folder`/pendulum (default: in the cache), or integrated and stored there.

    >>> load().z.shape  # doctest: +SKIP
    torch.Size([100, 101, 4])
    """
    path = (Path(folder).expanduser() if folder else cache_folder()) / "pendulum" / "angles.f64"
    angles = None
    if path.is_file():
        try:
            angles = unpack(path.read_bytes())
        except ValueError as error:
            say(f"{path} is damaged: {error}; made again")
    if angles is None:
        angles = integrate()
        try:
            store(pack(angles), path)
        except OSError as error:
            say(f"{path} could not be written ({error}); the trajectories will be integrated again next time")
    theta, velocity = angles.unbind(-1)
    t = torch.linspace(0, STEPS * STEP, STEPS + 1, dtype=torch.float64)
    return Trajectories(t, theta.contiguous(), velocity.contiguous(), lift(theta, velocity))


def reconstruction_error(model: PhaseSpaceMap, x: Tensor) -> Tensor:
    """||z - decoder(encoder(z))|| / ||z|| over the points, for each copy: (copies,).

    This is both the loss and the reported error. Features come first: x is (copies, dim, points), or (1, dim,
    points) for the same points in every copy.
    """
    x = x.expand(math.prod(model.copies), -1, -1)
    y = torch.cat(model.features_first(*x.chunk(2, 1)), 1)
    return torch.linalg.vector_norm(x - y, dim=(1, 2)) / torch.linalg.vector_norm(x, dim=(1, 2))
