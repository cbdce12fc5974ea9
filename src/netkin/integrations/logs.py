"""Logs for a `DynamicsRecorder`: numbers and figures in TensorBoard or MLflow."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from netkin.applications.dynamics import DynamicsRecorder
from netkin.errors import ValueFault
from netkin.integrations.training_loops import needed


class TensorBoardLog:
    """A log for `DynamicsRecorder(..., log=TensorBoardLog(writer))`.

    `writer` is a ``SummaryWriter``, or a folder to make one for. Scalars have names like
    ``netkin/svcca/previous/conv1``; `recorder.finish()` adds a figure for each measure unless ``figure=False``.
    """

    def __init__(self, writer: Any, *, prefix: str = "netkin", figure: bool = True):
        if isinstance(writer, (str, os.PathLike)):
            writer = needed("torch.utils.tensorboard", "tensorboard", "TensorBoardLog").SummaryWriter(os.fspath(writer))
        if figure:
            needed("matplotlib", "figures", "a figure in TensorBoard")
        self.writer, self.prefix, self.figure = writer, prefix, figure

    def __call__(self, step: int, values: dict[str, float]) -> None:
        """Write one probe's numbers."""
        for name, value in values.items():
            self.writer.add_scalar(f"{self.prefix}/{name}", value, step)

    def finish(self, recorder: DynamicsRecorder) -> None:
        """Draw each layer against its own final state, and flush the log."""
        series = recorder.series(pairs="corresponding")
        for measure in series.measures if self.figure else ():
            self.writer.add_figure(f"{self.prefix}/{measure}", series.plot(measure), series.final_step)
        self.writer.flush()


class MlflowLog:
    """A log for `DynamicsRecorder(..., log=MlflowLog())`, into the active run or the one of id `run_id`.

    Metrics are named like ``netkin/svcca/previous/conv1``; what MLflow does not allow in a name becomes ``_``.
    `recorder.finish()` stores ``netkin/series.netkin``, which `nk.load` reads, and a figure for each measure unless
    ``figure=False``.
    """

    def __init__(self, run_id: str | None = None, *, prefix: str = "netkin", figure: bool = True):
        mlflow = needed("mlflow", "mlflow", "MlflowLog")
        self._entities = needed("mlflow.entities", "mlflow", "MlflowLog")
        if figure:
            needed("matplotlib", "figures", "a figure in MLflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise ValueFault("no MLflow run is active; call `mlflow.start_run()` first, or pass `run_id=`.")
        self.run_id = run_id or active.info.run_id
        self.prefix, self.figure, self._client = prefix, figure, mlflow.MlflowClient()

    def __call__(self, step: int, values: dict[str, float]) -> None:
        """Log one probe's numbers."""
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(allowed(f"{self.prefix}/{name}"), value, now, step) for name, value in values.items()
        ]
        for start in range(0, len(metrics), 1000):  # as many as a server takes at once
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def finish(self, recorder: DynamicsRecorder) -> None:
        """Store the series, and each layer against its own final state as a figure."""
        series = recorder.series()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "series.netkin"
            series.save(path)
            self._client.log_artifact(self.run_id, str(path), self.prefix)
        for measure in series.measures if self.figure else ():
            self._client.log_figure(self.run_id, series.plot(measure), f"{self.prefix}/{allowed(measure)}.png")


def allowed(name: str) -> str:
    """Return a name with only what MLflow allows: letters, digits, and ``_-. /``.

    Example:
        >>> allowed("netkin/svcca(variance=0.95)/previous/relu#2")
        'netkin/svcca_variance_0.95_/previous/relu_2'
    """
    return re.sub(r"[^\w\-. /]", "_", name)
