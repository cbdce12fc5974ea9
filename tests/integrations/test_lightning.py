"""The callback for Lightning: the same numbers as a plain loop, in checkpoints and out, for both of its packages."""

import importlib
import importlib.util
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import MissingExtra, UnknownName
from netkin.integrations.lightning import PACKAGES, dynamics_callback

pytestmark = [
    pytest.mark.slow,
    # Lightning's advice about the loader, and about loggers of its own
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*fit_loop.* is not configurable.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
PROBE = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


def pieces(package):
    """Return Lightning, a module to train and its data: 3 batches an epoch."""
    pytest.importorskip(package)
    pl = importlib.import_module(package)

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 4, generator=draw), torch.randint(2, (24,), generator=draw))
    return pl, Lit(), DataLoader(data, batch_size=8)


def trainer(pl, folder, *callbacks, epochs=3, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet["log_every_n_steps"] = 1
    options = quiet | {"enable_checkpointing": False} | options
    return pl.Trainer(default_root_dir=folder, max_epochs=epochs, callbacks=list(callbacks), **options)


@pytest.mark.parametrize("package", PACKAGES)
def test_training_is_recorded_once_an_epoch(package, tmp_path):
    pl, module, loader = pieces(package)
    saved = {}

    class Keep(pl.Callback):
        def on_train_start(self, trainer, module):
            saved[trainer.global_step] = {name: value.clone() for name, value in module.net.state_dict().items()}

        def on_train_epoch_end(self, trainer, module):
            self.on_train_start(trainer, module)

    callback = dynamics_callback(PROBE, model="net", measures="cka")
    trainer(pl, tmp_path, callback, Keep()).fit(module, loader)
    ours = callback.recorder.series()
    assert ours.steps == (0, 3, 6, 9)
    theirs = nk.dynamics(saved, PROBE, "cka", model=module.net)
    np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), atol=1e-6)
    assert isinstance(callback, pl.Callback)


def test_a_resumed_run_goes_on_with_its_probes(tmp_path):
    pl, module, loader = pieces(PACKAGES[0])
    whole = dynamics_callback(PROBE, every=2)
    trainer(pl, tmp_path, whole, epochs=2).fit(module, loader)
    assert whole.recorder.steps == (0, 2, 4, 6)

    pl, module, loader = pieces(PACKAGES[0])
    first, second = dynamics_callback(PROBE, every=2), dynamics_callback(PROBE, every=2)
    half = trainer(pl, tmp_path, first, epochs=1)
    half.fit(module, loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer(pl, tmp_path, second, epochs=2).fit(module, loader, ckpt_path=tmp_path / "half.ckpt")
    assert second.recorder.steps == (0, 2, 3, 4, 6)
    kept = {step: second.recorder.series()[step].to_numpy() for step in whole.recorder.steps}
    for step, comparison in kept.items():
        np.testing.assert_allclose(comparison, whole.recorder.series()[step].to_numpy(), atol=1e-6)


def test_the_numbers_go_to_the_trainers_loggers(tmp_path):
    pl, module, loader = pieces(PACKAGES[0])
    loggers = importlib.import_module(f"{PACKAGES[0]}.loggers")
    callback = dynamics_callback(PROBE, model=lambda lit: lit.net, measures="cka", layers=["0"])
    trainer(pl, tmp_path, callback, logger=loggers.CSVLogger(tmp_path, name="log")).fit(module, loader)
    lines = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "cka/previous/0" in lines[0]
    assert len(lines) == 4


def test_the_callback_can_be_pickled():
    pytest.importorskip(PACKAGES[0])
    callback = pickle.loads(pickle.dumps(dynamics_callback(PROBE, measures="cka")))
    assert type(callback).__name__ == "DynamicsCallback"
    assert callback.recording.options == {"measures": "cka"}
    assert callback.state_dict() == {}


def test_a_model_that_is_not_there_is_refused(tmp_path):
    pl, module, loader = pieces(PACKAGES[0])
    with pytest.raises(UnknownName, match="`model='backbone'` finds no module in Lit"):
        trainer(pl, tmp_path, dynamics_callback(PROBE, model="backbone")).fit(module, loader)


def test_without_lightning_the_extra_is_named(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtra, match="dynamics_callback needs 'lightning.pytorch' .*pip install 'netkin.lightning.'"
    ):
        dynamics_callback(PROBE)
