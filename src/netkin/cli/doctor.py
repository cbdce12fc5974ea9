"""`netkin doctor`: what is installed here, and whether the measures give the right numbers."""

from __future__ import annotations

import warnings
from typing import Any

import click

from netkin.cli.answers import Answer, self_test
from netkin.cli.documents import aligned, as_json
from netkin.cli.machine import machine
from netkin.cli.options import DEVICE, JSON, refuse_absent_device
from netkin.cli.refusals import REFUSED, refusing
from netkin.errors import InflatedWarning, PackageWarning

EXAMPLE = """\b
Example:
  netkin doctor
"""


@click.command(epilog=EXAMPLE)
@DEVICE
@JSON
@refusing
def doctor(device: str | None, json: bool) -> None:
    """Say what is installed here, and test every measure against stored known answers.

    The exit code is 1 if a measure differs, or if no temporary file can be written.
    """
    refuse_absent_device(device)
    here = {**machine(), "broken_packages": _broken_packages()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # shown in a line of its own
        warnings.simplefilter("ignore", InflatedWarning)  # the layers of the test are small
        answers = self_test(device)
    click.echo(as_json(_document(here, answers)) if json else f"{_described(here)}\n\n{_verdict(answers)}")
    if not _healthy(here, answers):
        raise click.exceptions.Exit(REFUSED)


def _broken_packages() -> dict[str, str]:
    from netkin.measures import broken_packages

    return broken_packages()


def _document(here: dict[str, Any], answers: list[Answer]) -> dict[str, Any]:
    rows = [{**vars(answer), "right": answer.right} for answer in answers]
    return {**here, "measures": rows, "healthy": _healthy(here, answers)}


def _healthy(here: dict[str, Any], answers: list[Answer]) -> bool:
    return bool(here["temporary_folder"]) and all(answer.right for answer in answers)


def _described(here: dict[str, Any]) -> str:
    extras = [f"{name} {'yes' if found else 'no'}" for name, found in here["extras"].items()]
    facts = {
        "netkin": here["netkin"],
        "python": f"{here['python']}, {here['system']}",
        **here["packages"],
        "extras": ", ".join(extras),
        "devices": ", ".join(here["devices"]),
        "threads": f"{here['threads']} of {here['cores']} cores",
        "free memory": f"{here['free_memory'] / 1e9:.1f} GB",
        "temporary files": here["temporary_folder"] or "cannot be written; set TMPDIR to a folder that can",
        **{f"package {package}": why for package, why in here["broken_packages"].items()},
    }
    return aligned(list(facts.items()))


def _verdict(answers: list[Answer]) -> str:
    wrong = [answer for answer in answers if not answer.right]
    if not wrong:
        return f"all {len(answers)} known answers of the measures are met."
    gave = (
        f"  {a.measure} gives {a.fault if a.value is None else repr(a.value)} instead of {a.expected!r}" for a in wrong
    )
    return "\n".join([f"{len(wrong)} of the {len(answers)} known answers of the measures are not met:", *gave])
