"""The CKA sparsity loss as callbacks of Lightning and of the Hugging Face Trainer, against the plain loop."""

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
from late_packages import lightning as pl
from late_packages import transformers
from netkin.errors import FileError, InvalidValue, MissingExtra, UnknownName
from netkin.integrations.huggingface import SPARSITY as FILE
from netkin.integrations.huggingface import sparsity_callback as trainer_callback
from netkin.integrations.lightning import sparsity_callback as lightning_callback
from sparsity_worlds import batches, hooks_on, staged

pytestmark = pytest.mark.slow
DATA = batches(8)
OPTIONS = {"beta": 0.5, "samples": 4, "every": 3}


def plain(data, accumulate=1, options=OPTIONS):
    """Return the network that the plain loop gives, which adds the term to each loss."""
    net = staged()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with nk.CKASparsityLoss(net, **options) as penalty:
        for number, (x, y) in enumerate(data, start=1):
            ((cross_entropy(net(x), y) + penalty.term()) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return net


def assert_alike(net, other):
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# --- Lightning --------------------------------------------------------------------------------------------------------


def in_lightning(returns="loss"):
    """Return the network as a module of Lightning, whose training step returns a loss or a mapping."""

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = staged()

        def training_step(self, batch, number):
            loss = cross_entropy(self.net(batch[0]), batch[1])
            return {"loss": loss, "images": len(batch[0])} if returns == "mapping" else loss

        def validation_step(self, batch, number):
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Lit()


def fit(module, callback, folder, epochs=1, data=DATA, accumulate=1, validation=DATA[:1], **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loaders and logs that a test does not need
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(validation, batch_size=None), **options)
    return trainer


@pytest.mark.parametrize("model", [None, "net"])
@pytest.mark.parametrize("returns", ["loss", "mapping"])
def test_lightning_trains_as_the_plain_loop_does(tmp_path, model, returns):
    module, callback = in_lightning(returns), lightning_callback(model=model, **OPTIONS)
    fit(module, callback, tmp_path)
    assert callback.penalty.batches == 8
    assert_alike(module.net, plain(DATA))
    assert hooks_on(module) == []
    assert "training_step" not in vars(module)


def test_lightning_divides_the_term_with_the_loss_under_accumulation(tmp_path):
    module = in_lightning()
    fit(module, lightning_callback(**OPTIONS), tmp_path, accumulate=2)
    assert_alike(module.net, plain(DATA, accumulate=2))


def test_lightning_resumes_where_the_count_was(tmp_path):
    data = DATA[:4]
    whole = in_lightning()
    fit(whole, lightning_callback(**OPTIONS), tmp_path, epochs=2, data=data)
    half, resumed, callback = in_lightning(), in_lightning(), lightning_callback(**OPTIONS)
    fit(half, lightning_callback(**OPTIONS), tmp_path, data=data).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, callback, tmp_path, epochs=2, data=data, ckpt_path=tmp_path / "half.ckpt")
    assert callback.penalty.batches == 8
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_lightning_validates_on_batches_that_are_smaller_than_samples(tmp_path):
    few, callback = [tuple(part[:2] for part in DATA[0])], lightning_callback(**OPTIONS)
    fit(in_lightning(), callback, tmp_path, validation=few)
    assert callback.penalty.batches == 8


def test_lightning_gives_the_module_back_after_a_crash(tmp_path):
    module = in_lightning()
    module.net.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, lightning_callback(**OPTIONS), tmp_path)
    assert hooks_on(module) == []
    assert "training_step" not in vars(module)


def test_lightning_refuses_what_it_can_not_do(tmp_path):
    manual = in_lightning()
    manual.automatic_optimization = False
    with pytest.raises(InvalidValue, match=r"under manual optimization.*add `term\(\)`"):
        fit(manual, lightning_callback(**OPTIONS), tmp_path)
    with pytest.raises(UnknownName, match="`model='backbone'` finds no module in Lit"):
        fit(in_lightning(), lightning_callback(model="backbone", **OPTIONS), tmp_path)


def test_the_callback_for_lightning_can_be_pickled():
    copied = pickle.loads(pickle.dumps(lightning_callback(model="net", **OPTIONS)))
    assert (copied.model, copied.options) == ("net", OPTIONS)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


class Examples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        images, labels = DATA[number // 8]
        return {"images": images[number % 8], "labels": labels[number % 8]}


class WithLoss(nn.Module):
    def __init__(self, returns="mapping"):
        super().__init__()
        self.net, self.returns = staged(), returns

    def forward(self, images, labels=None):
        scores = self.net(images)
        if labels is None:
            return {"logits": scores}
        loss = cross_entropy(scores, labels)
        return (loss, scores) if self.returns == "tuple" else {"loss": loss, "logits": scores}


class Normalises(WithLoss):
    """A model that divides its loss by the items of all parts of a batch, as those of transformers do."""

    def forward(self, images, labels=None, num_items_in_batch=None, **loss_kwargs):
        scores = self.net(images)
        loss = cross_entropy(scores, labels, reduction="sum") / (num_items_in_batch or len(labels))
        return {"loss": loss, "logits": scores}


def fit_trainer(model, callback, folder, resume=None, kind=None, more=(), **options):
    settings = {"max_steps": 8, "save_strategy": "no", **options}
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.0,
        logging_strategy="no", dataloader_pin_memory=False, remove_unused_columns=False, **settings,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = (kind or transformers.Trainer)(model, args, train_dataset=Examples(), callbacks=[callback, *more])
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(Examples())
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("returns", ["mapping", "tuple"])
def test_the_trainer_trains_as_the_plain_loop_does(tmp_path, returns):
    model, callback = WithLoss(returns), trainer_callback(**OPTIONS)
    fit_trainer(model, callback, tmp_path)
    assert callback.penalty.batches == 8
    assert_alike(model.net, plain(DATA))
    assert hooks_on(model) == []


@pytest.mark.parametrize("kind", [WithLoss, Normalises])
def test_the_trainer_divides_the_term_with_the_loss_under_accumulation(tmp_path, kind):
    model = kind()
    fit_trainer(model, trainer_callback(**OPTIONS), tmp_path, gradient_accumulation_steps=2, max_steps=4)
    assert_alike(model.net, plain(DATA, accumulate=2))


def test_the_trainer_resumes_where_the_count_was(tmp_path):
    whole, half, resumed, callback = WithLoss(), WithLoss(), WithLoss(), trainer_callback(**OPTIONS)
    fit_trainer(whole, trainer_callback(**OPTIONS), tmp_path / "whole")
    saving = {"save_strategy": "steps", "save_steps": 4}
    fit_trainer(half, trainer_callback(**OPTIONS), tmp_path / "half", max_steps=4, **saving)
    saved = tmp_path / "half" / "checkpoint-4"
    fit_trainer(resumed, callback, tmp_path / "half", resume=str(saved))
    assert callback.penalty.batches == 8
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))
    (saved / FILE).unlink()
    with pytest.raises(FileError, match="is missing, and without it the batches so far are unknown"):
        fit_trainer(WithLoss(), trainer_callback(**OPTIONS), tmp_path / "half", resume=str(saved))


def test_the_trainer_begins_anew_after_it_was_interrupted(tmp_path):
    class Interrupting(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            raise KeyboardInterrupt

    model, callback = WithLoss(), trainer_callback(**OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        fit_trainer(model, callback, tmp_path, more=[Interrupting()])
    fit_trainer(model, callback, tmp_path)
    assert callback.penalty.batches == 8
    assert hooks_on(model) == []


def test_a_loss_that_is_not_the_models_own_is_refused(tmp_path):
    model = WithLoss()
    model.config = SimpleNamespace()  # which the Trainer reads for label smoothing
    with pytest.raises(InvalidValue, match="the model returns no loss.*as under label smoothing"):
        fit_trainer(model, trainer_callback(**OPTIONS), tmp_path, label_smoothing_factor=0.1)

    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **keywords):
            return cross_entropy(model(**inputs)["logits"], inputs["labels"])

    with pytest.raises(InvalidValue, match="the Trainer does not use the loss that the model returns"):
        fit_trainer(WithLoss(), trainer_callback(**OPTIONS), tmp_path, kind=Own)


def test_a_vision_transformer_is_penalised_by_its_blocks(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=6, patch_size=3,
        num_channels=2, num_labels=3,
    )  # fmt: skip
    model, callback = transformers.ViTForImageClassification(config), trainer_callback(beta=0.1, every=1)

    class Pixels(Examples):
        def __getitem__(self, number):
            found = super().__getitem__(number)
            return {"pixel_values": found["images"], "labels": found["labels"]}

    trainer = transformers.Trainer
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=2, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer(model, args, train_dataset=Pixels(), callbacks=[callback]).train()
    assert [len(stage) for stage in callback.penalty.stages] == [3]
    assert 3 < callback.penalty.value <= 9


def test_without_the_packages_the_extras_are_named(monkeypatch):
    from netkin.integrations import huggingface, lightning

    lightning._class.cache_clear()
    huggingface._class.cache_clear()
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="sparsity_callback needs .*`pip install 'netkin.lightning.'`"):
        lightning_callback(beta=1.0)
    with pytest.raises(MissingExtra, match="sparsity_callback needs .*`pip install 'netkin.hf.'`"):
        trainer_callback(beta=1.0)
