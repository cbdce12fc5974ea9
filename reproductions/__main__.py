"""``python -m reproductions svcca/bottom-up --scale gpu --data DIR``: as `netkin reproduce`, without its packages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from netkin.errors import NetkinError
from netkin.results.claim import SCALES
from reproductions import listing
from reproductions.laboratory import Lab
from reproductions.running import RESULTS, device_named, run


def options() -> argparse.ArgumentParser:
    """Return what the command line takes."""
    parser = argparse.ArgumentParser("python -m reproductions", description="Measure what papers claim.")
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
    parser.add_argument("--list", action="store_true", help="list the claims and measure nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = options()
    given = parser.parse_args(arguments)
    if not given.names and not given.list:
        parser.error("name a paper or a claim, or --list")
    for folder in (given.data, given.checkpoints):
        if folder and not folder.is_dir():
            parser.error(f"there is no folder {str(folder)!r}")
    try:
        return _done(given)
    except (NetkinError, OSError) as refusal:
        print(f"netkin: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnetkin: interrupted; what was finished is recorded.", file=sys.stderr)
        return 130


def _done(given: argparse.Namespace) -> int:
    if given.list:
        print(listing.list_as_text(listing.listed(given.names), given.out))
        return 0
    device, folders = device_named(given.device), {"data": given.data, "checkpoints": given.checkpoints}
    lab = Lab(given.scale, device=device, cache=given.cache, **folders)
    outcomes = run(given.names, lab, given.out, again=given.again, limit=given.limit)
    print(listing.outcomes_as_text(outcomes))
    return int(any(outcome.fault for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
