"""A model leaves by ONNX with the outputs that it has here; skipped where the packages are missing."""

import warnings

import pytest
import torch
from helpers.table import randn
from torch import nn

import ghor
import ghor.adapters

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_both_exporters(dynamo, released, tmp_path, gen):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        ghor.constrain(model, "0.weight", ghor.Stiefel())
        ghor.constrain_multiples(model, "2.weight", ghor.Stiefel())
        ghor.adapters.adapt(model, "4", ghor.adapters.Rotation(8), train="*")
        model[4].parts["default"].R.data.copy_(ghor.SpecialOrthogonal().random(4, 8, 8))
    x = randn((5, 16), gen, torch.float32)
    if released:
        ghor.release(model)
    expected = model.eval()(x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: deprecations of and within the exporters
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected)
    if released:
        assert {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node} == {"Gemm", "Relu"}
