"""The pixels of an image file: bytes, or floating numbers where the file is finer than that.

Of colours of 16 bits Pillow keeps the upper eight. The lower ones are read by decoding such a file once more as if its
numbers had the other byte order.
"""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from netkin.errors import MissingExtra, SourceError
from netkin.sources.names import content, in_short, most_in_memory

# formats read in Pillow itself; others call programs of the system
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BITS_PER_SAMPLE, PLANAR = 258, 284  # tags of TIFF
SWAPPED = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}  # N is this machine's own order
COLOURS = tuple(f"{mode};16{order}" for mode in ("RGB", "RGBA", "RGBX") for order in SWAPPED)
GREY_AND_ALPHA = "LA;16B"


def pixels(path: Path, size: int = 0) -> np.ndarray:
    """Return an image as height × width × 3 values from 0 to 255: bytes, or floats where it is finer than that."""
    pillow = _pillow("PIL.Image")
    stored = content(path, "image")  # from a file, Pillow would take memory for chunks of any announced length
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # beyond its limit of pixels Pillow warns, and we refuse
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(io.BytesIO(stored), formats=FORMATS) as image:
                if image.width * image.height * 3 > most_in_memory(len(stored)):
                    raise pillow.DecompressionBombError(f"{image.width} × {image.height}.")
                return _values(image, stored, path, size)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise SourceError(f"{str(path)!r} has too many pixels to be opened safely: {error}") from error
    except SourceError:
        raise
    except Exception as error:  # the bytes may be anything, and so may be the error
        # of what it does not know Pillow says only at which address it lies in memory
        why = "." if isinstance(error, pillow.UnidentifiedImageError) else f": {in_short(error)}"
        raise SourceError(f"{str(path)!r} is damaged or no image of a kind that is read here{why}") from error


def _values(image: Any, stored: bytes, path: Path, size: int) -> np.ndarray:
    """Return the values of an open image; with a `size` its shorter side is brought to that and the middle cut out."""
    pillow, operations = _pillow("PIL.Image"), _pillow("PIL.ImageOps")
    white = _white(image, path)
    if not white:
        plain = image.convert("RGB")
        return np.asarray(operations.fit(plain, (size, size)) if size else plain)
    fine = _fine(image, stored, pillow)
    _refuse_out_of_range(fine, white, path)
    if size:
        planes = [operations.fit(pillow.fromarray(one), (size, size)) for one in fine.transpose(2, 0, 1)]
        fine = np.stack([np.asarray(one) for one in planes], axis=2).clip(0, white)  # edges overshoot
    return np.broadcast_to((fine * (255 / white)).astype(np.float32), (*fine.shape[:2], 3))


def _white(image: Any, path: Path) -> float:
    """Return the value of white in an image finer than bytes; 0 for all others. What would be cut off is refused."""
    tiles = [one[3] if isinstance(one[3], tuple) else (one[3],) for one in image.tile]
    bits = max(image.tag_v2.get(BITS_PER_SAMPLE, (8,))) if image.format == "TIFF" else 16
    if image.mode == "F":
        return 1.0
    if image.mode == "I" and image.format not in ("PNG", "PPM"):  # which have 16 bits and may come as 32
        raise SourceError(
            f"{str(path)!r} holds whole numbers of 32 bits, whose white is unknown; save it with 16 bits."
        )
    if image.mode.startswith("I"):
        return 2.0**bits - 1
    if image.format == "PPM":
        most = max((args[1] for args in tiles if len(args) > 1 and isinstance(args[1], int)), default=255)
        is_fine, is_read = most > 255, all(one[0] == "ppm" for one in image.tile)
    else:
        is_fine = bits > 8 if image.format == "TIFF" else any(";16" in str(args[0]) for args in tiles)
        in_planes = image.format == "TIFF" and image.tag_v2.get(PLANAR) == 2
        most, is_read = 65535, not in_planes and all(args[0] in (*COLOURS, GREY_AND_ALPHA) for args in tiles)
    if is_fine and not is_read:
        raise SourceError(
            f"{str(path)!r} is an image of more than 8 bits a colour in a form of which only 8 could be read; save it "
            "as PNG with 16 bits."
        )
    return float(most) if is_fine else 0.0


def _fine(image: Any, stored: bytes, pillow: Any) -> np.ndarray:
    """Return an image finer than bytes as height × width × 1 or 3 values, as they are in the file."""
    if image.mode == "F" or image.mode.startswith("I"):
        return np.asarray(image.convert("F"))[:, :, None]
    if image.format == "PPM":
        count = image.height * image.width * 3
        values = np.frombuffer(stored, ">u2", count=count, offset=image.tile[0][2])
        return values.reshape(image.height, image.width, 3).astype(np.float32)
    modes = {one[3] if isinstance(one[3], str) else one[3][0] for one in image.tile}
    if modes == {GREY_AND_ALPHA}:
        grey = _decoded(stored, pillow, lambda mode: "RGBA").astype(np.float32)  # two bytes of grey, two of alpha
        return grey[:, :, :1] * 256 + grey[:, :, 1:2]
    high = _decoded(stored, pillow, lambda mode: mode)[:, :, :3].astype(np.float32)
    return high * 256 + _decoded(stored, pillow, lambda mode: mode[:-1] + SWAPPED[mode[-1]])[:, :, :3]


def _decoded(stored: bytes, pillow: Any, change: Callable[[str], str]) -> np.ndarray:
    """Return what Pillow makes of an image whose numbers are said to be laid out in another way."""
    with pillow.open(io.BytesIO(stored), formats=FORMATS) as image:
        tiles = []
        for tile in image.tile:
            args = change(tile[3]) if isinstance(tile[3], str) else (change(tile[3][0]), *tile[3][1:])
            tiles.append(tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args))
        image.tile = tiles
        return np.asarray(image)


def _refuse_out_of_range(values: np.ndarray, white: float, path: Path) -> None:
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= white:  # false for NaN, too
        goes = "an image of floating numbers" if white == 1 else "by its own maximum it"
        raise SourceError(
            f"{str(path)!r} holds numbers from {low:g} to {high:g}; {goes} goes from 0 for black to {white:g} for "
            f"white, so {'scale it' if white == 1 else 'correct one of the two'} first."
        )


def _pillow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingExtra(
            "reading image files needs the package 'pillow'; install it with `pip install 'netkin[images]'`."
        ) from fault
