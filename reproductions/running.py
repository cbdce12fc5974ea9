"""Running claims: each is measured, recorded at once with its provenance, and none stops the others."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from netkin import __version__, files, jobs
from netkin.errors import FileError, InvalidValue, NetkinError, UnknownName
from reproductions.claims import Finding, Statement, chosen, named, papers
from reproductions.commit import commit
from reproductions.keeping import Notes, keeping_in, noting, random_seed
from reproductions.recipes import lengths_of, recipe_words
from reproductions.record import EMPIRICAL, Claim, record_path, recorded

if TYPE_CHECKING:
    from reproductions.laboratory import Lab

RESULTS = Path(__file__).parent / "results"
DECIDING = ("criterion", "control", "kind", "measures")  # words with which a record must agree to count as current


@dataclass(frozen=True)
class Outcome:
    """What became of a claim: its record, measured now or earlier, and what kept it from being measured or written."""

    statement: Statement
    claim: Claim | None = None
    fault: str = ""


def run(
    ids: Sequence[str], lab: Lab, out: str | Path = RESULTS, *, again: bool = False, limit: float | None = None
) -> list[Outcome]:
    """Measure the claims that `ids` name, papers or single claims, and record them below the folder `out`.

    Args:
        ids: Papers, as "svcca", or single claims, as "svcca/bottom-up".
        lab: The data and networks to measure on, at a scale.
        out: The folder of the records.
        again: Whether to measure also what is recorded there with the present criterion, control, measures and recipes.
        limit: The seconds after which no further claim is begun; None for no limit.
    """
    statements, started, outcomes = every(ids, lab.scale), time.perf_counter(), []
    for k, one in enumerate(statements, 1):
        if limit is not None and time.perf_counter() - started > limit:
            tell(f"{limit:g} s are over; not begun: {', '.join(left.id for left in statements[k - 1 :])}")
            break
        outcomes.append(_outcome(one, f"[{k} of {len(statements)}] {one.id}", lab, Path(out), again))
    return outcomes


def every(ids: Sequence[str], scale: str) -> list[Statement]:
    """Return the claims that `ids` name at `scale`, each once; a paper without any at that scale is refused."""
    found: dict[str, Statement] = {}
    for name in ids:
        statements = chosen(name, scale)
        if not statements:
            raise InvalidValue(f"{name!r} has no claim at the scale {scale!r}; `--list` shows the scales of all.")
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
    claim = None
    try:
        old = None if again else record_of(statement, lab.scale, out)
        if old is not None:
            tell(f"{label}: recorded before, {old.verdict}; `--again` measures it here")
            return Outcome(statement, old)
        _require_place(record_path(out, statement.id, lab.scale))
        tell(f"{label}: measuring at {lab.scale} scale on {device_words(lab.device)}")
        with working(statement, lab):
            claim = measured(statement, lab)
            claim.save(out, overwrite=True)
    except Exception as fault:  # what was measured is shown also where it can't be written
        return Outcome(statement, claim, _report_fault(label, fault))
    tell(f"{label}: {claim.verdict}, {claim.seconds:.0f} s")
    return Outcome(statement, claim)


def _require_place(place: Path) -> None:
    """Refuse, before a claim is measured, a place where its record can't or should not be written."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise FileError(f"cannot write {str(place)!r}: {fault.strerror or fault}.") from fault
    files.require_output(place, overwrite=True)  # the record of an earlier criterion is replaced


def measured(statement: Statement, lab: Lab) -> Claim:
    """Return the record of a claim measured now, with torch's seed at 0 whatever was measured before."""
    started = time.perf_counter()
    with random_seed(0, lab.device), noting() as notes:
        finding = statement.measure(lab)
    if not isinstance(finding, Finding):
        raise InvalidValue(f"the function of {statement.id!r} must return a Finding; got {type(finding).__name__}.")
    if statement.kind == EMPIRICAL and not finding.controls:
        raise InvalidValue(f"the function of {statement.id!r} must measure its control, {statement.control}; got none.")
    return Claim(
        id=statement.id,
        **{name: getattr(statement, name) for name in ("figure", "sentence", "expected", *DECIDING)},
        **{name: getattr(finding, name) for name in ("measured", "controls", "note", "curves")},
        verdict=str(finding.verdict),
        parts=getattr(finding.verdict, "parts", ()),
        scale=lab.scale,
        seeds=tuple(finding.seeds),
        provenance=_provenance(statement, lab, notes),
        call=call_of(statement, lab),
        data=notes.digests,
        settings=notes.recipes,
        seconds=round(time.perf_counter() - started, 1),
        version=__version__,
    )


@contextmanager
def working(statement: Statement, lab: Lab) -> Iterator[None]:
    """Inside the `with`, the laboratory keeps finished parts of the claim in a job's folder, if it has a cache.

    They are deleted at its end, when the record is written. Parts of the same claim by another commit, or with other
    recipes or data, are deleted first.
    """
    place = getattr(lab, "cache", None)
    if place is None:
        yield
        return
    folder = place / "jobs" / f"{statement.id.replace('/', '-')}.{lab.scale}"
    identity = {"claim": statement.id, "scale": lab.scale, "netkin": __version__, "commit": commit()} | lab.identity
    if (folder / "job.json").exists() and jobs.read(folder).identity != identity:
        shutil.rmtree(folder)
    with jobs.Job(folder, "claim", identity, call=call_of(statement, lab)) as job:
        lab.done = lab.total = 0
        with keeping_in(job):
            yield
        job.forget()
    shutil.rmtree(folder)  # the record holds it all


def call_of(statement: Statement, lab: Lab) -> str:
    """Return the command that measures a claim as this laboratory does; DIR stands for folders of this machine."""
    folders = [f" --{name} DIR" for name in ("data", "checkpoints") if getattr(lab, name, None) is not None]
    return f"python -m reproductions {statement.id} --scale {lab.scale}{''.join(folders)} --device {lab.device.type}"


def record_of(statement: Statement, scale: str, out: str | Path) -> Claim | None:
    """Return the record of a claim if its criterion, control, kind, measures and recipes are those of today."""
    path = record_path(out, statement.id, scale)
    if not path.exists():
        return None
    old = Claim.load(path)
    same = [getattr(old, name) == getattr(statement, name) for name in ("id", *DECIDING)]
    return old if all([*same, _recorded_recipes(old) == _recipes(old, scale)]) else None


def current(out: str | Path) -> list[Claim]:
    """Return the records below `out` of claims that are still judged so, as they were measured, by paper and figure."""
    known = {one.id: one for paper in papers() for one in named(paper)}
    found = [one for one in recorded(out) if one.id in known]
    return [one for one in found if record_of(known[one.id], one.scale, out) is not None]


def training_of(statement: Statement, scale: str, networks: Iterable[str]) -> str:
    """Return how long a claim trains at a scale, which uses these networks of the laboratory; empty for nothing."""
    shared = lengths_of(networks, scale)
    return shared if statement.training is None else statement.training(scale, shared)


def trainings(claims: Iterable[Claim]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return by id and scale of each record how long the paper trained, if it says so, and how long we did."""
    known = {one.id: one for paper in papers() for one in named(paper)}
    return {
        (claim.id, claim.scale): (
            known[claim.id].papers_training,
            claim.provenance.get("training", training_of(known[claim.id], claim.scale, claim.settings)),
        )
        for claim in claims
        if claim.id in known
    }


def _recorded_recipes(old: Claim) -> dict[str, str]:
    """Return the recipes of a record in today's names: `lr` was `rate` when the first were measured."""
    names = {"rate": "lr", "decay": "weight_decay"}
    return {
        network: re.sub(r"\b(rate|decay)=", lambda match: f"{names[match[1]]}=", words)
        for network, words in old.settings.items()
    }


def _recipes(old: Claim, scale: str) -> dict[str, str]:
    """Return the recipes that a record names, as they are now."""
    if not old.settings:
        return {}
    return {name: recipe_words(name, scale) for name in old.settings}


def device_words(device: torch.device) -> str:
    """Return a device as people call it: "NVIDIA H200", or "CPU, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else device.type.upper()


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _provenance(statement: Statement, lab: Lab, notes: Notes) -> dict[str, str]:
    training = training_of(statement, lab.scale, notes.recipes)
    return {
        "paper": papers()[statement.paper],
        **({"training": training} if training else {}),
        "device": device_words(lab.device),
        "data": "; ".join(notes.data) or "made by the claim itself",
        "commit": commit(),
        "netkin": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _report_fault(label: str, fault: Exception) -> str:
    """Say what went wrong, with the whole trace unless it is a refusal, and return it in one line."""
    is_refusal = isinstance(fault, NetkinError)
    if not is_refusal:
        tell("".join(traceback.format_exception(fault)).rstrip())
    line = f"{'' if is_refusal else f'{type(fault).__name__}: '}{' '.join(str(fault).split())}"
    tell(f"{label}: failed, {line}")
    return line
