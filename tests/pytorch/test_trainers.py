"""Trainers: the examples run as they are, and a run that was broken off goes on to the same bits."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers.ranks import forks, into_a_file
from torch.multiprocessing import start_processes

import ghor
from ghor.adapters import LowRank, Rotation, adapt

EXAMPLES = Path(__file__).parents[2] / "examples"

# what Lightning says and what it calls says: of torch's pytree, and, on machines with more cores than here,
# of workers
lightning_warns = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
)


def start(example):
    """Run an example in this process, which has most imports already; its names."""
    return names(example, "__main__")


def names(example, run_name=None):
    """Its names without the run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name=run_name or example)


def outcome(printed):
    """The losses and distances that an example printed."""
    losses = [float(x) for x in re.findall(r"^(?:step \d+: )?loss (\S+)$", printed, re.MULTILINE)]
    return losses, [float(x) for x in re.findall(r"Stiefel\(\) +(\S+)", printed)]


def same(a, b):
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


# a weight in float32 stays within 2e-6
FLOAT32 = 2e-6


# -- Lightning ---------------------------------------------------------------------------------------------


@lightning_warns
def test_lightning(capsys):
    pytest.importorskip("pytorch_lightning")
    start("lightning_module")
    (loss,), (distance,) = outcome(capsys.readouterr().out)
    assert loss < 0.5
    assert distance <= FLOAT32


@lightning_warns
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_resumes(precision, tmp_path):
    pl = pytest.importorskip("pytorch_lightning")
    example = names("lightning_module")
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )

    def fit(epochs, **options):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = example["Classifier"]()
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            precision=precision,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(model, example["data"], **options)
        return model, trainer

    model, _ = fit(6)
    first, trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = fit(6, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    same(resumed, model)
    assert not torch.equal(resumed.net[0].weight, first.net[0].weight)
    assert isinstance(trainer.optimizers[0], ghor.optim.AdamW)
    assert ghor.Stiefel().residual(resumed.net[0].weight.detach()) <= FLOAT32


# -- Hugging Face ------------------------------------------------------------------------------------------


def test_hugging_face_trainer(capsys):
    pytest.importorskip("transformers")
    start("hf_trainer")
    (loss,), (distance,) = outcome(capsys.readouterr().out)
    assert loss < 0.3  # ln 2 = 0.69 is chance
    assert distance <= FLOAT32


def arguments_of(folder, steps, batch, save):
    """Of a Hugging Face trainer that runs on the CPU and says nothing."""
    import transformers

    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "lr_scheduler_type": "constant"}
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch, save_steps=save, **quiet
    )


@pytest.mark.parametrize("given", ["a class", "an optimizer"])
def test_hugging_face_trainer_resumes(given, tmp_path):
    transformers = pytest.importorskip("transformers")
    models = []
    for steps, resume in ((8, None), (4, None), (8, tmp_path / "4" / "checkpoint-4")):
        example = names("hf_trainer")
        model = example["model"]
        arguments = arguments_of(tmp_path / str(steps), steps, batch=32, save=4)
        if given == "a class":
            options = {"optimizer_cls_and_kwargs": (ghor.optim.AdamW, {"lr": 1e-2})}
        else:
            options = {"optimizers": (ghor.optim.AdamW(model, lr=1e-2), None)}
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=example["data"], **options)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        spaces = [g["space"] for g in trainer.optimizer.param_groups]
        assert any(ghor.Stiefel() in (s if isinstance(s, tuple) else (s,)) for s in spaces)
        models.append(model)
    same(models[2], models[0])
    weight = models[2].bert.encoder.layer[0].attention.output.dense.weight
    assert not torch.equal(weight, models[1].bert.encoder.layer[0].attention.output.dense.weight)
    assert ghor.Stiefel().residual(weight.detach()) <= FLOAT32


def test_hugging_face_trainer_resumes_with_adapters(tmp_path):
    transformers = pytest.importorskip("transformers")
    models = []
    data = [{"input_ids": torch.arange(6) + i % 3, "labels": i % 3} for i in range(16)]
    for steps, resume in ((4, None), (2, None), (4, str(tmp_path / "2" / "checkpoint-2"))):
        torch.manual_seed(0)
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.BertConfig(vocab_size=9, max_position_embeddings=8, num_labels=3, **small)
        model = transformers.BertForSequenceClassification(config)
        adapt(model, ["query"], Rotation(8, "both"), train=["classifier.*"])
        adapt(model, ["query", "value"], LowRank(2), "low", train=["classifier.*"])
        arguments = arguments_of(tmp_path / str(steps), steps, batch=8, save=2)
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            optimizer_cls_and_kwargs=(ghor.optim.AdamW, {"lr": 1e-2}),
        )
        trainer.train(resume_from_checkpoint=resume)
        models.append(model)
    torch.testing.assert_close(models[2].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    R = models[2].bert.encoder.layer[0].attention.self.query.parts["default"].R
    assert not torch.equal(R, models[1].bert.encoder.layer[0].attention.self.query.parts["default"].R)
    assert ghor.SpecialOrthogonal().residual(R.detach().double()).max() <= FLOAT32


# -- Accelerate --------------------------------------------------------------------------------------------


def test_accelerate(capsys, tmp_path):
    pytest.importorskip("accelerate")
    example = start("accelerate_loop")
    (loss,), (distance,) = outcome(capsys.readouterr().out)
    assert loss < 0.5
    assert distance <= FLOAT32
    accelerator, model, optimizer, data = (example[n] for n in ("accelerator", "model", "optimizer", "data"))

    def run():
        for batch, target in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(batch), target))
            optimizer.step()
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    accelerator.save_state(str(tmp_path))
    once = run()
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(run(), once, rtol=0, atol=0)


# -- plain torch -------------------------------------------------------------------------------------------


def test_lora(capsys):
    example = start("lora")
    losses, distances = outcome(capsys.readouterr().out)
    assert losses[-1] < 1e-4 * losses[0]
    assert max(distances) <= FLOAT32
    assert len(distances) == 2
    layer, target = example["layer"], example["target"]
    update = layer.weight - layer.parametrizations.weight.original
    s = layer.parametrizations.weight[0].s.abs().sort(descending=True)[0]
    # s are the singular values of the update, computed in float32 from numbers of order ten
    assert (torch.linalg.svdvals(update)[:4] - s).abs().max() < 1e-4
    assert (layer.weight - target.weight).abs().max() < 0.1
    assert not layer.parametrizations.weight.original.requires_grad


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_two_processes(example, capsys, monkeypatch, tmp_path):
    """They are forks, which need not import everything."""
    printed = tmp_path / "printed"

    def spawn(function, args, nprocs):
        start_processes(into_a_file, (printed, function, args), nprocs, start_method="forkserver")

    forks()
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    start(example)
    losses, distances = outcome(printed.read_text() + capsys.readouterr().out)
    assert losses[-1] < 0.3 * losses[0]
    assert len(distances) == {"ddp": 1, "fsdp": 2}[example]
    assert max(distances) <= FLOAT32
