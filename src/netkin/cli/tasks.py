"""`netkin tasks`: networks with data of their own, compared block by block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import FILE, JSON, refuse_absent_device, task_options
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import crashes_refused, loaded, loaded_models
from netkin.cli.statistics import held_by, opened, refuse_result, warn_of_missing
from netkin.errors import NameClash

if TYPE_CHECKING:
    from netkin.results import Comparisons

EXAMPLE = """\b
Example:
  netkin tasks seen=netkin:digits,digits:train fresh=netkin:digits,digits:test --examples 300 --report tasks.html
"""


@click.command(epilog=EXAMPLE)
@click.argument("tasks", nargs=-1, required=True, metavar="NAME=MODEL,DATA|NAME=STATISTICS ...")
@task_options
@click.option("--save", type=FILE, help="Write the comparisons to this file, as tasks.netkin.")
@click.option("--report", type=FILE, help="Write a page for the browser to this file, as tasks.html.")
@click.option("--figure", type=FILE, help="Draw the blocks of all pairs into this file, as tasks.png, .svg or .pdf.")
@FORCE
@JSON
@refusing
def tasks(
    tasks: tuple[str, ...],
    save: Path | None,
    report: Path | None,
    figure: Path | None,
    force: bool,
    json: bool,
    **options: Any,
) -> None:
    """Compare tasks block by block: models of any architecture, each with its own data of any size.

    Each model runs once over its data, forward and backward. Features and gradients are summed into random buckets, and
    all pairs, also each task with itself, are read from these sketches; values are means over --seeds. STATISTICS is a
    file of such sketches, which `netkin collect` wrote for one model.
    """
    given = dict(map(_taken_apart, tasks))
    if len(given) < len(tasks):
        names = [_taken_apart(one)[0] for one in tasks]
        raise NameClash(f"two tasks are named {max(names, key=names.count)!r}; give each a name of its own.")
    outputs = Outputs(force, *(part for parts in given.values() for part in parts))
    outputs.check("--save", save, "comparisons")
    outputs.check("--report", report, "page")
    outputs.check("--figure", figure, "figure")
    found = _compared(given, **options)
    outputs.write(save, found.save, f"saved to {save}")
    outputs.draw(found, report, figure)
    click.echo(as_json(found) if json else str(found))
    outputs.finish()


def _taken_apart(task: str) -> tuple[str, list[str]]:
    """Return the name of a task and its model and data, or the file of its sketches.

    Example:
        >>> _taken_apart("t=netkin:tiny10,width=4@w.pt,images,size=64:DIR")
        ('t', ['netkin:tiny10,width=4@w.pt', 'images,size=64:DIR'])
    """
    name, equals, rest = task.partition("=")
    # an option such as width=4 belongs to what stands before it
    found = [name, *re.split(r",(?!\w+=)", rest, maxsplit=1)]
    if equals and name and rest and len(found) == 2 and held_by(rest) == "statistics":
        return name, [rest]
    if equals and name and len(found) == 2:
        refuse_result(rest)
    if not (equals and len(found) == 3 and all(found)):
        raise click.BadParameter(
            f"a task is written NAME=MODEL,DATA, as in seen=netkin:digits,digits:train, or NAME=STATISTICS, a file of "
            f"sketches; got {task!r}.",
            param_hint="TASKS",
        )
    return name, found[1:]


def _compared(
    given: dict[str, list[str]], batch_size: int, balanced: bool, seed: int, independent_buckets: bool, **options: Any
) -> Comparisons:
    """Load what was named and call the library."""
    from netkin.applications.transfer import compare_tasks

    refuse_absent_device(options["device"])
    specs = {name: parts[0] for name, parts in given.items() if len(parts) == 2}
    models = dict(zip(specs, loaded_models(list(specs.values())), strict=True))
    made: dict[str, Any] = {}
    for name, parts in given.items():
        if name in models:
            data = loaded(parts[1], batch_size, options["examples"], seed, balanced, [parts[0]])
            made[name] = (models[name], data)
        else:
            made[name] = opened(Path(parts[0]))
            warn_of_missing(made[name])
    options |= {name: list(options[name]) or None for name in ("measures", "layers")}
    with crashes_refused(list(specs.values()), list(models.values())):
        return compare_tasks(made, **options, share_buckets=not independent_buckets)
