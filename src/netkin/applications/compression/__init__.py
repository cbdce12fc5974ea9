"""Compression: layers restricted to the few directions of their inputs that matter."""

from netkin.applications.compression.compress import compress
from netkin.applications.compression.factoring import load_compressed, save_compressed
from netkin.results.compression import CompressedLayer, Compression

__all__ = ["CompressedLayer", "Compression", "compress", "load_compressed", "save_compressed"]
