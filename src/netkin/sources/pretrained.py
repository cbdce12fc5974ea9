"""Hugging Face models: `hf:DIR`, a folder written by `save_pretrained`; nothing is ever downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from netkin.errors import MissingExtra, SourceError
from netkin.sources.reading import near, read_json
from netkin.sources.weights import listed

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def load_huggingface(directory: str) -> nn.Module:
    """Return the model in a folder written by `save_pretrained`, with the head that its configuration names.

    Weights are safetensors where there are any, otherwise a `pytorch_model.bin` that is read as weights only. Code that
    comes with a model is not run, kernels and weights from elsewhere are not fetched.
    """
    folder = Path(directory).expanduser()
    config = _config(folder)
    safe = _has_safetensors(folder)
    transformers = _transformers()
    kind = _model_class(transformers, config, folder)
    try:
        with _quiet(transformers):
            model, found = kind.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                weights_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # its errors have no common root but Exception
        raise SourceError(f"{str(folder)!r} could not be loaded by transformers: {_in_short(error)}") from error
    _refuse_incomplete(found, folder, type(model).__name__)
    return model


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise SourceError(
            f"{str(folder)!r} is no folder{near(folder) or '.'} `hf:DIR` wants one written by `save_pretrained`; "
            "netkin downloads nothing."
        )
    if not (folder / "config.json").is_file():
        raise SourceError(f"{str(folder)!r} holds no config.json; name the folder that `save_pretrained` wrote.")
    config = read_json(folder / "config.json", "configuration of a model")
    _refuse_foreign_code(config, folder)
    return config


def _refuse_foreign_code(config: dict[str, Any], folder: Path) -> None:
    """Refuse configurations that name code elsewhere: classes of their own, or kernels to be fetched."""
    if "auto_map" in config:
        raise SourceError(
            f"the model in {str(folder)!r} brings code of its own (auto_map), and netkin does not run it."
        )
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise SourceError(f"{key!r} in {str(folder)!r} names a kernel to be fetched ({value}); remove it.")
        if isinstance(value, dict):
            _refuse_foreign_code(value, folder)


def _has_safetensors(folder: Path) -> bool:
    present = [name for name in _WEIGHTS if (folder / name).is_file()]
    if not present:
        raise SourceError(f"{str(folder)!r} holds no weights; there must be one of {', '.join(_WEIGHTS)}.")
    return "safetensors" in present[0]


def _model_class(transformers: Any, config: dict[str, Any], folder: Path) -> Any:
    """Return the class that the configuration names, or the one without a head where it names none."""
    names = config.get("architectures") or []
    if not names:
        return transformers.AutoModel
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise SourceError(
            f"the model in {str(folder)!r} is a {str(names[0])!r}, which transformers {transformers.__version__} does "
            "not have."
        )
    return kind


def _refuse_incomplete(found: dict[str, Any], folder: Path, kind: str) -> None:
    """Refuse weights that leave a part of the model as it was drawn at random."""
    names = {"missing": "missing_keys", "of another shape": "mismatched_keys"}
    faults = {what: sorted(map(str, found.get(key) or ())) for what, key in names.items()}
    lists = [f"{len(keys)} {what}: {listed(keys)}" for what, keys in faults.items() if keys]
    if lists:
        raise SourceError(
            f"the weights in {str(folder)!r} do not fit {kind}: {'; '.join(lists)}. Name the right class under "
            "`architectures` in its config.json."
        )


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as fault:
        raise MissingExtra(
            "`hf:DIR` needs the package 'transformers'; install it with `pip install 'netkin[hf]'`."
        ) from fault


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from logging and from drawing progress bars inside the `with`."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(50)  # critical only
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _in_short(error: Exception) -> str:
    words = " ".join(str(error).split())
    short = words if len(words) <= 300 else f"{words[:300]}..."
    return short if short.endswith((".", "!", "?")) else f"{short}."
