import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from netkin.reporting import report
from netkin.results import Comparison, Values

HOSTILE = "</script><img src=x onerror=alert(1)>"


def table(id="cka", rows=("conv1", "conv2", "head"), columns=None, **changes):
    columns = rows if columns is None else columns
    closeness = 1 / (1.1 + np.abs(np.arange(len(rows))[:, None] - np.arange(len(columns)) * 0.9))
    facts = {
        "name": id.split("(")[0],
        "parameters": {},
        "values": closeness,
        "higher_is_closer": True,
        "bounds": (0, 1),
    }
    words = {"symmetric": True, "conventions": "biased HSIC, centred", "statistic": "Moments", "exactness": "exact"}
    return Values(id=id, layers_a=rows, layers_b=columns, **(facts | words | changes))


def distance(id="procrustes_distance", rows=("conv1", "conv2", "head"), **changes):
    values = math.sqrt(2) * (1 - table(rows=rows).values)
    return table(id, rows, **({"values": values, "higher_is_closer": False, "bounds": (0, math.sqrt(2))} | changes))


def holed(id="svcca", **changes):
    values, holes = table().values.copy(), {("conv2", "head"): "layer 'head' is constant over the data"}
    values[1, 2] = np.nan
    return table(id, **({"values": values, "holes": holes} | changes))


def comparison(*tables, a="seed0", b="seed1", **changes):
    tables = tables or (table(), distance())
    rows, columns = tables[0].layers_a, tables[0].layers_b
    shapes = {"shapes_a": dict.fromkeys(rows, "pool"), "shapes_b": dict.fromkeys(columns, "pool")}
    widths = {"widths_a": dict.fromkeys(rows, 16), "widths_b": dict.fromkeys(columns, 32)}
    facts = {"data": "digits", "examples": 1797, "seed": 7, "version": "0.1.0", "provenance": {"device": "cpu"}}
    named = {"a": a, "b": b, "layers_a": rows, "layers_b": columns, "tables": {t.id: t for t in tables}}
    return Comparison(**(named | shapes | widths | facts | changes))


def hostile():
    rows = (HOSTILE, "a\u2028b", "=1+1", '"quoted", & more', "conv<b>2</b>")
    values, holes = table(rows=rows).values.copy(), {(HOSTILE, rows[1]): HOSTILE}
    values[0, 1] = np.nan
    words = {"conventions": HOSTILE, "statistic": HOSTILE, "exactness": HOSTILE, "parameters": {"x": HOSTILE}}
    own = table(HOSTILE, rows, values=values, holes=holes, name=HOSTILE, **words)
    said = {"warnings": (HOSTILE,), "provenance": {HOSTILE: HOSTILE}, "data": HOSTILE, "version": HOSTILE}
    return comparison(own, a=HOSTILE, b="b", shapes_a=dict.fromkeys(rows, HOSTILE), **said)


def large(layers=60):
    rows = tuple(f"stage{i // 15}.block{i % 15}.conv2" for i in range(layers))
    noise = np.random.default_rng(0).random((4, layers, layers))
    ids = ("cka", "svcca", "procrustes_distance", "nbs")
    return comparison(*(table(id, rows, values=values) for id, values in zip(ids, noise, strict=True)))


@pytest.fixture(scope="session")
def made():
    """Small results to look at: `made.table()`, `made.holed()`, `made.comparison(*tables)`, `made.hostile()`."""
    return SimpleNamespace(
        table=table, distance=distance, holed=holed, comparison=comparison, hostile=hostile, large=large, NAME=HOSTILE
    )


@pytest.fixture(scope="session")
def browser():
    """A Chromium without a window; where there is none, its tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium found on the path")
    with playwright.sync_playwright() as engine:
        chromium = engine.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """`opened(results, width=390, dark=True)` writes the report and opens it; troubles and requests fail the test."""
    contexts, troubles, page_address = [], [], (tmp_path / "page.html").as_uri()

    def asked(request):
        if request.url != page_address and not request.url.startswith(("blob:", "data:")):
            troubles.append(f"request: {request.url}")

    def open_page(results, width=1280, dark=False):
        report(results, tmp_path / "page.html")
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", asked)
        page.goto(page_address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles
