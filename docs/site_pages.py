"""Pages that exist in the site alone, made while MkDocs builds it: the API reference and the notebooks.

MkDocs calls `on_config` and `on_files`. The reference has a page for each room and an entry for each public name, whose
text mkdocstrings takes from the docstring. A notebook is executed, so that the page shows what the code returns.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import nbformat

import netkin

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))
ROOMS = {
    "comparing": "Comparing",
    "measures": "Measures",
    "results": "Results",
    "reporting": "Pages and figures",
    "sources": "Models and data by name",
    "representations": "Representations",
    "statistics": "Statistics",
    "training": "Training",
    "jobs": "Jobs",
    "identity": "Identity",
    "files": "Files",
    "errors": "Errors and warnings",
    "applications": "Applications",
    "integrations": "Integrations",
}
FIRST = ("nk.compare", "nk.cka", "nk.learn_tasks", "nk.recommend", "nk.sparsify")  # they begin their pages


def on_config(config: Any) -> Any:
    """Put the pages of the reference into the navigation."""
    place = next(item for item in config.nav if "API" in item)
    place["API"] = [{title: f"api/{page_name(module)}"} for module, title in room_modules().items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the reference and of the notebooks to those that MkDocs found."""
    from mkdocs.structure.files import File

    pages = {f"api/{name}": text for name, text in api_pages().items()}
    pages |= {f"notebooks/{path.stem}.md": notebook_page(path.read_text()) for path in NOTEBOOKS}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


# --- the API reference ------------------------------------------------------------------------------------------------


@cache
def api_pages() -> dict[str, str]:
    """Return the text of each page of the reference by its file's name: a page for each room and application."""
    pages: dict[str, str] = {}
    known: set[str] = set()
    for module, title in room_modules().items():
        entries = [entry(name, thing) for name, thing in public_names(module).items() if new(thing, known)]
        about = (inspect.getdoc(import_module(module)) or "").partition("\n")[0]
        pages[page_name(module)] = "\n".join([f"# {title}\n", f"`{module}`: {about}\n", *entries])
    return pages


def page_name(module: str) -> str:
    """Return the name of the file of a room's page."""
    return f"{module.rsplit('.')[-1]}.md"


def room_modules() -> dict[str, str]:
    """Return the modules that have a page, with its title, in the order of the navigation."""
    found: dict[str, str] = {}
    for room, title in ROOMS.items():
        path = import_module(f"netkin.{room}").__path__ if room == "applications" else []
        inner = sorted(one.name for one in iter_modules(path))
        found |= {f"netkin.{room}.{name}": name.capitalize() for name in inner} or {f"netkin.{room}": title}
    return found


def public_names(module: str) -> dict[str, Any]:
    """Return a room's public functions and classes by the name under which they are called, functions first."""
    homes = netkin._HOME
    found = {f"nk.{name}": getattr(netkin, name) for name, home in homes.items() if within(home, module)}
    for inner in [module, *inner_modules(module)]:
        names = [] if inner == "netkin.files" else getattr(import_module(inner), "__all__", None) or own_names(inner)
        found |= {f"{inner}.{name}": getattr(import_module(inner), name) for name in names if name not in homes}
    found = {name: found[name] for name in sorted(found, key=lambda name: name not in FIRST)}
    return {
        name: thing for kind in (inspect.isroutine, inspect.isclass) for name, thing in found.items() if kind(thing)
    }


def inner_modules(module: str) -> list[str]:
    """Return the modules of adapters, which are imported one by one; other rooms hand out their names themselves."""
    if module != "netkin.integrations":
        return []
    return [f"{module}.{one.name}" for one in iter_modules(import_module(module).__path__)]


def own_names(module: str) -> list[str]:
    """Return the public functions and classes that a module without `__all__` defines."""
    contents = vars(import_module(module)).items()
    return [name for name, thing in contents if not name.startswith("_") and getattr(thing, "__module__", "") == module]


def within(home: str, module: str) -> bool:
    """Return whether the module `home` is `module` or lies in it."""
    return home == module or home.startswith(f"{module}.")


def new(thing: Any, known: set[str]) -> bool:
    """Return whether a function or class has no entry yet, and note that it has one now."""
    path = path_of(thing)
    fresh = path not in known
    known.add(path)
    return fresh


def path_of(thing: Any) -> str:
    """Return where a function or class is defined."""
    return f"{thing.__module__}.{thing.__qualname__}"


def entry(name: str, thing: Any) -> str:
    """Return the lines that make mkdocstrings describe one name."""
    label = name.rsplit(".", 1)[-1]
    return f"::: {path_of(thing)}\n    options:\n      heading: {name}\n      toc_label: {label}\n"


# --- notebooks --------------------------------------------------------------------------------------------------------


@cache
def notebook_page(text: str) -> str:
    """Return the page of a notebook: it is executed in an empty folder, and its cells and outputs become Markdown."""
    cells = executed(text).cells
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def executed(text: str) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of its cells; a cell that raises ends it."""
    from tempfile import TemporaryDirectory

    from nbclient import NotebookClient

    notebook = nbformat.reads(text, as_version=4)
    with TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=place).execute()
    return notebook


def cell_parts(cell: nbformat.NotebookNode) -> list[str]:
    """Return a cell's text and the outputs below it, each as Markdown."""
    if cell.cell_type == "markdown":
        return [cell.source]
    return [f"```python\n{cell.source}\n```", *filter(None, map(output_part, cell.outputs))]


def output_part(output: nbformat.NotebookNode) -> str:
    """Return an output in the richest form that it has: HTML, a picture, or text."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    shown = output.data
    if "text/html" in shown:
        return f'<div class="notebook-output">\n{shown["text/html"]}\n</div>'
    if "image/png" in shown:
        return f'<img alt="figure" src="data:image/png;base64,{shown["image/png"].strip()}">'
    return f"```text\n{shown['text/plain']}\n```"
