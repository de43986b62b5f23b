"""Adapters: fine-tuning with a few parameters that stay on their space, beside frozen weights.

    Rotation(block)                  y = W R x + c      R = diag(R_1, R_2, ...), R_i in SO(block)
    Rotation(block, sides="both")    y = L W R x + c    L and R of this kind
    LowRank(rank)                    y = W x + U diag(s) V^T x + c    U, V on Stiefel, s the singular values
    LowRank(rank, full=True)         y = W x + U S V^T x + c          S any matrix rank x rank

Rotation is orthogonal fine-tuning; on both sides it reaches every weight with the singular values of W, if
the blocks are as large as the layer. All start as the layer they adapt: L = R = I, s = S = 0. Layers are
nn.Linear, or Hugging Face's Conv1D, whose weight is transposed. Adapted layers are ordinary modules around
the original ones, and the factors are declared with `ghor.constrain`, so that any ghor optimizer trains them:

    adapt(model, ["q_proj", "v_proj"], Rotation(block=16))
    optimizer = ghor.optim.AdamW(ghor.param_groups(model), lr=1e-3)

`merge` writes the adapters into the frozen weights and `unmerge` takes them out again, bit for bit; `save`
and `load` keep the adapters alone. A layer can have several, by name: rotations act one after the other,
low-rank terms add up.
"""

from ghor.adapters.adapted import Adapted
from ghor.adapters.attach import activate, adapt, angle_groups
from ghor.adapters.files import load, save
from ghor.adapters.kinds import LowRank, Rotation
from ghor.adapters.merging import merge, release, remove, unmerge

__all__ = [
    "Adapted",
    "LowRank",
    "Rotation",
    "activate",
    "adapt",
    "angle_groups",
    "load",
    "merge",
    "release",
    "remove",
    "save",
    "unmerge",
]
