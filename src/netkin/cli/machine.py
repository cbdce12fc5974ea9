"""This machine: versions, extras, devices, threads, memory and room for temporary files."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from netkin import __version__

PACKAGES = ("torch", "numpy", "scipy", "safetensors", "click")
EXTRAS = {
    "figures": "matplotlib", "flower": "flwr", "hf": "transformers", "images": "PIL", "lightning": "lightning",
    "mlflow": "mlflow", "pandas": "pandas", "ray": "ray", "tensorboard": "tensorboard", "xarray": "xarray",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """Return all that a report of a fault should say about the machine, as plain values."""
    import torch

    from netkin.memory import free_memory

    return {
        "netkin": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {package: installed(package) for package in PACKAGES},
        "extras": {extra: find_spec(module) is not None for extra, module in EXTRAS.items()},
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "free_memory": free_memory(),
        "temporary_folder": temporary_folder(),
    }


def installed(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def devices() -> list[str]:
    """Return the devices that torch can compute on, the CPU first."""
    import torch

    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def temporary_folder() -> str | None:
    """Return the folder for temporary files, None if nothing can be written there."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"netkin")
        return tempfile.gettempdir()
    except OSError:
        return None
