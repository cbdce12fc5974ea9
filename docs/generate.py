"""Write the pages that are made from the code: `measures.md` and `cli.md`. With ``--check``, say if one is old."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path

import click

from netkin.cli import cli
from netkin.measures import Measure, measures

FOLDER = Path(__file__).parent
MEASURES = """# Measures

Made from what the code declares, by `make docs`. X is n × p, Y is n × q, rows are the same examples. Parameters are
written as `svcca(variance=0.95)`; an id without them means their defaults.

| measure | what it says | direction, range | unchanged by | reads | a metric |
|---|---|---|---|---|---|
"""
COMMANDS = """# Command line

Made from the commands themselves, by `make docs`; `netkin COMMAND --help` says the same.

"""


# --- measures.md ------------------------------------------------------------------------------------------------------


def page_of_measures() -> str:
    """Return the text of `docs/measures.md`."""
    found = sorted(measures().values(), key=lambda measure: measure.name)
    return MEASURES + "".join(map(row, found)) + "\n" + "\n".join(map(section, found))


def row(measure: Measure) -> str:
    """Return a measure's line of the table."""
    facts = measure.facts
    direction = "similarity" if facts.higher_is_closer else "distance"
    unchanged = ", ".join(sorted(facts.unchanged_by)) or "–"
    name = f"[`{measure.name}`](#{measure.name})"
    says = measure.summary.removeprefix("Return ").rstrip(".")
    return (
        f"| {name} | {says} | {direction}, {bounds(measure)}{'' if facts.symmetric else ', asymmetric'} | {unchanged} "
        f" | {facts.reads.__name__} | {'yes' if facts.is_metric else ''} |\n"
    )


def section(measure: Measure) -> str:
    """Return a measure's own paragraph."""
    text = inspect.getdoc(measure.function) or ""
    text = text.partition("\nExample:")[0].replace("``", "`").strip()
    defaults = ", ".join(f"`{name}={value}`" for name, value in measure.defaults.items())
    lines = [f"## {measure.name}", "", text, "", f"*Convention:* {measure.facts.convention}."]
    lines += [f"*Parameters:* {defaults}."] if defaults else []
    return "\n".join([*lines, f"*Reference:* {measure.facts.reference}.", ""])


def bounds(measure: Measure) -> str:
    """Return the range of a measure in figures."""
    named = {math.pi / 2: "π/2", math.sqrt(2): "√2", math.inf: "∞"}
    low, high = (named.get(bound, f"{bound:g}") for bound in measure.facts.bounds)
    return f"{low} to {high}"


# --- cli.md -----------------------------------------------------------------------------------------------------------


def page_of_commands() -> str:
    """Return the text of `docs/cli.md`."""
    return COMMANDS + paragraphs(cli) + "\n" + "\n".join(command(name, one) for name, one in cli.commands.items())


def command(name: str, one: click.Command) -> str:
    """Return a command's own part: what it does, its usage, its options and its example."""
    context = click.Context(one, info_name=f"netkin {name}")
    usage = " ".join([context.command_path, *one.collect_usage_pieces(context)])
    records = [option.get_help_record(context) for option in one.params if isinstance(option, click.Option)]
    options = "".join(f"| `{names.replace('|', ' or ')}` | {text} |\n" for names, text in filter(None, records))
    table = f"| option | meaning |\n|---|---|\n{options}\n" if options else ""
    return f"## netkin {name}\n\n{paragraphs(one)}\n{fenced(usage)}\n{table}{fenced(example(one), 'bash')}"


def paragraphs(one: click.Command) -> str:
    """Return a command's text; what click must not wrap is fenced."""
    parts = inspect.cleandoc(one.help or "").split("\n\n")
    return "\n".join(fenced(part[1:].strip()) if part.startswith("\b") else f"{part}\n" for part in parts)


def example(one: click.Command) -> str:
    """Return the example that ends a command's help."""
    return (one.epilog or "").partition("Example:")[2].strip()


def fenced(text: str, language: str = "") -> str:
    """Return `text` as a block of code."""
    return f"```{language}\n{text}\n```\n"


PAGES = {"measures.md": page_of_measures, "cli.md": page_of_commands}


def out_of_date() -> list[str]:
    """Return the names of the pages that do not say what the code says."""
    files = {name: FOLDER / name for name in PAGES}
    return [name for name, file in files.items() if not file.exists() or file.read_text() != PAGES[name]()]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page())
    elif out_of_date():
        sys.exit(f"out of date: {', '.join(f'docs/{name}' for name in out_of_date())}; run `make docs`.")
