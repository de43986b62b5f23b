"""The right constraint for common models: attention, BERT, Llama, LSTM, GRU, convolution, embedding.

Each model is constrained in one call and trained for 50 steps with AdamW. Then every block that was meant is
checked by a separate formula, in float64 and without the library, independently of `check`.
"""

import torch
from torch import nn

import ghor

BOUND = 2e-6  # in float32
STEPS = 50


def off(blocks):
    """max ||M^T M - I||_F over matrices, each taken tall."""
    worst = 0.0
    for M in blocks:
        M = M.detach().double()
        M = M if M.shape[0] >= M.shape[1] else M.T
        worst = max(worst, float((M.T @ M - torch.eye(M.shape[1], dtype=torch.float64)).norm()))
    return worst


def train(model, loss):
    optimizer = ghor.optim.AdamW(model, lr=1e-3)
    first = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        first = value.item() if first is None else first
    return first, value.item()


def attention():
    """nn.MultiheadAttention: q, k and v of every head, which torch keeps in one weight."""
    heads, model = 4, nn.MultiheadAttention(32, 4, batch_first=True)
    ghor.constrain(model, "in_proj_weight", ghor.Stiefel(blocks=(3, heads)))
    x, y = torch.randn(2, 16, 10, 32)
    yield train(model, lambda m: (m(x, x, x)[0] - y).square().mean())
    q, k, v = model.in_proj_weight[:32], model.in_proj_weight[32:64], model.in_proj_weight[64:]
    yield [W[8 * h : 8 * h + 8] for W in (q, k, v) for h in range(heads)]


def bert():
    """Hugging Face BERT: query, key and value of every head of every layer."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **small))
    names = [f"bert.encoder.layer.*.attention.self.{kind}.weight" for kind in ("query", "key", "value")]
    ghor.constrain(model, names, ghor.Stiefel(blocks=4))
    ids = torch.randint(50, (32, 12))
    yield train(model, lambda m: m(input_ids=ids, labels=(ids[:, 0] >= 25).long()).loss)
    attentions = [layer.attention.self for layer in model.bert.encoder.layer]
    each = [linear.weight for a in attentions for linear in (a.query, a.key, a.value)]
    yield [W[8 * h : 8 * h + 8] for W in each for h in range(4)]


def llama():
    """Hugging Face Llama with grouped queries: 4 heads of queries, 2 of keys and values, 8 rows each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_attention_heads=4, num_key_value_heads=2, **small)
    )
    ghor.constrain(model, "*.self_attn.[qkv]_proj.weight", lambda name, p: ghor.Stiefel(blocks=len(p) // 8))
    ids = torch.randint(50, (16, 12))
    yield train(model, lambda m: m(input_ids=ids, labels=ids).loss)
    each = [getattr(layer.self_attn, f"{kind}_proj").weight for layer in model.model.layers for kind in "qkv"]
    yield [W[8 * h : 8 * h + 8] for W in each for h in range(len(W) // 8)]


def lstm():
    """nn.LSTM: the recurrent matrix of each of the four gates is a rotation, in both layers."""
    model = nn.LSTM(8, 16, num_layers=2)
    ghor.constrain(model, "weight_hh_l*", ghor.SpecialOrthogonal(blocks=4))
    x, y = torch.randn(20, 8, 8), torch.randn(20, 8, 16)
    yield train(model, lambda m: (m(x)[0] - y).square().mean())
    yield [W[16 * g : 16 * g + 16] for W in (model.weight_hh_l0, model.weight_hh_l1) for g in range(4)]


def gru():
    """nn.GRU: three gates."""
    model = nn.GRU(8, 16)
    ghor.constrain(model, "weight_hh_l0", ghor.SpecialOrthogonal(blocks=3))
    x, y = torch.randn(20, 8, 8), torch.randn(20, 8, 16)
    yield train(model, lambda m: (m(x)[0] - y).square().mean())
    yield [model.weight_hh_l0[16 * g : 16 * g + 16] for g in range(3)]


def convolution():
    """nn.Conv2d: the kernel as one matrix, out x (in kh kw), with orthonormal rows."""
    model = nn.Conv2d(4, 12, 3)
    ghor.constrain(model, "weight", ghor.Stiefel(flatten=3))
    x, y = torch.randn(8, 4, 9, 9), torch.randn(8, 12, 7, 7)
    yield train(model, lambda m: (m(x) - y).square().mean())
    yield [model.weight.reshape(12, 36)]


def embedding():
    """nn.Embedding with padding: rows of length one, and a row of zeros that stays zero."""
    model = nn.Embedding(40, 16, padding_idx=0)
    ghor.constrain(model, "weight", ghor.Sphere())
    ids, y = torch.randint(40, (64, 5)), torch.randn(64, 5, 16)
    yield train(model, lambda m: (m(ids) - y).square().mean())
    assert not model.weight[0].any(), "the padding row has moved"
    yield [row[:, None] for row in model.weight[1:]]


if __name__ == "__main__":
    for make in (attention, bert, llama, lstm, gru, convolution, embedding):
        torch.manual_seed(0)
        try:
            (first, last), blocks = make()
        except ImportError as error:
            print(f"{make.__name__:12} skipped: {error}")
            continue
        worst = off(blocks)
        print(
            f"{make.__name__:12} loss {first:.3f} -> {last:.3f}, {len(blocks):2} blocks, at most "
            f"{worst:.1e} off"
        )
        assert worst <= BOUND
        assert last < first
