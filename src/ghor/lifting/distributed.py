"""Stacks of weights that are sharded over processes; see `shards.py` for what each process works on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ghor._torch.sharding import Shards, is_sharded
from ghor.lifting.stack import Stack


class ShardedStack(Stack):
    """A stack of DTensors."""

    def pieces(self, tensors: list[Any]) -> list[Tensor]:
        if not hasattr(self, "shards"):
            self.shards = Shards(tensors[0], self.space)
        return self.shards.pieces(tensors)

    def whole(self, X: Tensor, lead: int) -> Any:
        return self.shards.whole(X, lead)

    def local(self, X: Any) -> Tensor:
        return X.to_local() if is_sharded(X) else X

    def placed(self, value: Any) -> Any:
        return self.shards.placed(value)

    def row(self, X: Any, i: int) -> Any:
        return (
            X[i : i + 1].squeeze(0) if is_sharded(X) else X[i]
        )  # X[i] changes the shape of X itself in torch 2.9

    def written(self) -> None:
        """Each process writes its own piece; nothing is sent."""
        self.shards.write(self.owners, self.params)
