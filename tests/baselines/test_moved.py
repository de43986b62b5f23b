"""What has moved from `ghor.nn` and `ghor.baselines` to ghor_lab is found by imports and by old pickles."""

import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import ghor
import ghor.baselines
import ghor.nn

pytest.importorskip("ghor_lab")

FORMER = {
    "Block": "ghor.nn.vision_transformer",
    "VisionTransformer": "ghor.nn.vision_transformer",
    "SymplecticAutoencoder": "ghor.nn.symplectic_autoencoder",
    "AdamSO": "ghor.baselines.kong2022",
    "AdamStiefel": "ghor.baselines.kong2022",
    "CheapOrthogonal": "ghor.baselines.lezcano2019",
    "Trivialization": "ghor.baselines.lezcano2019",
    "CayleyAdam": "ghor.baselines.li2020",
    "CayleySGD": "ghor.baselines.li2020",
    "ManifoldMuon": "ghor.baselines.manifold_muon",
    "QRAdam": "ghor.baselines.qr_adam",
    "SoftConstraintAdam": "ghor.baselines.soft_constraint",
}


def as_in_0_1_0(value):
    """A pickle in which classes have the modules and names of version 0.1.0; protocol 2 has them as text."""
    saved = pickle.dumps(value, protocol=2).replace(b"\nTransformerBlock\n", b"\nBlock\n")

    def former(match):
        return b"c" + FORMER[match[1].decode()].encode() + b"\n" + match[1] + b"\n"

    return re.sub(rb"cghor_lab\.[a-z0-9_.]+\n(\w+)\n", former, saved)


@pytest.mark.parametrize("name", FORMER)
def test_pickles_find_what_has_moved(name, gen):
    """In this process, and in one that has imported nothing of it before."""
    cls = getattr(ghor.nn if ".nn." in FORMER[name] else ghor.baselines, name)
    if name == "SymplecticAutoencoder":
        value = cls(upscale=2, encoder_layers=1, decoder_layers=1, decoder_output_layers=1)
    elif issubclass(cls, nn.Module):
        value = cls(blocks=1) if name == "VisionTransformer" else cls(6, 2, ghor.Stiefel(), "dim")
    else:
        value = cls([nn.Parameter(ghor.SpecialOrthogonal().random(3, 3, generator=gen))])
    saved = as_in_0_1_0(value)
    assert b"ghor_lab" not in saved
    assert FORMER[name].encode() in saved
    copied = pickle.loads(saved)
    assert type(copied) is cls
    if isinstance(value, nn.Module):
        torch.testing.assert_close(copied.state_dict(), value.state_dict(), rtol=0, atol=0)


def test_in_a_new_process_and_without_the_lab(tmp_path):
    """Unpickling imports the former module first; where ghor_lab is missing, the error says so."""
    (tmp_path / "model.pkl").write_bytes(as_in_0_1_0(ghor.nn.VisionTransformer(blocks=1)))
    script = (
        "import pickle, sys\n"
        f"load = lambda: pickle.load(open({str(tmp_path / 'model.pkl')!r}, 'rb'))\n"
        "print(type(load()).__name__)\n"
        "for name in [m for m in sys.modules if m.startswith('ghor_lab')]: del sys.modules[name]\n"
        "sys.modules['ghor_lab'] = None\n"
        "try: load()\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, error = done.stdout.splitlines()
    assert first == "VisionTransformer"
    assert re.match(r"ghor\.nn\.\w+ has moved to ghor_lab, which is not installed: it comes with", error)


def test_names_that_never_were():
    for package in (ghor.nn, ghor.baselines):
        with pytest.raises(AttributeError, match=rf"{package.__name__} has no Nothing"):
            _ = package.Nothing
