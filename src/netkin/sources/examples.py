"""Examples in files of your own: `images:DIR`, `npz:FILE` (arrays of NumPy), and the digits of netkin.

Images are fed as pixels of the mean and standard deviation that a network was trained on.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import label_tensor, plain_array
from netkin.errors import InvalidValue, SourceError, UnknownName, did_you_mean, import_optional
from netkin.sources.batches import LoadedExamples, as_they_are
from netkin.sources.names import content, near, reading, require_file

# mean and standard deviation of each channel of the training images, or what nets take for them; from 0 to 1
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "mnist": ((0.1307,), (0.3081,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "efficientnet_lite": ((127 / 255,) * 3, (128 / 255,) * 3),
    "none": ((0.0,), (1.0,)),
}
INPUTS = ("x", "images", "inputs", "data")
LABELS = ("y", "labels")


def normalisation(name: str, channels: int = 3) -> Callable[[Tensor], Tensor]:
    """Return the function that makes ``(x / 255 - mean) / std`` of images with so many `channels`.

    `name` is the image set whose mean and standard deviation are meant, or `none` for pixels from 0 to 1.

    Example:
        >>> normalisation("none")(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
        tensor([1., 1., 1.])
    """
    fitting = [known for known, (mean, _) in STATISTICS.items() if len(mean) in (1, channels)]
    if name not in fitting:
        have = ", ".join(f"`{known}`" for known in fitting)
        raise UnknownName(
            f"no normalisation {name!r} for {channels} channels{did_you_mean(name, fitting) or '.'} There are {have}."
        )
    return partial(_normalised, name=name)


def _normalised(images: Tensor, name: str) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in STATISTICS[name])
    return (images.float() / 255 - mean) / std


DIGIT_PARTS = {"": slice(None), "train": slice(1437), "test": slice(1437, None)}
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def digits(part: str = "") -> LoadedExamples:
    """Return the bundled digits, 1 × 8 × 8 with ink from 0 to 1: all, the `train` or the `test` part."""
    if part not in DIGIT_PARTS:
        near = did_you_mean(part, DIGIT_PARTS)
        raise UnknownName(f"the digits have no part {part!r}{near or '.'} There are `digits:train` and `digits:test`.")
    with files("netkin.sources").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    rows = DIGIT_PARTS[part]
    return images[rows].unsqueeze(1), labels[rows].long(), lambda ink: ink.float() / 16


# formats read in Pillow itself; others call programs of the system
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def image_folder(directory: str, normalise: str = "none", size: int = 0) -> LoadedExamples:
    """Return the images of a folder in sorted order, 3 × height × width; its folders are the classes, in sorted order.

    All must be of one size, unless `size` says to which their shorter side is brought before the middle is cut out. A
    folder without folders gives images without labels. Of colours of 16 bits the upper eight are read.
    """
    prepare = normalisation(normalise)
    paths, labels = _image_paths(Path(directory).expanduser())
    images = list[np.ndarray]()
    for path in paths:
        images.append(_pixels(path, size))
        (height, width), (first_height, first_width) = images[-1].shape[:2], images[0].shape[:2]
        if (height, width) != (first_height, first_width):
            raise SourceError(
                f"{str(paths[0])!r} has {first_height} × {first_width} pixels and {str(path)!r} {height} × {width}; "
                f"choose one size, as in `images,size={min(first_height, first_width)}:DIR`."
            )
    stored = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return stored, torch.tensor(labels) if labels else None, prepare


def _pixels(path: Path, size: int) -> np.ndarray:
    """Return an image as height × width × 3 bytes; with a `size` its shorter side, of which the middle is cut out."""
    pillow, operations = (
        import_optional(name, "images", "reading image files") for name in ("PIL.Image", "PIL.ImageOps")
    )
    stored = content(path, "image")  # from a file, Pillow would take memory for chunks of any announced length
    with reading(path, "image of a kind that is read here", "leave it out"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # beyond its limit of pixels Pillow warns, and we refuse
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            image = pillow.open(io.BytesIO(stored), formats=FORMATS)
        except pillow.UnidentifiedImageError:
            raise ValueError("none of " + ", ".join(FORMATS)) from None
        if image.mode == "F" or image.mode.startswith("I"):  # of which Pillow would cut off all above 255
            raise SourceError(
                f"{str(path)!r} holds numbers finer than bytes (mode {image.mode}); save it with 8 bits, or give "
                "arrays as `npz:FILE`."
            )
        plain = image.convert("RGB")
        return np.asarray(operations.fit(plain, (size, size)) if size else plain)


def _image_paths(folder: Path) -> tuple[list[Path], list[int]]:
    if not folder.is_dir():
        raise SourceError(f"{str(folder)!r} is no folder{near(folder) or '; name the one that holds the images.'}")
    labelled = [(path, label) for label, inner in enumerate(class_folders(folder)) for path in _images_under(inner)]
    paths = [path for path, _ in labelled] or [path for path in sorted(folder.iterdir()) if _is_image(path)]
    if not paths:
        raise SourceError(
            f"found no images in {str(folder)!r}; they must end in {', '.join(sorted(SUFFIXES))} and lie in it or in "
            "its folders, one for each class."
        )
    return paths, [label for _, label in labelled]


def class_folders(folder: Path) -> list[Path]:
    """Return the folders inside a folder of images, which are its classes, in the order of their labels."""
    return sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))


def _images_under(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if _is_image(path))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def npz(file: str, channels: str = "first", normalise: str = "none") -> LoadedExamples:
    """Return the examples of a NumPy archive: its array `x`, `images`, `inputs` or `data`, or its only one.

    Labels are its `y` or `labels`. Bytes are taken as pixels from 0 to 255 and normalised; all other numbers are fed as
    they are. `channels=last` means images of shape n × height × width × channels.
    """
    path = Path(file).expanduser()
    if channels not in ("first", "last"):
        raise InvalidValue(f"`channels` must be 'first' or 'last'; got {channels!r}.")
    inputs, labels = _arrays(path)
    if channels == "last":
        inputs = np.moveaxis(inputs, -1, 1)
    _require_paired(inputs, labels, path)
    stored = torch.from_numpy(np.ascontiguousarray(inputs))
    prepare = normalisation(normalise, inputs.shape[1]) if inputs.dtype == np.uint8 and inputs.ndim == 4 else None
    prepare = prepare or (normalisation("none", 1) if inputs.dtype == np.uint8 else as_they_are)
    return stored, None if labels is None else label_tensor(np.ascontiguousarray(labels)), prepare


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    require_file(path, "npz file")
    with (
        reading(path, "npz file of numbers", "write it with `numpy.savez`; nothing is unpickled"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        inputs, labels = _chosen(archive.files, path)
        return _numbers(archive[inputs], inputs, path), _numbers(archive[labels], labels, path) if labels else None


def _chosen(keys: Sequence[str], path: Path) -> tuple[str, str | None]:
    labels = next((key for key in LABELS if key in keys), None)
    others = [key for key in keys if key != labels]
    inputs = next((key for key in INPUTS if key in keys), others[0] if len(others) == 1 else None)
    if inputs is None:
        have = ", ".join(map(repr, keys[:10])) or "nothing"
        raise SourceError(
            f"{str(path)!r} holds {have}; call its examples {', '.join(map(repr, INPUTS[:-1]))} or {INPUTS[-1]!r}, and "
            f"its labels {' or '.join(map(repr, LABELS))}."
        )
    return inputs, labels


def _numbers(array: np.ndarray, key: str, path: Path) -> np.ndarray:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise SourceError(
            f"{key!r} in {str(path)!r} holds values of type {array.dtype}; only real numbers of at most 64 bits are "
            "read."
        )
    return plain_array(array)


def _require_paired(inputs: np.ndarray, labels: np.ndarray | None, path: Path) -> None:
    if inputs.ndim < 2 or not inputs.size:
        raise SourceError(
            f"the examples in {str(path)!r} have shape {inputs.shape}; the first axis must be the examples, and there "
            "must be another, none of them empty."
        )
    if labels is not None and labels.shape[:1] != inputs.shape[:1]:
        raise SourceError(f"{str(path)!r} holds {len(inputs):,} examples and labels of shape {labels.shape}.")
