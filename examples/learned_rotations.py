"""Learned rotations for a 4-bit language model: R1 of the hidden size, R2 of each head, and scales.

    python examples/learned_rotations.py              # all methods, 5 seeds: minutes on two idle cores
    python examples/learned_rotations.py --seeds 1    # a look

Rotating the hidden states does not change what a Llama computes, but it spreads outliers, so that less is
lost when weights and activations are rounded to 4 bits. QuaRot takes random Hadamard matrices, SpinQuant
learns the rotations by Cayley SGD, OSTQuant learns scales beside them with Riemannian Adam. Here a small
Llama of Hugging Face's transformers is trained on the bytes of Python's standard library. Then, from random
Hadamard matrices,

    R1  (N, N)                   hidden states h R1: embedding and head E R1;  q, k, v, gate, up: W R1;
                                 o, down: R1^T W
    R2  (layers, heads, d, d)    values v R2, head by head: v: R2^T W;  o: W R2
    s   (layers, intermediate)   up: diag(1/s) W;  down: W diag(s)

are learned for the loss of the quantized model, with straight-through gradients; or, by `ghor.minimize`,
which needs no learning rate, for the kurtosis of the rotated activations. In the end all of it is folded into
the weights. The model and finished runs are kept in out/learned_rotations, and are not computed again.
"""

import argparse
import copy
import functools
import hashlib
import json
import math
import random
import sysconfig
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
import transformers
from torch import nn
from torch.func import functional_call

import ghor
from ghor_lab.baselines import SGDG
from ghor_lab.train import machine, now

try:
    import geoopt
except ImportError:
    geoopt = None

SO = ghor.SpecialOrthogonal()


@dataclass(frozen=True)
class Options:
    hidden: int = 128
    heads: int = 4
    layers: int = 3
    intermediate: int = 384
    context: int = 128
    pretrain: int = 800  # steps, of 16 windows
    steps: int = 100  # that the rotations are learned for, of 8 windows
    held_out: int = 64  # windows
    calibration: int = 16  # windows of the kurtosis objective
    large: int = 512  # the size for which drift is measured by itself


# -- the model -----------------------------------------------------------------------------------------------


@functools.cache
def text():
    """The bytes of the standard library's top-level modules: to train with, and one file in ten held out."""
    parts = [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data = path.read_bytes()
        parts[hashlib.sha256(path.name.encode()).digest()[0] < 26].append(data)
    return [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts]


def windows(data, count, length, gen):
    at = torch.randint(len(data) - length, (count,), generator=gen)
    return torch.stack([data[i : i + length] for i in at]).long()


def llama(o):
    """A model with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=o.hidden,
        intermediate_size=o.intermediate,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        max_position_embeddings=o.context,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model, ids):
    logits = model(ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def pretrained(o, cache, say=print):
    """The trained model, from a file if there is one; the weights of norms are folded into its layers."""
    file = cache / f"model-{digest(o)}.pt"
    torch.manual_seed(0)
    model = llama(o)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.requires_grad_(False).eval()
    gen = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=o.pretrain)
    for step in range(o.pretrain):
        optimizer.zero_grad()
        loss = loss_of(model, windows(text()[0], 16, o.context, gen))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            say(f"pretraining, step {step} of {o.pretrain}: {loss.item():.3f}", flush=True)
    with torch.no_grad():
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            for norm, linears in (
                (layer.input_layernorm, (a.q_proj, a.k_proj, a.v_proj)),
                (layer.post_attention_layernorm, (m.gate_proj, m.up_proj)),
            ):
                for linear in linears:
                    linear.weight *= norm.weight
                norm.weight.fill_(1)
        model.lm_head.weight *= model.model.norm.weight
        model.model.norm.weight.fill_(1)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.requires_grad_(False).eval()


# -- 4 bits --------------------------------------------------------------------------------------------------


def rounded(x, scale, zero=0.0, low=-8, high=7):
    """x rounded to 16 levels; the gradient goes straight through."""
    return x + (((x / scale).round().sub(zero).clamp(low, high) + zero) * scale - x).detach()


def quantized_weight(W):
    """A scale for each row, symmetric."""
    return rounded(W, W.detach().abs().amax(1, keepdim=True) / 7)


def quantized_input(x):
    """A scale and a zero for each token."""
    low, high = x.detach().amin(-1, keepdim=True), x.detach().amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8)
    return rounded(x, scale, (low / scale).round(), 0, 15)


# -- rotations and scales ------------------------------------------------------------------------------------


def hadamard(*shape, gen):
    """Random Hadamard matrices (..., N, N) of determinant 1, N a power of two: H diag(+-1)/sqrt N."""
    N = shape[-1]
    H = torch.ones(1, 1)
    while len(H) < N:
        H = torch.kron(H, torch.tensor([[1.0, 1], [1, -1]]))
    R = H / math.sqrt(N) * torch.randint(0, 2, (*shape[:-2], 1, N), generator=gen).mul(2).sub(1)
    R[..., 0] *= torch.linalg.det(R.double()).sign().float()[..., None]
    return R


class Rotated(nn.Module):
    """A frozen Llama with R1, R2 and s folded in; its value is the loss with weights and inputs in 4 bits."""

    def __init__(self, model, start="hadamard", seed=0):
        super().__init__()
        config, gen = model.config, torch.Generator().manual_seed(seed)
        N, H, L = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        d = N // H
        if start == "hadamard":
            R1, R2 = hadamard(N, N, gen=gen), hadamard(L, H, d, d, gen=gen)
        else:
            R1, R2 = torch.eye(N), torch.eye(d).repeat(L, H, 1, 1)
        self.R1, self.R2 = nn.Parameter(R1), nn.Parameter(R2)
        self.log_s = nn.Parameter(torch.zeros(L, config.intermediate_size))
        ghor.constrain(self, "R1", SO)
        ghor.constrain(self, "R2", SO)
        self.held = [copy.deepcopy(model)]  # in a list: not a submodule, so nothing of it is trained or moved
        for name, module in self.held[0].named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, args: (quantized_input(args[0]), *args[1:]))

    def weights(self):
        """The folded weights, by name: those of a plain Llama that computes the same."""
        W, R1 = dict(self.held[0].named_parameters()), self.R1
        heads = self.R2.shape[1]
        out = {n: W[n] @ R1 for n in ("model.embed_tokens.weight", "lm_head.weight")}
        for i, (R2, s) in enumerate(zip(self.R2, self.log_s.exp(), strict=True)):
            at = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            for n in (f"{at[0]}.q_proj.weight", f"{at[0]}.k_proj.weight", f"{at[1]}.gate_proj.weight"):
                out[n] = W[n] @ R1
            out[f"{at[1]}.up_proj.weight"] = W[f"{at[1]}.up_proj.weight"] @ R1 / s[:, None]
            out[f"{at[1]}.down_proj.weight"] = R1.mT @ W[f"{at[1]}.down_proj.weight"] * s
            v, o = W[f"{at[0]}.v_proj.weight"] @ R1, R1.mT @ W[f"{at[0]}.o_proj.weight"]
            out[f"{at[0]}.v_proj.weight"] = (R2.mT @ v.unflatten(0, (heads, -1))).flatten(0, 1)
            o = o.unflatten(1, (heads, -1)).transpose(0, 1) @ R2  # (heads, N, d)
            out[f"{at[0]}.o_proj.weight"] = o.transpose(0, 1).flatten(1)
        return out

    def forward(self, ids):
        W = {n: quantized_weight(w) if ".layers." in n else w for n, w in self.weights().items()}
        logits = functional_call(self.held[0], W, (ids,), {"use_cache": False}).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def merged(self, model):
        """A plain Llama with everything folded in, in full precision."""
        plain = copy.deepcopy(model)
        with torch.no_grad():
            for n, w in self.weights().items():
                plain.get_parameter(n).copy_(w)
        return plain


def drift(*rotations):
    """max ||R^T R - I||_F, in float64."""
    off = 0.0
    for R in rotations:
        R = R.detach().double()
        off = max(off, float((R.mT @ R - torch.eye(R.shape[-1])).norm(dim=(-2, -1)).max()))
    return off


# -- methods: optimizers of a Rotated -----------------------------------------------------------------------

SCALES = 1e-2  # the learning rate of s, the same with all methods


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [g for opt in optimizers for g in opt.param_groups]

    def step(self):
        for opt in self.optimizers:
            opt.step()


def sgdg(r, lr):
    return Both(SGDG([r.R1, r.R2], lr=lr), torch.optim.Adam([r.log_s], lr=SCALES))


def geoopt_adam(r, lr):
    for name in ("R1", "R2"):
        setattr(r, name, geoopt.ManifoldParameter(getattr(r, name).detach().clone(), geoopt.Stiefel()))
    return geoopt.optim.RiemannianAdam(
        [{"params": [r.R1, r.R2], "lr": lr}, {"params": [r.log_s], "lr": SCALES}], lr=lr
    )


def groups(r, lr):
    return [{"params": [r.R1, r.R2], "lr": lr}, {"params": [r.log_s], "lr": SCALES}]


# name: how it is built, the learning rates that --sweep tries with a seed of its own, and the best of them
METHODS = {
    "SGDG (SpinQuant)": (sgdg, (1.5,), 1.5),  # the published rate
    "SGDG, best rate": (sgdg, (0.5, 1.5, 5, 15), 15),
    "geoopt Adam (OSTQuant)": (geoopt_adam, (0.01, 0.03, 0.1, 0.3), 0.03),
    "ghor SGD": (lambda r, lr: ghor.optim.SGD(groups(r, lr), max_angle=0.1), (0.5, 1.5, 5, 50), 50),
    "ghor Adam": (lambda r, lr: ghor.optim.Adam(groups(r, lr)), (0.0025, 0.005, 0.01, 0.02), 0.01),
    "ghor Muon": (
        lambda r, lr: ghor.optim.Muon(groups(r, lr), adamw={"lr": SCALES, "weight_decay": 0.0}),
        (0.01, 0.02, 0.05, 0.1),
        0.01,
    ),
}
if geoopt is None:
    del METHODS["geoopt Adam (OSTQuant)"]
NAMES = ["no rotation", "random Hadamard", *METHODS, "ghor minimize"]


def learn(r, optimizer, o, seed):
    """Learn for o.steps batches, with rates that fall linearly to 0; seconds, and those of the optimizer."""
    gen = torch.Generator().manual_seed(1000 + seed)
    rates, began, inside = [g["lr"] for g in optimizer.param_groups], time.perf_counter(), 0.0
    for step in range(o.steps):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * (1 - step / o.steps)
        r.zero_grad()
        r(windows(text()[0], 8, o.context, gen)).backward()
        at = time.perf_counter()
        optimizer.step()
        inside += time.perf_counter() - at
    return time.perf_counter() - began, inside


def kurtosis(model, o):
    """The objective of R1 and R2: the mean fourth power of rotated activations of mean square 1.

    Rotations keep the mean square of a vector, so this is its mean kurtosis: smooth, and without noise.
    """
    seen, hooks = {1: [], 2: []}, []

    def look(which, width):
        def hook(module, args, y):
            x = y.flatten(0, -2).unflatten(-1, (-1, width)).transpose(0, 1)[:, ::4]  # (parts, tokens, width)
            seen[which].append(x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6))

        return hook

    d = o.hidden // o.heads
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(norm.register_forward_hook(look(1, o.hidden)))
        hooks.append(layer.self_attn.v_proj.register_forward_hook(look(2, d)))
    gen = torch.Generator().manual_seed(7)
    model(windows(text()[0], o.calibration, o.context, gen), use_cache=False)
    for hook in hooks:
        hook.remove()
    X, V = torch.cat(seen[1], 1)[0], torch.stack(seen[2])  # (tokens, N), (layers, heads, tokens, d)
    return lambda R: (X @ R["R1"]).pow(4).mean() + (V @ R["R2"]).pow(4).mean()


def solve(r, model, o):
    """R1 and R2 of least kurtosis, by ghor.minimize; s stays 1."""
    start = {"R1": r.R1.detach(), "R2": r.R2.detach()}
    result = ghor.minimize(kurtosis(model, o), start, SO, max_iterations=o.steps)
    with torch.no_grad():
        r.R1.copy_(result.x["R1"])
        r.R2.copy_(result.x["R2"])
    return result


# -- what is measured ----------------------------------------------------------------------------------------


@torch.no_grad()
def held_out(loss, o):
    """The mean loss over windows of the text that was held out."""
    gen = torch.Generator().manual_seed(99)
    return float(
        torch.stack([loss(windows(text()[1], 16, o.context, gen)) for _ in range(o.held_out // 16)]).mean()
    )


@torch.no_grad()
def changed(r, model, o):
    """The largest change of a logit by rotations and scales in full precision: rounding, and drift."""
    ids = windows(text()[1], 4, o.context, torch.Generator().manual_seed(5))
    return float((r.merged(model)(ids).logits - model(ids).logits).abs().max())


def run(name, seed, model, o, lr=None):
    """One row: a method from one start."""
    r = Rotated(model, "eye" if name == "no rotation" else "hadamard", seed)
    row = {"name": name, "seed": seed, "steps": 0, "seconds": 0.0, "optimizer": 0.0, "lr": lr}
    if name in METHODS:
        build, _, rate = METHODS[name]
        row["lr"] = lr = rate if lr is None else lr
        random.seed(seed)  # SGDG orthonormalises at random
        row["seconds"], row["optimizer"] = learn(r, build(r, lr), o, seed)
        row["steps"] = o.steps
    elif name == "ghor minimize":
        result = solve(r, model, o)
        row |= {"steps": result.iterations, "seconds": result.seconds, "kurtosis": result.value}
    return row | {"loss": held_out(r, o), "drift": drift(r.R1, r.R2), "changed": changed(r, model, o)}


def drift_of(name, o, steps=100):
    """Drift after 100 float32 steps at a size of its own, on the kurtosis of vectors with outliers."""
    gen = torch.Generator().manual_seed(0)
    X = torch.randn(64, o.large, generator=gen)
    X[:, :4] *= 20
    X /= X.square().mean(-1, keepdim=True).sqrt()
    r = nn.Module()
    r.R1 = nn.Parameter(hadamard(o.large, o.large, gen=gen))
    r.R2 = nn.Parameter(hadamard(2, 32, 32, gen=gen))
    r.log_s = nn.Parameter(torch.zeros(1))
    ghor.constrain(r, "R1", SO)
    ghor.constrain(r, "R2", SO)
    build, _, lr = METHODS[name]
    optimizer = build(r, lr)
    for _ in range(steps):
        r.zero_grad()
        ((X @ r.R1).pow(4).mean() + r.R2.pow(4).mean() + r.log_s.square().sum()).backward()
        optimizer.step()
    return drift(r.R1)


def replica(rank, folder, o, names):
    """One of two processes that learn the same rotations, each from its own text: do they stay equal?"""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model, equal = pretrained(o, folder), {}
    for name in names:
        r = Rotated(model)
        build, _, lr = METHODS[name]
        optimizer = build(r, lr)
        parallel, gen = nn.parallel.DistributedDataParallel(r), torch.Generator().manual_seed(rank)
        for _ in range(10):
            parallel.zero_grad()
            parallel(windows(text()[0], 4, o.context, gen)).backward()
            optimizer.step()
        mine = torch.cat([p.detach().flatten().view(torch.int32) for p in (r.R1, r.R2, r.log_s)])
        both = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(both, mine)
        equal[name] = torch.equal(*both)
    if rank == 0:
        (folder / "replicas.json").write_text(json.dumps(equal))
    torch.distributed.destroy_process_group()


def replicas_equal(names, o, folder):
    (folder / "store").unlink(missing_ok=True)
    torch.multiprocessing.spawn(replica, (folder, o, names), 2)
    return json.loads((folder / "replicas.json").read_text())


# -- all of it -----------------------------------------------------------------------------------------------


def digest(o):
    return hashlib.sha256(repr(o).encode()).hexdigest()[:12]


class Results:
    """Results by key, kept in a file, so that a run that was broken off goes on."""

    def __init__(self, file):
        self.file, self.rows = file, json.loads(file.read_text()) if file.exists() else {}

    def get(self, key, compute):
        if key not in self.rows:
            self.rows[key] = compute()
            self.file.write_text(json.dumps(self.rows, indent=1))
        return self.rows[key]


def summary(rows):
    """Runs of one method, by seed, as one row."""
    losses = [r["loss"] for r in rows]
    return {
        "name": rows[0]["name"],
        "lr": rows[0]["lr"],
        "steps": max(r["steps"] for r in rows),
        "losses": losses,
        "loss": mean(losses),
        "spread": stdev(losses) if len(losses) > 1 else 0.0,
        "seconds": mean(r["seconds"] for r in rows),
        "optimizer_ms": 1e3 * mean(r["optimizer"] for r in rows) / max(1, rows[0]["steps"]),
        "drift": max(r["drift"] for r in rows),
        "changed": max(r["changed"] for r in rows),
    }


def table(record):
    def line(*cells):
        return "{:24}{:>8}{:>8}{:>7}{:>7}{:>9}{:>9}{:>9}{:>9}".format(*cells)

    lines = [
        line(
            "",
            "loss",
            "spread",
            "steps",
            "s",
            "drift",
            "changed",
            f"N = {record['options']['large']}",
            "replicas",
        )
    ]
    for r in record["rows"]:
        numbers = f"{r['loss']:.4f}", f"{r['spread']:.4f}", r["steps"], f"{r['seconds']:.1f}"
        off = [f"{r[key]:.1e}" if key in r else "" for key in ("drift", "changed", "drift_large")]
        lines.append(
            line(r["name"], *numbers, *off, {True: "equal", False: "differ"}.get(r.get("replicas_equal"), ""))
        )
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="methods with this in their names")
    parser.add_argument("--sweep", action="store_true", help="try the learning rates first: 20 runs more")
    parser.add_argument("--out", type=Path, default=Path("out/learned_rotations"))
    parser.add_argument("--record", type=Path, help="write the record to this file")
    parser.add_argument("--small", action="store_true", help="a model of no use, to see that all of it runs")
    arguments = parser.parse_args(argv)
    o, folder, began = Options(), arguments.out.resolve(), time.perf_counter()
    if arguments.small:
        o = Options(16, 2, 1, 32, 16, pretrain=2, steps=2, held_out=16, calibration=2, large=32)
    folder.mkdir(parents=True, exist_ok=True)
    model = pretrained(o, folder)
    results = Results(folder / f"results-{digest(o)}.json")

    def at_rate(name, seed, lr=None):
        lr = METHODS[name][2] if name in METHODS and lr is None else lr
        row = results.get(f"{name}, lr {lr}, seed {seed}", lambda: run(name, seed, model, o, lr))
        print(
            f"{time.perf_counter() - began:4.0f} s  {name:23} seed {seed:<3} lr {lr or 0:<6g} "
            f"loss {row['loss']:.4f}  drift {row['drift']:.1e}  {row['seconds']:.1f} s",
            flush=True,
        )
        return row

    full = results.get("full", lambda: held_out(functools.partial(loss_of, model), o))
    print(f"{time.perf_counter() - began:4.0f} s  full precision: loss {full:.4f}", flush=True)
    names = [n for n in NAMES if arguments.only in n]
    learned = [n for n in names if n in METHODS]
    sweep = {n: {lr: at_rate(n, 100, lr)["loss"] for lr in METHODS[n][1] if arguments.sweep} for n in learned}
    by_name = {n: [] for n in names}
    for seed in range(arguments.seeds):
        for n in names:
            by_name[n].append(at_rate(n, seed))
    record = {
        "example": "learned_rotations",
        "date": now(),
        "machine": machine(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, geoopt) if m is not None},
        "options": asdict(o) | {"seeds": arguments.seeds, "scales_lr": SCALES},
        "parameters": sum(p.numel() for p in model.parameters()),
        "full": full,
        "sweep": sweep,
        "rows": [summary(rows) for rows in by_name.values()],
    }
    equal = results.get(f"replicas of {learned}", lambda: replicas_equal(learned, o, folder))
    for row in record["rows"]:
        n = row["name"]
        if n in METHODS:
            row["drift_large"] = results.get(f"drift of {n}", lambda n=n: drift_of(n, o))
            row["replicas_equal"] = equal[n]
    print(table(record))
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # geoopt's, of torch.jit
    main()
