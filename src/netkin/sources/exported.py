"""Exported programs: the path of a `.pt2` file, which needs no Python class."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import ForwardError, SourceError
from netkin.sources.reading import content
from netkin.sources.vetting import vetted


def load_exported(path: Path) -> nn.Module:
    """Return the network of an exported program, its layers by the module paths they had before.

    The file is vetted first, see `vetting`: nothing in it is unpickled or evaluated. A program that was exported with a
    fixed number of examples in a batch says so when it meets another.
    """
    copy = vetted(content(path, "exported program"), str(path))
    logger = logging.getLogger("torch.export")
    level = logger.level
    try:
        # torch logs its own account of a failure, and ours follows
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(copy)
            model: Any = torch.export.unflatten(program)
    except Exception as error:  # torch's loader has no common error
        raise SourceError(_why_not_loaded(path, error)) from error
    finally:
        logger.setLevel(level)
    _explain_fixed_batches(model, program, path)
    _give_types_back(model)
    return model


def _give_types_back(model: nn.Module) -> None:
    """Let modules bear the names of the types they had, and containers be containers, by which layers are found."""
    kinds: dict[str, type[nn.Module]] = {}
    for module in list(model.modules()):
        name = getattr(module, "_ty", None)
        if type(module) is nn.Module:
            # what has children and is not called was a list or a dictionary of modules
            module.__class__ = nn.ModuleList
        elif isinstance(name, str) and module is not model:
            module.__class__ = kinds.setdefault(name, _kind(name, type(module)))


def _kind(name: str, own: type[nn.Module]) -> type[nn.Module]:
    bases = (own, nn.Sequential) if name == "torch.nn.modules.container.Sequential" else (own,)
    return type(name.rpartition(".")[2], bases, {})


def _why_not_loaded(path: Path, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
    return (
        f"{str(path)!r} could not be loaded by torch {torch.__version__} ({reason}); export it again with this torch."
    )


def _explain_fixed_batches(model: nn.Module, program: Any, path: Path) -> None:
    sizes = [node.meta["val"].shape for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    first = next((shape[0] for shape in sizes if len(shape)), None)
    if not isinstance(first, int):
        return

    def check(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        batch = next((one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor) and one.ndim), None)
        if batch is not None and len(batch) != first:
            raise ForwardError(
                f"{str(path)!r} was exported for batches of exactly {first} and met one of {len(batch)}; export it "
                f"with a dynamic first dimension (`dynamic_shapes=`), or give it batches of {first}, all of them full."
            )

    model.register_forward_pre_hook(check, with_kwargs=True)
