"""Real models with fused projections, with random weights: each head is orthonormal, as the model cuts it."""

import pytest
import torch
from torch import nn

import ghor

HEADS, SIZE = 4, 8
E = HEADS * SIZE


def gpt2():
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=9, n_embd=E, n_layer=2, n_head=HEADS, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config), ".c_attn.weight", lambda W: W.T


def phi3():
    from transformers import Phi3Config, Phi3Model

    sizes = {"hidden_size": E, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = Phi3Config(vocab_size=9, num_key_value_heads=2, pad_token_id=0, eos_token_id=0, **sizes)
    return Phi3Model(config), ".qkv_proj.weight", lambda W: W


def gpt_neox():
    """Queries, keys and values of each head in turn."""
    from transformers import GPTNeoXConfig, GPTNeoXModel

    sizes = {"hidden_size": E, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    return GPTNeoXModel(GPTNeoXConfig(vocab_size=9, **sizes)), ".query_key_value.weight", lambda W: W


class Attention(nn.Module):
    """As in timm's vision transformers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).movedim(-2, -4).unbind(-2)
        return x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).movedim(-3, -2).flatten(-2))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, E)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block["attn"](x)
        return (x,)


def timm_like():
    return Blocks(), ".qkv.weight", lambda W: W


slow = pytest.mark.slow  # to import transformers takes ten seconds; the recipes run some of these


@pytest.mark.parametrize(
    "make",
    [*(pytest.param(f, marks=slow) for f in (gpt2, phi3, gpt_neox)), timm_like],
    ids=lambda f: f.__name__,
)
def test_each_head_of_a_fused_layer(make):
    if make is not timm_like:
        pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, name, upright = make()
    with pytest.warns(UserWarning, match="seems to hold several projections"):
        ghor.constrain(model, f"*{name}", ghor.Stiefel())
    across = make is gpt2
    moved = ghor.constrain(
        model,
        f"*{name}",
        lambda n, p: ghor.Stiefel(blocks=p.shape[int(across)] // SIZE, along="columns" if across else "rows"),
    )
    assert len(moved) == 2
    opt = ghor.optim.AdamW(model, lr=1e-2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        opt.zero_grad()
        model(torch.arange(9)[None])[0].square().sum().backward()
        opt.step()
    for n, p in model.named_parameters():
        if n in moved:
            heads = upright(p.detach()).unflatten(0, (-1, SIZE))
            assert (heads @ heads.mT - torch.eye(SIZE)).abs().max() < 2e-6
            assert not torch.equal(p, before[n])
            assert opt.state[p]["exp_avg"].shape == p.shape
