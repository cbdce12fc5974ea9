import gzip
import html
import json
import math
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from netkin.reporting import report
from netkin.results import Comparison, Series, document
from netkin.results.caveats import Caveat
from table_worlds import table_of

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
    words = {"symmetric": True, "convention": "biased HSIC, centred", "statistic": "Moments", "exactness": "exact"}
    return table_of(id=id, layers_a=rows, layers_b=columns, **(facts | words | changes))


def jackknifed(make=None, chunks=8, spread=0.02, shift=0.0, seed=0, **changes):
    """A table off its bounds with replicates whose chunks have unequal sizes; `shift` gives it a bias."""
    plain = (make or table)(**changes)
    noise, sizes = np.random.default_rng(seed).normal(size=(chunks, *plain.values.shape)), np.arange(20, 20 + chunks)
    noise -= np.average(noise, axis=0, weights=1 - sizes / sizes.sum())
    values = 0.97 * plain.values
    replicates = values + spread * noise / math.sqrt(chunks) + shift
    return replace(plain, values=values, replicates=replicates, chunk_sizes=tuple(sizes.tolist()))


def distance(id="procrustes_distance", rows=("conv1", "conv2", "head"), **changes):
    values = math.sqrt(2) * (1 - table(rows=rows).values)
    return table(id, rows, **({"values": values, "higher_is_closer": False, "bounds": (0, math.sqrt(2))} | changes))


def holed(id="svcca", **changes):
    values, holes = table().values.copy(), {("conv2", "head"): "layer 'head' is constant over the data"}
    values[1, 2] = np.nan
    return table(id, **({"values": values, "missing": holes} | changes))


def diagonal(values=0.9, id="cka", rows=("conv1", "conv2", "head"), **changes):
    """A table of which only the layers of the same name were asked for; NaN among them is a hole with a reason."""
    matrix = np.full((len(rows), len(rows)), np.nan)
    np.fill_diagonal(matrix, values)
    holes = {(x, y): "this pair was not asked for" for x in rows for y in rows if x != y}
    holes |= {
        (x, x): f"{x} can't be joined" for x, value in zip(rows, matrix.diagonal(), strict=True) if value != value
    }
    return table(id, rows, **{"values": matrix, "missing": holes} | changes)


def stitched(values=0.9, how="least_squares", score="relative_accuracy", **changes):
    """What stitches of layers of the same name are worth."""
    higher = score != "cross_entropy"
    facts = {
        "name": score,
        "parameters": {"method": how},
        "kind": "score",
        "bounds": (0, math.inf),
        "higher_is_closer": higher,
    }
    return diagonal(values, f"{score}(method={how})", **{"symmetric": False} | facts | changes)


def sweep(**changes):
    """Two methods by two scores beside a similarity; by the cross-entropy the second method is the better one."""
    tables = [diagonal([0.9, 0.7, 0.8])]
    tables += [stitched([1.0, 0.6, 0.9], how) for how in ("least_squares", "task_loss")]
    tables += [
        stitched([0.5, 1.06, 0.9], score="cross_entropy"),
        stitched([0.4, 0.85, 0.8], "task_loss", "cross_entropy"),
    ]
    return comparison(*tables, **changes)


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
    words = {"convention": HOSTILE, "statistic": HOSTILE, "exactness": HOSTILE, "parameters": {"x": HOSTILE}}
    own = table(HOSTILE, rows, values=values, missing=holes, name=HOSTILE, **words)
    said = {
        "caveats": (Caveat(HOSTILE, HOSTILE),),
        "provenance": {HOSTILE: HOSTILE},
        "data": HOSTILE,
        "version": HOSTILE,
    }
    return comparison(own, a=HOSTILE, b="b", shapes_a=dict.fromkeys(rows, HOSTILE), **said)


def large(layers=60):
    rows = tuple(f"stage{i // 15}.block{i % 15}.conv2" for i in range(layers))
    noise = np.random.default_rng(0).random((4, layers, layers))
    ids = ("cka", "svcca", "procrustes_distance", "nbs")
    return comparison(*(table(id, rows, values=values) for id, values in zip(ids, noise, strict=True)))


def growing(step, final, rows, distance=False):
    """Layers on their way: at `step` the lower a layer, the nearer it is to its final state."""
    depth = np.arange(len(rows))
    pace = 2 - 1.2 * depth / max(len(rows) - 1, 1)
    done = np.clip(np.log1p(step) / np.log1p(final) * pace + (step == final), 0, 1)[:, None]
    alike = np.exp(-np.abs(depth[:, None] - depth) / 2)
    values = done * alike + (1 - done) * alike * 0.5
    return np.sqrt(2 * (1 - values)) if distance else values


def step_tables(step, final, rows, measures, constant):
    """The tables at one step; before step `constant` the second layer is constant."""
    for id in measures:
        is_distance = "distance" in id
        values, holes = growing(step, final, rows, is_distance), {}
        if step < constant:
            values[1, :] = np.nan
            holes = {(rows[1], column): f"layer {rows[1]!r} is constant over the data" for column in rows}
        make = distance if is_distance else table
        yield make(id, rows, values=values, missing=holes)


def series(steps=(0, 10, 100, 1000), rows=("conv1", "conv2", "fc", "head"), measures=("svcca",), constant=0, **changes):
    facts = {key: changes.pop(key) for key in ("caveats", "complete") if key in changes}
    facts |= {} if measures else {"tables": {}}
    comparisons = [
        comparison(
            *step_tables(step, steps[-1], rows, measures, constant),
            a=f"run@{step}",
            b=f"run@{steps[-1]}",
            provenance={"device": "cpu", "checkpoint": f"step_{step}.pt"},
            **facts,
        )
        for step in steps
    ]
    known = {"run": "run", "steps": steps, "comparisons": comparisons, "final_step": steps[-1]}
    return Series(**(known | {"provenance": {"folder": "runs/a"}} | changes))


def large_series(layers=30, steps=50):
    return series(tuple(range(0, 1000 * steps, 1000)), tuple(f"stage{i // 10}.block{i % 10}" for i in range(layers)))


def page_in(text):
    """Return the JSON document of a page, its packed numbers as lists."""
    told = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])
    arrays = [np.frombuffer(b64decode(one["float64"]), "<f8").reshape(one["shape"]) for one in told.pop("numbers", [])]
    lists = [np.where(np.isnan(array), None, array).tolist() for array in arrays]
    told["results"] = json.loads(gzip.decompress(b64decode(told["results"])))

    def whole(part):
        if isinstance(part, list):
            return list(map(whole, part))
        if not isinstance(part, dict):
            return part
        return lists[part["numbers"]] if list(part) == ["numbers"] else {name: whole(own) for name, own in part.items()}

    return whole(told)


def blocks_in(text, kind=None):
    """Return all blocks of a page, or those of one kind, in their order."""

    def gather(own):
        inside = [block for name in ("blocks", "origins", "choices") for block in own.get(name, [])]
        return [own, *(block for one in inside for block in gather(one))]

    return [block for block in gather(page_in(text)) if kind in (None, block.get("kind"))]


def documents_in(text):
    """Return the texts that a page saves as JSON, one for each of its choices."""
    return list(map(json.dumps, page_in(text)["results"]))


def charts_in(text):
    """Return what the line charts of a page hold, each as a mapping, with the paths of its lines and of their bars."""
    found = []
    charts = {block["key"]: block["chart"] for block in blocks_in(text, "lines")}
    for field in re.split(r'(?=<div class="field")', text)[1:]:
        told = re.search(r'data-chart="([^"]*)"', field)
        if told is None:  # a histogram
            continue
        chart = dict(charts[html.unescape(told[1])])
        drawn = field.partition("</svg>")[0]
        chart["paths"] = re.findall(r'<path d="([^"]*)" class="way"', drawn)
        chart["bars"] = re.findall(r'<path d="M([\d.]+) ([\d.]+)V([\d.]+)" class="whisker"', drawn)
        chart["ticks"] = {float(t): float(top) for top, t in re.findall(r"top:([\d.]+)%[^>]*>([\d.]+)</span>", field)}
        found.append(chart)
    return found


@pytest.fixture(scope="session")
def made():
    """Small results to look at: `made.table()`, `made.comparison(*tables)`, `made.series()`, `made.hostile()`, ..."""
    return SimpleNamespace(
        table=table, distance=distance, holed=holed, comparison=comparison, hostile=hostile, large=large, NAME=HOSTILE,
        series=series, large_series=large_series, diagonal=diagonal, stitched=stitched, sweep=sweep,
        jackknifed=jackknifed, charts_in=charts_in, page_in=page_in, blocks_in=blocks_in,
    )  # fmt: skip


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
def saved_by():
    """Return a function that says whether a page saves, for each of its choices, the documents of these results."""

    def is_saved(text, *results):
        told = [list(map(document, one)) if isinstance(one, list) else document(one) for one in results]
        return [json.loads(one) for one in documents_in(text)] == json.loads(json.dumps(told))

    return is_saved


@pytest.fixture
def opened(browser, tmp_path):
    """`opened(results, width=390, dark=True)` writes the report and opens it; troubles and requests fail the test."""
    contexts, troubles, page_address = [], [], (tmp_path / "page.html").as_uri()

    def asked(request):
        if request.url.partition("#")[0] != page_address and not request.url.startswith(("blob:", "data:")):
            troubles.append(f"request: {request.url}")

    def open_page(results, width=1280, dark=False, hash="", calm=False):
        report(results, tmp_path / "page.html", overwrite=True)
        scheme, motion = "dark" if dark else "light", "reduce" if calm else "no-preference"
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", asked)
        page.goto(page_address + hash)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles
