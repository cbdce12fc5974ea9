"""Who may import whom: the shortest description of the house."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import netkin.errors

HOUSE = Path(netkin.errors.__file__).parent

MAY_IMPORT = {
    "errors": "",
    "settings": "",
    "arrays": "errors settings",
    "files": "errors",
    "identity": "errors arrays progress",
    "memory": "",
    "progress": "errors",
    "jobs": "errors files progress",
    "results": "errors files",
    "statistics": "errors settings arrays files identity memory results",
    "measures": "errors settings arrays results statistics",
    "sources": "errors settings arrays files identity",
    "representations": "errors settings arrays identity progress sources",
    "comparing": "errors settings arrays files identity memory progress jobs results statistics measures sources "
    "representations",
    "training": "errors settings arrays files identity memory progress jobs results statistics measures sources "
    "representations",
    # `experiment`, and a folder a question; none of these imports another, which a test of its own sees to
    "applications": "errors settings arrays files identity memory progress jobs results statistics measures sources "
    "representations comparing training",
    "integrations": "errors arrays files identity memory progress jobs results statistics measures sources "
    "representations comparing training applications",
    # results open it by name when asked to draw themselves: `Comparison.plot`, and the view in a notebook
    "reporting": "errors files results",
    "cli": "everything",
    # the front door hands out names of all rooms, lazily
    "__init__": "errors arrays files identity memory progress jobs results statistics measures sources representations "
    "comparing training applications integrations reporting",
    "__main__": "cli",
}
WITHOUT_TORCH = ("errors", "files", "progress", "jobs", "results", "reporting")


def room_of(path, house=HOUSE):
    return path.relative_to(house).parts[0].removesuffix(".py")


parsed = cache(ast.parse)


def imports(source, module):
    """Yield (line, full dotted name) of all imports in `source`, those inside functions included."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def module_of(path, house=HOUSE):
    """Return a dotted name whose last part an import with one leading dot replaces."""
    return ".".join(["netkin", *path.relative_to(house).with_suffix("").parts])


def trespasses(path, house=HOUSE):
    """Yield a sentence for each import that the table does not allow."""
    own, allowed = room_of(path, house), MAY_IMPORT.get(room_of(path, house), "").split()
    for line, name in imports(path.read_text(encoding="utf-8"), module_of(path, house)):
        top, _, rest = name.partition(".")
        room = rest.split(".")[0]
        where = f"src/netkin/{path.relative_to(house)}:{line} imports {name}"
        if (
            top == "netkin"
            and not room.startswith("__")
            and room not in (own, *allowed)
            and "everything" not in allowed
        ):
            yield f"{where}; {own!r} may import only itself and: {', '.join(allowed) or 'nothing'}."
        if top == "torch" and own in WITHOUT_TORCH:
            yield f"{where}; {own!r} must be readable without torch."


def test_imports_look_to_the_left():
    found = [sentence for path in sorted(HOUSE.rglob("*.py")) for sentence in trespasses(path)]
    assert not found, "\n".join(["the table in tests/test_rooms.py does not allow this:", *found])


def test_every_room_stands_in_the_table():
    rooms = {room_of(path) for path in HOUSE.rglob("*.py")}
    assert rooms <= MAY_IMPORT.keys(), f"rooms missing from the table: {sorted(rooms - MAY_IMPORT.keys())}"


def neighbours(path, house=HOUSE):
    """Yield a sentence for each import by which one application looks into another."""
    own = path.relative_to(house).parts[1].removesuffix(".py")
    for line, name in imports(path.read_text(encoding="utf-8"), module_of(path, house)):
        parts = name.split(".")
        if parts[:2] == ["netkin", "applications"] and parts[2:3] not in ([], [own], ["experiment"]):
            yield f"src/netkin/{path.relative_to(house)}:{line} imports {name}; the applications don't know each other."


def test_no_application_imports_another():
    found = [sentence for path in sorted((HOUSE / "applications").rglob("*.py")) for sentence in neighbours(path)]
    assert not found, "\n".join(found)


def test_a_look_into_another_application_is_noticed(tmp_path):
    path = tmp_path / "applications" / "dynamics" / "freezing.py"
    path.parent.mkdir(parents=True)
    path.write_text("from netkin.applications.compression import compress\nfrom .recorder import f")
    assert ["imports netkin.applications.compression.compress" in each for each in neighbours(path, tmp_path)] == [True]


@pytest.mark.parametrize(
    "line, fault",
    [
        (
            "import netkin.comparing.plan",
            "'measures' may import only itself and: errors, settings, arrays, results, statistics",
        ),
        ("from netkin import reporting", "imports netkin.reporting;"),
        ("from netkin.cli import cli", "imports netkin.cli.cli;"),
        ("from ..sources import models", "imports netkin.sources.models;"),
        ("from .. import sources", "imports netkin.sources;"),
        ("def f():\n    from netkin.sources.models import load_model", "cka.py:2 imports"),
        ("import netkin", "imports netkin;"),
    ],
)
def test_a_trespass_is_noticed(tmp_path, line, fault):
    (tmp_path / "measures").mkdir()
    path = tmp_path / "measures" / "cka.py"
    path.write_text(line)
    assert [fault in sentence for sentence in trespasses(path, tmp_path)] == [True]


@pytest.mark.parametrize(
    "line", ["from . import matrices", "from .matrices import f", "from netkin import __version__", "import torch"]
)
def test_what_is_allowed_passes(tmp_path, line):
    (tmp_path / "measures").mkdir()
    path = tmp_path / "measures" / "cka.py"
    path.write_text(line)
    assert not list(trespasses(path, tmp_path))


def test_torch_in_a_light_room_is_noticed(tmp_path):
    (tmp_path / "files.py").write_text("from torch import Tensor")
    assert "'files' must be readable without torch" in next(trespasses(tmp_path / "files.py", tmp_path))


@pytest.mark.parametrize(
    "start",
    [
        "import netkin",
        "import netkin.results",
        "import runpy\nsys.argv = ['netkin', '--help']\n"
        "try: runpy.run_module('netkin', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as leaving: assert not leaving.code",
    ],
    ids=["import netkin", "import netkin.results", "python -m netkin --help"],
)
def test_a_start_does_not_wait_for_torch(start):
    program = f"import sys\n{start}\nassert 'torch' not in sys.modules, 'torch was imported'"
    environment = os.environ | {"PYTHONPATH": str(HOUSE.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


PLACES = sorted(HOUSE.rglob("*.py"))


def test_no_two_files_have_one_name_outside_the_command_line():
    found: dict[str, list[str]] = {}
    for path in (path for path in PLACES if path.name != "__init__.py" and room_of(path) != "cli"):
        found.setdefault(path.name, []).append(str(path.relative_to(HOUSE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_file_has_a_line_in_the_map():
    text = (HOUSE.parent.parent / "docs" / "map.md").read_text(encoding="utf-8")
    files = {
        path.relative_to(HOUSE).as_posix()
        for path in PLACES
        if not path.name.startswith("__") or re.search(r"^(def|class) ", path.read_text(encoding="utf-8"), re.M)
    }
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", text.partition("## Every file")[2], re.M))
    assert listed == files, "`docs/map.md` has a line for each file; `python docs/generate.py` writes it"


def test_no_two_classes_have_one_name_in_the_house():
    found: dict[str, list[str]] = {}
    for path in (path for path in PLACES if room_of(path) != "cli"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(HOUSE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
