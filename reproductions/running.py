"""Running claims: each is measured, recorded at once with its provenance, and none stops the others."""

from __future__ import annotations

import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from netkin import __version__, jobs
from netkin.errors import NetkinError, UnknownName, ValueFault
from netkin.results.claim import EMPIRICAL, Claim, record_path, recorded
from reproductions.claims import Finding, Statement, chosen, named, papers

if TYPE_CHECKING:
    from reproductions.laboratory import Lab

RESULTS = Path(__file__).parent / "results"
LABELS = ("figure", "sentence", "expected")  # words that may change while the numbers stay


@dataclass(frozen=True)
class Outcome:
    """What became of a claim: its record, measured now or earlier, or the fault that kept it from being measured."""

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
        again: Whether to measure also what is recorded there by the present code, criterion and recipes.
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
        old = None if again else record_of(statement, lab.scale, out)
        if old is not None:
            tell(f"{label}: recorded before, {old.verdict}")
            return Outcome(statement, _relabelled(old, statement, out))
        tell(f"{label}: measuring at {lab.scale} scale on {device_words(lab.device)}")
        claim = measured(statement, lab)
        claim.save(out)
    except Exception as fault:
        return Outcome(statement, fault=_report_fault(label, fault))
    tell(f"{label}: {claim.verdict}, {claim.seconds:.0f} s")
    return Outcome(statement, claim)


def measured(statement: Statement, lab: Lab) -> Claim:
    """Return the record of a claim measured now, with torch's seed at 0 whatever was measured before."""
    with torch.random.fork_rng([lab.device] if lab.device.type == "cuda" else []), noting(lab) as notes:
        torch.manual_seed(0)
        started = time.perf_counter()
        with working(statement, lab):
            finding = statement.measure(lab)
        seconds = time.perf_counter() - started
    if not isinstance(finding, Finding):
        raise ValueFault(f"the function of {statement.id!r} must return a Finding; got {type(finding).__name__}.")
    if statement.kind == EMPIRICAL and not finding.controls:
        raise ValueFault(f"the function of {statement.id!r} must measure its control, {statement.control}; got none.")
    return Claim(
        id=statement.id,
        **{name: getattr(statement, name) for name in (*LABELS, "criterion", "control", "kind", "measures")},
        verdict=finding.verdict,
        scale=lab.scale,
        measured=finding.measured,
        controls=finding.controls,
        seeds=tuple(finding.seeds),
        note=finding.note,
        curves=finding.curves,
        provenance=_provenance(statement, lab, notes),
        digest=statement.digest(lab.scale),
        settings=notes.recipes,
        seconds=round(seconds, 1),
        version=__version__,
    )


@contextmanager
def working(statement: Statement, lab: Lab) -> Iterator[None]:
    """Inside the `with`, the laboratory keeps finished parts of the claim in a job's folder, if it has a cache.

    Parts of the same claim by other code, or with other recipes or data, are worth nothing and are deleted.
    """
    place = getattr(lab, "cache", None)
    if place is None:
        yield
        return
    folder = place / "jobs" / f"{statement.id.replace('/', '-')}.{lab.scale}"
    identity = {"claim": statement.id, "scale": lab.scale, "code": statement.digest(lab.scale)} | lab.identity
    if (folder / "job.json").exists() and jobs.read(folder).identity != identity:
        shutil.rmtree(folder)
    with jobs.Job(folder, "claim", identity, call=f"netkin reproduce {statement.id} --scale {lab.scale}") as job:
        lab.job = job
        try:
            yield
        finally:
            lab.job = None
    shutil.rmtree(folder)  # the record holds it all


def record_of(statement: Statement, scale: str, out: str | Path) -> Claim | None:
    """Return the record of a claim if it was measured by this very code, criterion, control, measures and recipes."""
    path = record_path(out, statement.id, scale)
    if not path.exists():
        return None
    old = Claim.load(path)
    same = [getattr(old, name) == getattr(statement, name) for name in ("criterion", "control", "kind", "measures")]
    same += [old.digest == statement.digest(scale), dict(old.settings) == _recipes(old, scale)]
    return old if all(same) else None


def current(out: str | Path) -> list[Claim]:
    """Return the records below `out` that still say what the present code would measure, in the order of the papers."""
    known = {one.id: one for paper in papers() for one in named(paper)}
    found = [one for one in recorded(out) if one.id in known]
    fresh = [one for one in found if record_of(known[one.id], one.scale, out) is not None]
    return [replace(one, **{name: getattr(known[one.id], name) for name in LABELS}) for one in fresh]


def _recipes(old: Claim, scale: str) -> dict[str, str]:
    """Return the recipes that a record names, as they are now."""
    if not old.settings:
        return {}
    from reproductions.laboratory import recipe_words

    return {name: recipe_words(name, scale) for name in old.settings}


@dataclass(frozen=True)
class Notes:
    """Which data and which recipes a laboratory handed out, in words."""

    data: list[str]
    recipes: dict[str, str]


@contextmanager
def noting(lab: Lab) -> Iterator[Notes]:
    """Inside the `with`, note which data and recipes the laboratory hands out; the laboratory is left as found."""
    notes = Notes([], {})
    names = ("images", "images_of", "text", "recipe")
    found = {name: vars(lab)[name] for name in names if name in vars(lab)}
    notings: tuple[Callable[..., None], ...] = (_note_images, _note_images, _note_text, _note_recipe)
    for name, note in zip(names, notings, strict=True):
        if hasattr(lab, name):
            setattr(lab, name, _noted(getattr(lab, name), note, notes))
    try:
        yield notes
    finally:
        for name in names:
            vars(lab).pop(name, None)
        vars(lab).update(found)


def device_words(device: torch.device) -> str:
    """Return a device as people call it: "NVIDIA H200", or "CPU, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else device.type.upper()


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _relabelled(old: Claim, statement: Statement, out: Path) -> Claim:
    """Return a record, saved again if its statement has new words."""
    new = replace(old, **{name: getattr(statement, name) for name in LABELS})
    if new != old:
        new.save(out)
    return new


def _provenance(statement: Statement, lab: Lab, notes: Notes) -> dict[str, str]:
    return {
        "paper": papers()[statement.paper],
        "device": device_words(lab.device),
        "data": "; ".join(notes.data) or "made by the claim itself",
        "netkin": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _noted(method: Callable[..., Any], note: Callable[..., None], notes: Notes) -> Callable[..., Any]:
    def noting_method(*arguments: Any) -> Any:
        given = method(*arguments)
        note(notes, given, *arguments)
        return given

    return noting_method


def _note_images(notes: Notes, images: Any, *asked: str) -> None:
    _note_data(notes, images.words)


def _note_text(notes: Notes, path: Path) -> None:
    _note_data(notes, f"{path.parent.name}, {path.stat().st_size:,} bytes of text")


def _note_data(notes: Notes, words: str) -> None:
    if words not in notes.data:
        notes.data.append(words)


def _note_recipe(notes: Notes, recipe: Any, name: str) -> None:
    notes.recipes[name] = recipe.words


def _report_fault(label: str, fault: Exception) -> str:
    """Say what went wrong, with the whole trace unless it is a refusal, and return it in one line."""
    if not isinstance(fault, NetkinError):
        tell("".join(traceback.format_exception(fault)).rstrip())
    line = f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    tell(f"{label}: failed, {line}")
    return line
