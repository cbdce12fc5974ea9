"""What callbacks of other training loops share, made once the model is known; and logs in TensorBoard and MLflow."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.applications.freezing import FreezeTraining
from netkin.errors import InvalidValue, UnknownName, import_optional


class LateRecorder:
    """A recorder that is made when training begins, as only then the model is known.

    `options` are those of `DynamicsRecorder`; its `every` counts optimizer steps, None means once an epoch.
    """

    def __init__(self, probe: Any, model: str | Callable[[nn.Module], nn.Module] | None, options: Mapping[str, Any]):
        self.probe, self.model, self.options = probe, model, dict(options)
        self.recorder: DynamicsRecorder | None = None

    def begin(self, trained: nn.Module, logs: list[Any], state: Mapping[str, Any], step: int) -> None:
        """Make the recorder, restore `state` up to `step`, and probe the model before training."""
        self.recorder = DynamicsRecorder(self._inside(trained), self.probe, **self.options)
        self.recorder.logs += logs
        self.recorder.load_state_dict(state)
        self.recorder.forget(after=step)
        self.probe_once(step)

    def step(self, step: int) -> None:
        """Probe after an optimizer step, if `every` counts steps and it is time."""
        if self.options.get("every") is not None:
            self.probe_once(step, anyway=False)

    def epoch(self, step: int) -> None:
        """Probe after an epoch, unless `every` counts steps."""
        if self.options.get("every") is None:
            self.probe_once(step)

    def end(self, step: int) -> None:
        """Probe a last time, and finish the logs."""
        self.probe_once(step)
        if self.recorder is not None:
            self.recorder.finish()

    def probe_once(self, step: int, anyway: bool = True) -> None:
        """Probe unless this step has been probed: several batches may make one step."""
        if self.recorder is not None and step not in self.recorder.steps[-1:]:
            self.recorder.probe(step, anyway=anyway)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {} if self.recorder is None else self.recorder.state_dict()

    def _inside(self, trained: nn.Module) -> nn.Module:
        if self.model is None:
            return trained
        found = getattr(trained, self.model, None) if isinstance(self.model, str) else self.model(trained)
        if not isinstance(found, nn.Module):
            raise UnknownName(f"`model={self.model!r}` finds no module in {type(trained).__name__}.")
        return found


class LateFreezing:
    """A `FreezeTraining` that is made when training begins, as only then the model is known."""

    def __init__(self, schedule: Any, options: Mapping[str, Any]):
        self.schedule, self.options = schedule, dict(options)
        self.freezing: FreezeTraining | None = None

    def begin(self, model: nn.Module, steps: Any) -> FreezeTraining:
        """Probe the model for the first time."""
        self.freezing = FreezeTraining(model, self.schedule, **{"steps": steps, **self.options})
        return self.freezing

    def at(self, done: int) -> None:
        """Freeze what is due; several batches may make one step."""
        if self.freezing is not None and done > self.freezing.done:
            self.freezing.at(done)

    def end(self) -> None:
        """Give the model back."""
        if self.freezing is not None:
            self.freezing.close()


def with_term(output: Any, term: Tensor) -> Any:
    """Return what a model or a training step gave, with the term added to its loss."""
    if isinstance(output, Tensor):
        return output + term
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        return (output[0] + term, *output[1:])
    if isinstance(output, Mapping) and output.get("loss") is not None:
        changed: Any = output.copy() if hasattr(output, "copy") else dict(output)
        changed["loss"] = output["loss"] + term
        return changed
    raise InvalidValue(
        "the model returns no loss to which the CKA sparsity loss could be added, as under label smoothing or "
        "`compute_loss_func`; add `term()` of a `CKASparsityLoss` to yours."
    )


# --- logs for a `DynamicsRecorder` ------------------------------------------------------------------------------------


class TensorBoardLog:
    """A log for `DynamicsRecorder(..., log=TensorBoardLog(writer))`.

    `writer` is a ``SummaryWriter``, or a folder to make one for. Scalars have names like
    ``netkin/svcca/previous/conv1``; `recorder.finish()` adds a figure for each measure unless ``figure=False``.
    """

    def __init__(self, writer: Any, *, prefix: str = "netkin", figure: bool = True):
        if isinstance(writer, (str, os.PathLike)):
            writer = import_optional("torch.utils.tensorboard", "tensorboard", "TensorBoardLog").SummaryWriter(
                os.fspath(writer)
            )
        if figure:
            import_optional("matplotlib", "figures", "a figure in TensorBoard")
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
        mlflow = import_optional("mlflow", "mlflow", "MlflowLog")
        self._entities = import_optional("mlflow.entities", "mlflow", "MlflowLog")
        if figure:
            import_optional("matplotlib", "figures", "a figure in MLflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise InvalidValue("no MLflow run is active; call `mlflow.start_run()` first, or pass `run_id=`.")
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
