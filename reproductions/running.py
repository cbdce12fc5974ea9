"""Running claims: each is measured, recorded at once with its provenance, and none stops the others."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from netkin import __version__
from netkin.errors import NetkinError, UnknownName, ValueFault
from netkin.results.claim import Claim, record_path
from reproductions.claims import Finding, Statement, chosen, papers

if TYPE_CHECKING:
    from reproductions.laboratory import Lab

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Outcome:
    """What became of a claim: its record, measured now or earlier, or the fault that kept it from being measured."""

    statement: Statement
    claim: Claim | None = None
    fault: str = ""


def run(ids: Sequence[str], lab: Lab, out: str | Path = RESULTS, *, again: bool = False) -> list[Outcome]:
    """Measure the claims that `ids` name, papers or single claims, and record them below the folder `out`.

    A claim that is recorded there already is not measured again, unless `again` is true or its criterion has changed.
    """
    statements = every(ids, lab.scale)
    total = len(statements)
    return [_outcome(one, f"[{k} of {total}] {one.id}", lab, Path(out), again) for k, one in enumerate(statements, 1)]


def every(ids: Sequence[str], scale: str) -> list[Statement]:
    """Return the claims that `ids` name at `scale`, each once; a paper without any at that scale is refused."""
    found: dict[str, Statement] = {}
    for name in ids:
        statements = chosen(name, scale)
        if not statements:
            raise ValueFault(f"{name!r} has no claim at the scale {scale!r}; `--list` shows the scales of all.")
        found |= {statement.id: statement for statement in statements}
    return list(found.values())


def device_named(name: str | None) -> torch.device | None:
    """Return the device of that name, or refuse one that this machine does not have."""
    if name is None:
        return None
    try:
        return torch.empty(0, device=name).device
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(f"there is no device {name!r} here.") from fault


def _outcome(statement: Statement, label: str, lab: Lab, out: Path, again: bool) -> Outcome:
    try:
        old = None if again else _relabelled(statement, lab.scale, out)
        if old is not None:
            tell(f"{label}: recorded before, {old.verdict}")
            return Outcome(statement, old)
        tell(f"{label}: measuring at {lab.scale} scale on {device_words(lab.device)}")
        claim = measured(statement, lab)
        claim.save(out)
    except Exception as fault:
        return Outcome(statement, fault=_told(label, fault))
    tell(f"{label}: {claim.verdict}, {claim.seconds:.0f} s")
    return Outcome(statement, claim)


def measured(statement: Statement, lab: Lab) -> Claim:
    """Return the record of a claim measured now, with torch's seed at 0 whatever was measured before."""
    with torch.random.fork_rng([lab.device] if lab.device.type == "cuda" else []), noting(lab) as data:
        torch.manual_seed(0)
        started = time.perf_counter()
        finding = statement.measure(lab)
        seconds = time.perf_counter() - started
    if not isinstance(finding, Finding):
        raise ValueFault(f"the function of {statement.id!r} must return a Finding; got {type(finding).__name__}.")
    return Claim(
        id=statement.id,
        **_labels(statement),
        criterion=statement.criterion,
        verdict=finding.verdict,
        scale=lab.scale,
        measured=finding.measured,
        seeds=tuple(finding.seeds),
        note=finding.note,
        curves=finding.curves,
        provenance=_provenance(statement, lab, data),
        seconds=round(seconds, 1),
        version=__version__,
    )


@contextmanager
def noting(lab: Lab) -> Iterator[list[str]]:
    """Inside the `with`, note in words which data the laboratory hands out; the laboratory is left as found."""
    noted: list[str] = []
    found = dict(vars(lab))
    for name, words in (("images", _image_words), ("text", _text_words)):
        setattr(lab, name, _noted(getattr(lab, name), words, noted))
    try:
        yield noted
    finally:
        for name in ("images", "text"):
            delattr(lab, name)
        vars(lab).update({name: found[name] for name in ("images", "text") if name in found})


def device_words(device: torch.device) -> str:
    """Return a device as people call it: "NVIDIA H200", or "CPU, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else device.type.upper()


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _relabelled(statement: Statement, scale: str, out: Path) -> Claim | None:
    """Return the record of a claim, brought to the statement's present words; None if it must be measured."""
    path = record_path(out, statement.id, scale)
    if not path.exists():
        return None
    old = Claim.load(path)
    if old.criterion != statement.criterion:
        return None
    new = replace(old, **_labels(statement))
    if new != old:
        new.save(out)
    return new


def _labels(statement: Statement) -> dict[str, Any]:
    return {name: getattr(statement, name) for name in ("figure", "sentence", "expected")}


def _provenance(statement: Statement, lab: Lab, data: list[str]) -> dict[str, str]:
    return {
        "paper": papers()[statement.paper],
        "device": device_words(lab.device),
        "data": "; ".join(data) or "made by the claim itself",
        "netkin": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _noted(method: Callable[[], Any], words: Callable[[Any], str], noted: list[str]) -> Callable[[], Any]:
    def noting_method() -> Any:
        given = method()
        if words(given) not in noted:
            noted.append(words(given))
        return given

    return noting_method


def _image_words(images: Any) -> str:
    return images.words


def _text_words(path: Path) -> str:
    return f"{path.parent.name}, {path.stat().st_size:,} bytes of text"


def _told(label: str, fault: Exception) -> str:
    """Say what went wrong, with the whole trace unless it is a refusal, and return it in one line."""
    if not isinstance(fault, NetkinError):
        tell("".join(traceback.format_exception(fault)).rstrip())
    line = f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    tell(f"{label}: failed, {line}")
    return line
