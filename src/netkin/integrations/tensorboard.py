"""TensorBoard: what a `DynamicsRecorder` tells as scalars, and the layers' lines as a figure at the end."""

from __future__ import annotations

import os
from typing import Any

from netkin.applications.dynamics import DynamicsRecorder
from netkin.integrations.packages import needed


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
        """Draw each layer against its own final state, and see that everything is written."""
        series = recorder.series(pairs="corresponding")
        for measure in series.measures if self.figure else ():
            self.writer.add_figure(f"{self.prefix}/{measure}", series.plot(measure), series.final_step)
        self.writer.flush()
