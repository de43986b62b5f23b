"""The space of CONTRIBUTING.md, word for word, and the laws on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_laws as laws
import torch
from table import randn
from torch import Tensor

import ghor
from ghor.spaces.orthogonal import Orthogonal


@dataclass(frozen=True)
class Flag(Orthogonal):
    """Flags of subspaces of dimensions sizes[0], sizes[0] + sizes[1], ... g^hor: A skew with zero diagonal blocks."""

    sizes: tuple[int, ...] = (1, 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if self.size(shape)[1] != sum(self.sizes):
            raise ValueError(f"{self} holds matrices with {sum(self.sizes)} columns, got shape {tuple(shape)}")

    def skew(self, X: Tensor) -> Tensor:
        """X - X^T outside the diagonal blocks: turning a basis within its subspace does not move the flag."""
        block = torch.repeat_interleave(torch.tensor(self.sizes, device=X.device))
        return (X - X.mT) * (block[:, None] != block[None, :])


SPACE, SHAPE = Flag(sizes=(2, 1)), (9, 3)


def test_the_code_is_that_of_the_guide():
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    source = Path(__file__).read_text()
    example = guide.split("```python")[1].split("```")[0]
    assert example[example.index("@dataclass") :].strip() in source


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_obeys_the_laws(dtype, gen):
    for law in (
        laws.test_random_points_are_on_the_space,
        laws.test_section_lies_above_its_point,
        laws.test_rgrad_represents_the_differential,
        laws.test_tangent_is_a_projection,
        laws.test_omega_lifts_tangent_vectors,
        laws.test_global_rep_is_the_isomorphism_to_ghor,
        laws.test_global_grad_is_the_derivative_in_coordinates,
        laws.test_transport_keeps_coordinates,
        laws.test_project_finds_the_space_and_keeps_its_points,
    ):
        law(SPACE, SHAPE, dtype, gen)
    for retraction in ("cayley", "geodesic"):
        laws.test_update_section_is_lambda_times_the_dense_retraction(SPACE, SHAPE, dtype, retraction, gen)
        laws.test_retraction_is_first_order(SPACE, SHAPE, retraction, gen)
    laws.test_geodesics_continue_themselves(SPACE, SHAPE, gen)


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_a_flag_of_eigenspaces(section, gen):
    """max tr(Y^T C Y D), D = diag(2, 2, 1): the first two eigenvectors, then the third."""
    C = randn((9, 9), gen)
    C = C + C.mT
    D = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)
    Y = torch.nn.Parameter(SPACE.random(*SHAPE, generator=gen, dtype=torch.float64))
    opt = ghor.optim.Adam([Y], space=SPACE, lr=0.05, section=section, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
    for _ in range(600):
        opt.zero_grad()
        ((Y.mT @ C @ Y).diagonal() * D).sum().backward()
        opt.step()
        schedule.step()
    top = torch.linalg.eigh(C)[1].flip(1)[:, :3]
    y = Y.detach()
    assert (y[:, :2] @ y[:, :2].mT - top[:, :2] @ top[:, :2].mT).abs().max() < 1e-4
    assert (y[:, 2:] @ y[:, 2:].mT - top[:, 2:] @ top[:, 2:].mT).abs().max() < 1e-4
    assert SPACE.distance(y) < 1e-13
    with pytest.raises(ValueError, match="3 columns"):
        SPACE.check_shape((9, 4))
