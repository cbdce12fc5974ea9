"""Freeze training as callbacks of Lightning and of the Hugging Face Trainer, against the plain loop."""

import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import netkin as nk
from freezing_worlds import Net, data, same, sgd, train, weights
from late_packages import lightning as pl
from late_packages import transformers
from netkin.errors import FileError, InvalidValue, MissingExtra
from netkin.integrations.huggingface import freezing_callback as trainer_callback
from netkin.integrations.lightning import freezing_callback as lightning_callback
from netkin.sources.architectures import seeded

BATCHES = data(8)
SIMILARITY = {"probe": BATCHES[0][0], "threshold": 0.8, "patience": 1, "past": 1, "every": 1}
SCHEDULES = [("linear", {}), ({"conv2": 0.5}, {}), ("similarity", SIMILARITY)]


def plain(schedule, options, prefix=""):
    """Return the weights that the plain loop gives, and what it froze."""
    net = seeded(Net, 0)
    with nk.FreezeTraining(net, schedule, steps=8, **options) as freezing:
        train(net, sgd(net), freezing, BATCHES)
        return weights(net), [prefix + name for name in freezing.frozen]


def with_prefix(schedule, prefix):
    return {prefix + name: at for name, at in schedule.items()} if isinstance(schedule, dict) else schedule


# --- Lightning --------------------------------------------------------------------------------------------------------


def in_lightning():
    """Return the network as a module of Lightning."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = seeded(Net, 0)

        def forward(self, images):
            return self.net(images)

        def training_step(self, batch, number):
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return sgd(self)

    return Module()


def fit(module, callback, folder, epochs=2, **options):
    batches = DataLoader(BATCHES[:4], batch_size=None)  # two epochs of four steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loaders and logs that a test does not need
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, batches, DataLoader(BATCHES[4:5], batch_size=None), **options)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("schedule, options", SCHEDULES, ids=["linear", "fractions", "similarity"])
def test_lightning_trains_as_the_plain_loop_does(tmp_path, schedule, options):
    twice = [*BATCHES[:4], *BATCHES[:4]]
    net = seeded(Net, 0)
    with nk.FreezeTraining(net, schedule, steps=8, **options) as freezing:
        train(net, sgd(net), freezing, twice)
        frozen = [f"net.{name}" for name in freezing.frozen]
    module, callback = in_lightning(), lightning_callback(with_prefix(schedule, "net."), **options)
    seen = []
    callback.on_train_epoch_end = lambda *_: seen.extend(callback.freezing.frozen)
    fit(module, callback, tmp_path)
    assert frozen
    assert callback.freezing.frozen == frozen
    assert seen
    assert same(weights(module.net), weights(net))
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("schedule, options", SCHEDULES[::2], ids=["linear", "similarity"])
def test_lightning_resumes_with_what_was_frozen(tmp_path, schedule, options):
    whole, callback = in_lightning(), lightning_callback(schedule, **options)
    fit(whole, callback, tmp_path)

    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "half.ckpt")
            trainer.should_stop = True

    half = lightning_callback(schedule, steps=8, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=2, min_epochs=1, callbacks=[half, Stop()], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
            enable_checkpointing=False,
        ).fit(in_lightning(), DataLoader(BATCHES[:4], batch_size=None))  # fmt: skip
    resumed, later = in_lightning(), lightning_callback(schedule, **options)
    fit(resumed, later, tmp_path, ckpt_path=tmp_path / "half.ckpt")
    assert half.freezing.frozen
    assert later.freezing.frozen == callback.freezing.frozen
    assert same(weights(resumed.net), weights(whole.net))


@pytest.mark.slow
def test_lightning_gives_the_model_back_after_a_crash(tmp_path):
    module, callback = in_lightning(), lightning_callback({"net.conv1": 0})
    module.training_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, callback, tmp_path)
    assert module.net.conv1.weight.requires_grad


@pytest.mark.slow
def test_the_callback_for_lightning_can_be_pickled():
    pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
    copied = pickle.loads(pickle.dumps(lightning_callback({"net.conv1": 0.5}, steps=8)))
    assert copied.state_key == "FreezeTrainingCallback"  # by which checkpoints know it
    assert (copied.schedule, copied.options) == ({"net.conv1": 0.5}, {"steps": 8})


# --- Hugging Face -----------------------------------------------------------------------------------------------------


class Examples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        images, labels = BATCHES[number // 8]
        return {"images": images[number % 8], "labels": labels[number % 8]}


class WithLoss(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.net = seeded(Net, seed)

    def forward(self, images, labels=None):
        scores = self.net(images)
        return {"logits": scores} if labels is None else {"loss": cross_entropy(scores, labels), "logits": scores}


def trainer(model, callback, folder, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, max_grad_norm=0, report_to=[],
        lr_scheduler_type="constant", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        save_steps=3, dataloader_pin_memory=False, **options,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(Examples(), batch_size=8)

    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return InOrder(
        model, arguments, train_dataset=Examples(), callbacks=[callback], optimizers=(optimizer, constant)
    )  # fmt: skip


def trained(model, callback, folder, resume=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(model, callback, folder, **options).train(resume_from_checkpoint=resume)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("schedule, options", SCHEDULES, ids=["linear", "fractions", "similarity"])
def test_the_trainer_trains_as_the_plain_loop_does(tmp_path, schedule, options):
    expected, frozen = plain(schedule, options, "net.")
    callback = trainer_callback(with_prefix(schedule, "net."), **options)
    model = trained(WithLoss(), callback, tmp_path)
    assert callback.freezing.frozen == frozen
    assert same(weights(model.net), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("schedule, options", SCHEDULES[::2], ids=["linear", "similarity"])
def test_the_trainer_resumes_with_what_was_frozen(tmp_path, schedule, options):
    expected, frozen = plain(schedule, options, "net.")
    trained(WithLoss(), trainer_callback(schedule, **options), tmp_path)
    callback = trainer_callback(schedule, **options)
    model = trained(WithLoss(seed=3), callback, tmp_path, resume=str(tmp_path / "checkpoint-6"))
    assert callback.freezing.frozen == frozen
    assert same(weights(model.net), expected)


@pytest.mark.slow
def test_a_planned_schedule_needs_no_file_of_its_own_to_resume(tmp_path):
    trained(WithLoss(), trainer_callback("linear"), tmp_path)
    (tmp_path / "checkpoint-6" / "freezing.pt").unlink()
    model = trained(WithLoss(seed=3), trainer_callback("linear"), tmp_path, resume=str(tmp_path / "checkpoint-6"))
    assert same(weights(model.net), plain("linear", {})[0])


@pytest.mark.slow
def test_the_similarity_schedule_does(tmp_path):
    trained(WithLoss(), trainer_callback("similarity", **SIMILARITY), tmp_path)
    (tmp_path / "checkpoint-6" / "freezing.pt").unlink()
    with pytest.raises(FileError, match="freezing.pt' is missing, and without it what was frozen is unknown"):
        trained(
            WithLoss(), trainer_callback("similarity", **SIMILARITY), tmp_path, resume=str(tmp_path / "checkpoint-6")
        )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_language_model_is_frozen_block_by_block(tmp_path, checkpointing):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    sentences = [{"input_ids": torch.arange(5), "labels": number % 2} for number in range(24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=6, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", gradient_checkpointing=checkpointing, dataloader_pin_memory=False,
    )  # fmt: skip
    callback, seen = trainer_callback("linear"), []
    callback.on_step_begin = lambda *_, **__: seen.append(callback.freezing.frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.Trainer(model, arguments, train_dataset=sentences, callbacks=[callback]).train()
    layers = [f"bert.encoder.layer.{number}" for number in range(3)]
    assert callback.freezing.groups == layers
    assert seen == [[], [], layers[:1], layers[:1], layers[:2], layers[:2]]
    assert callback.freezing.members(layers[0]) == ["bert.embeddings", layers[0]]


@pytest.mark.slow
def test_several_processes_that_would_wait_are_refused():
    distributed = SimpleNamespace(value="distributed")
    for looks, static, checkpointing in [(False, None, False), (None, None, True), (True, True, False)]:
        arguments = SimpleNamespace(
            parallel_mode=distributed, gradient_checkpointing=checkpointing, ddp_find_unused_parameters=looks,
            ddp_static_graph=static,
        )  # fmt: skip
        with pytest.raises(InvalidValue, match="pass `ddp_find_unused_parameters=True` and no static graph"):
            trainer_callback().on_train_begin(arguments, SimpleNamespace(max_steps=8), None, model=WithLoss())


# --- without them -----------------------------------------------------------------------------------------------------


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    from netkin.integrations import huggingface, lightning

    lightning._class.cache_clear()
    huggingface._class.cache_clear()
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="freezing_callback needs .*`pip install 'netkin.lightning.'`"):
        lightning_callback()
    with pytest.raises(MissingExtra, match="freezing_callback needs .*`pip install 'netkin.hf.'`"):
        trainer_callback()
