"""Smaller networks: layers that see only the few directions of their inputs that matter."""

from netkin.applications.compression.compress import compress
from netkin.applications.compression.record import CompressedLayer, Compression
from netkin.applications.compression.saving import load_compressed, save_compressed

__all__ = ["CompressedLayer", "Compression", "compress", "load_compressed", "save_compressed"]
