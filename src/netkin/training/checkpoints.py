"""`Checkpoints`: a hook of a training that writes the weights on the way, as a run that `nk.dynamics` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from netkin.errors import require_at_least
from netkin.sources.weights import save_weights
from netkin.training.recipe import Hook


class Checkpoints(Hook):
    """A hook of `nk.train` that writes the weights before the first step and after each epoch, to ``step_0.pt``, ...

    The folder is made. A resumed training goes on in it; files of the same steps are written over.

    Args:
        folder: where the files are written.
        every: write after so many steps, not after each epoch.

    Example:
        >>> import tempfile, torch
        >>> from netkin.training import train
        >>> inputs, folder = torch.randn(20, 4), tempfile.mkdtemp()
        >>> history = train(nn.Linear(4, 2), (inputs, torch.arange(20) % 2), epochs=2, hooks=[Checkpoints(folder)])
        >>> sorted(os.listdir(folder))
        ['step_0.pt', 'step_1.pt', 'step_2.pt']
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None):
        if every is not None:
            require_at_least(1, every=every)
        self.folder, self.every = Path(folder), every

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Write the weights before the first step; a training that resumes begins with the same."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(model, 0)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Write the weights after every so many steps, if that is wanted."""
        if self.every is not None and step % self.every == 0:
            self._write(model, step)

    def after_epoch(self, model: nn.Module, record: Mapping[str, Any]) -> None:
        """Write the weights after an epoch, if that is wanted."""
        if self.every is None:
            self._write(model, int(record["step"]))

    def _write(self, model: nn.Module, step: int) -> None:
        save_weights(model, self.folder / f"step_{step}.pt", overwrite=True)
