"""Amounts of memory as people write them."""

from __future__ import annotations

import re

import click

UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", start=1)}
UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", start=1)}


def as_bytes(text: str) -> int:
    """Return the number of bytes that `text` stands for.

    Example:
        >>> as_bytes("500MB"), as_bytes("1.5 GiB")
        (500000000, 1610612736)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found.group(2).upper() not in UNITS:
        raise click.BadParameter(f"{text!r} is no amount of memory; write one like 500MB, 2GB or 1.5GiB.")
    amount = int(float(found.group(1)) * UNITS[found.group(2).upper()])
    if amount < 1:
        raise click.BadParameter(f"{text!r} is no memory at all; write an amount like 500MB, 2GB or 1.5GiB.")
    return amount


def memory_option(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Let click turn the text of an option into bytes."""
    return None if text is None else as_bytes(text)
