"""``python -m reproductions svcca/bottom-up --scale gpu``: claims measured, listed, and shown on a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from netkin import files
from netkin.errors import NetkinError
from reproductions import listing
from reproductions.laboratory import Lab
from reproductions.page import report_claims
from reproductions.record import SCALES, later_notes
from reproductions.running import RESULTS, current, device_named, run, trainings


def options() -> argparse.ArgumentParser:
    """Return what the command line takes."""
    parser = argparse.ArgumentParser(
        "python -m reproductions",
        description="Measure claims of papers, each with a control in which it should fail, and record the results. "
        "Without a name, show the table of recorded claims. Each claim and each trained network is saved as soon as it "
        "is finished, so that an interrupted run resumes where it stopped. The exit code is 1 if a claim could not be "
        "measured; a claim that is not reproduced is no error.",
    )
    parser.add_argument("names", nargs="*", metavar="PAPER[/CLAIM]")
    parser.add_argument(
        "--scale", choices=SCALES, default="cpu", help="cpu: small, takes minutes; gpu: larger networks, all images"
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets; NETKIN_DATA if not given")
    parser.add_argument("--checkpoints", type=Path, help="folder of networks that papers published")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the records")
    parser.add_argument("--device", help="where to run: cpu, cuda, cuda:1, mps")
    parser.add_argument("--cache", type=Path, help="folder for trained networks; reproductions/.cache if not given")
    parser.add_argument("--limit", type=float, help="begin no further claim after so many seconds")
    parser.add_argument("--again", action="store_true", help="measure also what is recorded already")
    parser.add_argument("--list", action="store_true", help="show the table of claims and measure nothing")
    parser.add_argument("--page", type=Path, help="write an HTML page of all recorded claims to this file")
    parser.add_argument("--overwrite", action="store_true", help="write over a page that is there")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = options()
    chosen = parser.parse_args(arguments)
    for folder in (chosen.data, chosen.checkpoints):
        if folder and not folder.is_dir():
            parser.error(f"there is no folder {str(folder)!r}")
    try:
        return _run(chosen)
    except (NetkinError, OSError) as refusal:
        print(f"netkin: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnetkin: interrupted; run the same command again to resume.", file=sys.stderr)
        return 130


def _run(chosen: argparse.Namespace) -> int:
    """Show the table or measure claims, and write the page where one is wanted; 1 if a claim could not be measured."""
    files.require_output(chosen.page, overwrite=chosen.overwrite)
    has_failed = False
    if chosen.list or not (chosen.names or chosen.page):
        print(listing.list_as_text(listing.listed(chosen.names), chosen.out))
    elif chosen.names:
        device, folders = device_named(chosen.device), {"data": chosen.data, "checkpoints": chosen.checkpoints}
        lab = Lab(chosen.scale, device=device, cache=chosen.cache, **folders)
        outcomes = run(chosen.names, lab, chosen.out, again=chosen.again, limit=chosen.limit)
        print(listing.outcomes_as_text(outcomes))
        has_failed = any(outcome.fault for outcome in outcomes)
    if chosen.page:
        claims = current(chosen.out)
        notes = later_notes(chosen.out, claims)
        report_claims(claims, chosen.page, notes=notes, trainings=trainings(claims), overwrite=chosen.overwrite)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
