"""The callback for the Hugging Face Trainer: the same numbers as on its checkpoints, also when a run is resumed."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import MissingExtra
from netkin.integrations.huggingface import dynamics_callback

pytestmark = [
    pytest.mark.slow,
    # the Trainer's own, on machines without an accelerator
    pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true.*"),
    pytest.mark.filterwarnings("ignore:.*`is_pin_memory_available`.*"),
]
PROBE = {"features": torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), "labels": torch.zeros(24).long()}


class Classifier(nn.Module):
    """Takes keywords and gives a mapping with the loss, as the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, features, labels=None):
        logits = self.net(features)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


def trainer(folder, callback, epochs, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = [
        {"features": torch.randn(4, generator=draw), "labels": torch.randint(2, (), generator=draw)} for _ in range(24)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=8, learning_rate=0.1,
        report_to="none", disable_tqdm=True, save_strategy="epoch", use_cpu=True, seed=0, lr_scheduler_type="constant",
        logging_strategy="no", **options,
    )  # fmt: skip
    return transformers.Trainer(model=Classifier(), args=arguments, train_dataset=data, callbacks=[callback])


def test_training_is_recorded_and_goes_on_from_a_checkpoint(tmp_path, capsys):
    told = []
    whole = dynamics_callback(PROBE, layers="net.*", measures="cka", log=lambda step, values: told.append(step))
    trainer(tmp_path / "run", whole, 3).train()
    ours = whole.recorder.series()
    assert ours.steps == (0, 3, 6, 9)
    assert told == [3, 6, 9]
    saved = {step: tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors" for step in (3, 6, 9)}
    theirs = nk.dynamics(saved, {"features": PROBE["features"]}, "cka", layers="net.*", model=Classifier())
    np.testing.assert_allclose(ours.own()[1:], theirs.own(), atol=1e-6)

    again = dynamics_callback(PROBE, layers="net.*", measures="cka")
    (tmp_path / "run" / "checkpoint-9").rename(tmp_path / "unused")
    trainer(tmp_path / "run", again, 3).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert again.recorder.steps == (0, 3, 6, 9)
    np.testing.assert_allclose(again.recorder.series().to_numpy(), ours.to_numpy(), atol=1e-6)


def test_every_counts_steps(tmp_path, capsys):
    callback = dynamics_callback(PROBE, layers="net.*", measures="cka", every=2)
    trainer(tmp_path, callback, 1).train()
    assert callback.recorder.steps == (0, 2, 3)


def test_without_transformers_the_extra_is_named(monkeypatch):
    from netkin.integrations import huggingface

    huggingface._class.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        MissingExtra, match="dynamics_callback needs 'transformers' .*`pip install 'netkin.hf.'` brings it"
    ):
        dynamics_callback(PROBE)
