"""The compiled block beside the formula: a cache of its own, and what the tests of it share."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ghor_lab.compiled import attention

# heads, features of a head, tokens; for each one file is compiled
SIZES = [(7, 7, 16), (2, 3, 4), (3, 5, 8), (2, 7, 32)]
TINY = (2, 1, 4)
ULP = 2**-23

COMPILER = pytest.mark.skipif(
    not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))),
    reason="there is no C compiler",
)


def clear() -> None:
    attention.library.cache_clear()
    attention.missing.cache_clear()


@pytest.fixture(scope="module", autouse=True, name="cache")
def cache_folder(tmp_path_factory):
    """A cache folder of our own, with the libraries of SIZES; they are compiled two at a time."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GHOR_CACHE", str(folder))
        clear()
        with ThreadPoolExecutor(2) as workers:
            list(workers.map(lambda size: attention.library(*size), [*SIZES, TINY]))
        yield folder
    clear()


@pytest.fixture(name="empty")
def empty_folder(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered."""
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path / "cache"))
    clear()
    yield tmp_path / "cache"
    clear()


def exact(heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """z = concat_h softmax(Q_h^T K_h) V_h with [Q; K; V] = M x, and z + tanh(A z + b) with A and b."""
    Q, K, V = (M @ x).unflatten(1, (3, heads, -1)).unbind(1)  # (batch, heads, features, tokens)
    P = torch.softmax(torch.einsum("bhfi,bhfj->bhij", Q, K), -1)
    z = torch.einsum("bhij,bhfj->bhfi", P, V).flatten(1, 2)
    return z if A is None or b is None else z + torch.tanh(A @ z + b[:, None])


def compiled(heads: int, *inputs: Tensor) -> Tensor:
    return attention.block(heads, *inputs)


def with_gradients(block, heads: int, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of sum(output * dy)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = block(heads, *inputs)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in inputs)]


def inputs(
    heads: int, features: int, tokens: int, batch: int, gen, alone: bool = False
) -> tuple[list[Tensor], Tensor]:
    """x, M and, unless the attention is alone, A and b; dy."""
    D = heads * features
    x, dy = torch.randn(2, batch, D, tokens, generator=gen)
    M, A, b = (torch.randn(*shape, generator=gen) for shape in ((3 * D, D), (D, D), (D,)))
    return [x, M / D**0.5, *(() if alone else (A / D**0.5, b))], dy


def double(inputs: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in inputs]


def copied(x: Tensor) -> list[Tensor]:
    """x, and M with which Q, K and V are x itself."""
    return [x, torch.eye(x.shape[1]).repeat(3, 1)]


def off(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))
