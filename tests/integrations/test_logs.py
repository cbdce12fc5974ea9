"""TensorBoard and MLflow hear what a recorder tells, and get the series at the end."""

import sys
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, MissingExtra
from netkin.integrations.training_loops import MlflowLog, TensorBoardLog


def recorded(log, **options):
    """Record three steps of a model that changes at random."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    recorder = nk.DynamicsRecorder(model, torch.randn(30, 4), layers=["0", "2"], log=log, **options)
    for step in (0, 10, 20):
        recorder.probe(step)
        nn.init.normal_(model[0].weight)
    return recorder


@pytest.mark.slow
def test_tensorboard_gets_scalars_and_a_figure(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = recorded(TensorBoardLog(tmp_path), measures="cka", first=True)
    recorder.finish()
    events = EventAccumulator(str(tmp_path)).Reload()
    names = [f"netkin/cka/{what}/{layer}" for what in ("previous", "first") for layer in ("0", "2")]
    assert sorted(events.Tags()["scalars"]) == sorted(names)
    found = events.Scalars("netkin/cka/previous/0")
    assert [one.step for one in found] == [10, 20]
    assert found[1].value == pytest.approx(recorder.progress[2].previous["0"], abs=1e-6)
    assert [image.step for image in events.Images("netkin/cka")] == [20]


def test_tensorboard_takes_a_writer_and_needs_no_figure():
    class Writer:
        def __init__(self):
            self.scalars, self.flushed = [], False

        def add_scalar(self, name, value, step):
            self.scalars.append((name, step))

        def flush(self):
            self.flushed = True

    writer = Writer()
    recorded(TensorBoardLog(writer, prefix="run", figure=False), measures="nbs").finish()
    assert writer.scalars[:2] == [("run/nbs/previous/0", 10), ("run/nbs/previous/2", 10)]
    assert writer.flushed


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with a store in an empty folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield mlflow
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
def test_mlflow_gets_metrics_the_series_and_a_figure(mlflow, tmp_path):
    with pytest.raises(
        InvalidValue, match="no MLflow run is active; call `mlflow.start_run..` first, or pass `run_id=`"
    ):
        MlflowLog()
    with mlflow.start_run() as run:
        recorder = recorded(MlflowLog(), measures="svcca(variance=0.9)")
        recorder.finish()
    client = mlflow.MlflowClient()
    name = "netkin/svcca_variance_0.9_/previous/0"
    history = client.get_metric_history(run.info.run_id, name)
    assert [(one.step, one.value) for one in history] == [
        (step, pytest.approx(news.previous["0"])) for step, news in zip((10, 20), recorder.progress[1:], strict=True)
    ]
    files = sorted(file.path for file in client.list_artifacts(run.info.run_id, "netkin"))
    assert files == ["netkin/series.netkin", "netkin/svcca_variance_0.9_.png"]
    kept = nk.load(client.download_artifacts(run.info.run_id, "netkin/series.netkin", str(tmp_path)))
    assert kept.steps == (0, 10, 20)
    assert kept[0].tables == recorder.series()[0].tables


@pytest.mark.parametrize(
    "missing, make, sentence",
    [
        ("torch.utils.tensorboard", lambda: TensorBoardLog("folder"), "TensorBoardLog needs .*netkin.tensorboard."),
        ("matplotlib", lambda: TensorBoardLog(None), "a figure in TensorBoard needs 'matplotlib' .*netkin.figures."),
        ("mlflow", MlflowLog, "MlflowLog needs 'mlflow' .*netkin.mlflow."),
    ],
)
def test_without_a_package_the_extra_is_named(missing, make, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=sentence):
        make()


@pytest.mark.parametrize(
    "old, new",
    [
        ("freezing.lightning_callback", "lightning.freezing_callback"),
        ("freezing.trainer_callback", "huggingface.freezing_callback"),
        ("sparsity_loss.lightning_callback", "lightning.sparsity_callback"),
        ("sparsity_loss.trainer_callback", "huggingface.sparsity_callback"),
        ("tensorboard.TensorBoardLog", "training_loops.TensorBoardLog"),
        ("mlflow.MlflowLog", "training_loops.MlflowLog"),
        ("logs.TensorBoardLog", "training_loops.TensorBoardLog"),
        ("logs.MlflowLog", "training_loops.MlflowLog"),
    ],
)
def test_modules_that_were_joined_are_found_under_their_old_names(old, new):
    assert resolve_name(f"netkin.integrations.{old}") is resolve_name(f"netkin.integrations.{new}")


def test_a_name_that_an_old_module_never_had_is_refused():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from netkin.integrations.freezing import nothing")
