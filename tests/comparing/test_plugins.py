"""Statistics and measures of another package go everywhere that ours go, with no line about them in netkin."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue
from netkin.measures import find, measures, registry

TESTS = Path(__file__).parents[1]
ASKED = ["sign_agreement", "sign_agreement(threshold=0.3)", "kernel_cosine", "batch_alignment", "cka"]


@pytest.fixture
def theirs(monkeypatch):
    """The module of another package, offered by an entry point; its measures are gone afterwards."""
    measures()
    monkeypatch.setattr(registry, "_MEASURES", dict(registry._MEASURES))
    monkeypatch.delitem(sys.modules, "plugin_world", raising=False)
    entry = EntryPoint("theirs", "plugin_world", "netkin.measures")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == entry.group else [])
    registry.broken_packages.cache_clear()
    measures()
    yield sys.modules["plugin_world"]
    registry.broken_packages.cache_clear()


def expected(model_a, model_b, images, measure, x, y):
    """Return the value by NumPy, from rows recorded apart."""
    if measure == "kernel_cosine":
        u, v = (dict(m.named_modules())[n].weight.detach().numpy().ravel() for m, n in ((model_a, x), (model_b, y)))
        return u @ v / (np.linalg.norm(u) * np.linalg.norm(v))
    rows = [nk.activations(m, n, images)[n].numpy() for m, n in ((model_a, x), (model_b, y))]
    s, t = (np.sign(Z.sum(1) - find(measure).settings["threshold"]) for Z in rows)
    return (s * t).mean()


# --- one pass ---------------------------------------------------------------------------------------------------------


def test_their_measures_are_compared_in_one_pass_beside_ours(theirs, maps, images, layers):
    a, b = maps(), maps()
    found = nk.compare(a, b, list(images.split(16)), ASKED, layers=layers)
    assert a.calls == b.calls == 2 + len(images.split(16))
    for measure in ASKED[:3]:
        value = found[measure]["conv2", "conv2"]
        assert value == pytest.approx(expected(a, b, images, measure, "conv2", "conv2"), abs=1e-6)
    assert found["sign_agreement"]["conv1", "fc"] != found["sign_agreement(threshold=0.3)"]["conv1", "fc"]
    ours = nk.compare(a, b, list(images.split(16)), "cka_minibatch", layers=layers)
    assert found.to_numpy("batch_alignment") == pytest.approx(ours.to_numpy(), abs=1e-12)
    assert (found["sign_agreement"].statistic, found["kernel_cosine"].statistic) == ("Signs", "weights")


def test_their_caution_is_a_warning_of_the_result(theirs, maps, images):
    found = nk.compare(maps(), maps(), images[:8], "sign_agreement", layers="fc")
    assert [str(caveat) for caveat in found.caveats] == ["8 examples are few for signs; take 10."]


def test_their_measures_are_callable_with_two_matrices(theirs, worlds):
    X, Y = worlds.related(30, 4, 3)
    s, t = (np.sign(Z.sum(1) - 1) for Z in (X, Y))
    assert theirs.sign_agreement(X, Y, threshold=1.0) == pytest.approx((s * t).mean())


def test_explain_prices_their_collectors(theirs, maps, images, layers):
    plan = nk.explain(maps(), maps(), images, ASKED[:3], layers=layers)
    assert plan.measures == {
        "sign_agreement": "Signs about 0",
        "sign_agreement(threshold=0.3)": "Signs about 0.3",
        "kernel_cosine": "weights, as they are",
    }
    widths = sum(sum(own.values()) for own in plan.widths.values())
    assert plan.bytes == 2 * 8 * 6**2 + 8 * widths


def test_many_models_are_compared(theirs, maps, images, layers):
    models = {name: maps() for name in "abc"}
    many = nk.compare_many(models, images, ["sign_agreement", "kernel_cosine"], layers=layers)
    for measure in ("sign_agreement", "kernel_cosine"):
        value = expected(models["a"], models["c"], images, measure, "conv1", "conv1")
        assert many["a", "c"][measure]["conv1", "conv1"] == pytest.approx(value, abs=1e-6)


# --- merging, files, pages --------------------------------------------------------------------------------------------


def test_parts_are_saved_loaded_and_merged(theirs, maps, images, layers, tmp_path):
    a, b = maps(), maps()
    options = {"layers": layers, "errors": True, "chunks": 4}
    for part in (1, 2, 3):
        nk.collect(a, b, images, ASKED[:3], part=(part, 3), **options).save(tmp_path / f"{part}.netkin")
    merged = nk.merge([nk.load(tmp_path / f"{part}.netkin") for part in (2, 3, 1)])
    whole = nk.compare(a, b, images, ASKED[:3], **options)
    found = merged.compute()
    assert found.examples == 50
    for measure in ASKED[:3]:
        assert found.to_numpy(measure) == pytest.approx(whole.to_numpy(measure), abs=1e-12, nan_ok=True)
    assert found["sign_agreement"].replicates == pytest.approx(whole["sign_agreement"].replicates, abs=1e-12)
    found.save(tmp_path / "c.netkin")
    assert nk.load(tmp_path / "c.netkin") == found


def test_a_collector_that_holds_something_else_is_refused(theirs, maps, images):
    statistics = nk.collect(maps(), data=images, measures="sign_agreement(threshold=0.3)", layers="fc")
    with pytest.raises(
        InvalidValue, match="can't serve 'sign_agreement': they hold LayerSigns without the threshold 0"
    ):
        statistics.compute("sign_agreement")


def test_replicates_leave_out_the_examples_of_a_chunk(theirs, maps, images):
    a, b = maps(), maps()
    table = nk.compare(a, b, images, "sign_agreement", layers="fc", errors=True, chunks=4)["sign_agreement"]
    s, t = (np.sign(nk.activations(m, "fc", images)["fc"].numpy().sum(1)) for m in (a, b))
    of = theirs.chunk_of(np.arange(50), 4)
    assert table.chunk_sizes == tuple(np.bincount(of, minlength=4))
    assert table.replicates[:, 0, 0] == pytest.approx([(s * t)[of != chunk].mean() for chunk in range(4)])


def test_a_statistic_that_does_not_say_what_it_holds_goes_by_its_kind(theirs, maps, images, monkeypatch):
    monkeypatch.setattr(theirs.LayerSigns, "holds", "")
    found = nk.compare(maps(), maps(), images, "sign_agreement", layers="fc")
    assert found["sign_agreement"].statistic == "LayerSigns"


def test_a_statistic_without_chunks_has_no_standard_errors_and_says_so(theirs, maps, images, layers):
    found = nk.compare(maps(), maps(), images, ["kernel_cosine", "cka"], layers=layers, errors=True, chunks=5)
    assert found["kernel_cosine"].errors is None
    assert found["kernel_cosine"].error_reasons["fc", "fc"] == (
        "its statistic, weights, keeps no chunks of the examples"
    )
    assert np.isfinite(found["cka"].errors).all()


def test_the_page_shows_them(theirs, maps, images, layers, tmp_path):
    both = nk.compare(maps(), maps(), images, ["sign_agreement", "kernel_cosine"], layers=layers)
    page = nk.report(both, tmp_path / "page.html").read_text()
    assert "sign_agreement" in page
    assert "kernel_cosine" in page
    alone = nk.compare(maps(), maps(), measures="kernel_cosine")
    assert "from the weights alone: no data were run" in nk.report(alone, tmp_path / "alone.html").read_text()


@pytest.mark.slow
def test_an_installed_package_reaches_the_command_line(tmp_path):
    site = tmp_path / "site"
    (site / "theirs-1.0.dist-info").mkdir(parents=True)
    (site / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (site / "theirs-1.0.dist-info" / "entry_points.txt").write_text("[netkin.measures]\ntheirs = plugin_world\n")
    (site / "plugin_world.py").write_text((TESTS / "plugin_world.py").read_text())
    script = (
        f"import sys; sys.path[:0] = [{str(site)!r}, {str(TESTS.parent / 'src')!r}]\n"
        "from netkin.cli import cli\n"
        "options = '--data digits:test --measure sign_agreement --measure kernel_cosine --layers fc --json'.split()\n"
        "for extra in ([], ['--plan']):\n"
        "    cli(['compare', 'netkin:digits', 'netkin:digits', *options, *extra], standalone_mode=False)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    start = run.stdout.index("\n{") + 1
    comparison, plan = json.loads(run.stdout[:start]), json.loads(run.stdout[start:])
    assert "sign_agreement" in json.dumps(comparison)
    assert plan["measures"] == {"sign_agreement": "Signs about 0", "kernel_cosine": "weights, as they are"}


# --- weights alone ----------------------------------------------------------------------------------------------------


def test_weights_need_no_data_and_the_models_do_not_run(theirs, maps, tmp_path):
    a, b = maps(), maps()
    found = nk.compare(a, b, measures="kernel_cosine")
    assert (a.calls, b.calls, found.examples, found.needs_no_data) == (0, 0, 0, True)
    assert "from the weights alone: no data were run" in str(found)
    assert found["conv1", "conv1"] == pytest.approx(expected(a, b, None, "kernel_cosine", "conv1", "conv1"))
    plan = nk.explain(a, b, measures="kernel_cosine")
    assert (plan.examples, plan.passes, plan.pairs, plan.refused) == (0, 0, 9, "")
    assert "examples: none, the weights alone are compared" in str(plan)
    statistics = nk.collect(a, b, measures="kernel_cosine")
    statistics.save(tmp_path / "s.netkin")
    later = replace(found, provenance=dict(found.provenance) | {"call": "Comparer.compute()"})
    assert nk.load(tmp_path / "s.netkin").compute() == statistics.compute() == later
    many = nk.compare_many({"a": a, "b": b, "c": a}, measures="kernel_cosine")
    assert many["a", "c"]["fc", "fc"] == pytest.approx(1)
    assert a.calls == 0


def test_weights_alone_have_no_standard_errors(theirs, maps):
    found = nk.compare(maps(), maps(), measures="kernel_cosine", errors=True, chunks=5)
    assert "keeps no chunks" in found["kernel_cosine"].error_reasons["fc", "fc"]


def test_layers_without_weights_are_holes_with_the_reason(theirs, maps, images):
    found = nk.compare(maps(), maps(), images, ["cka", "kernel_cosine"], layers=["conv1", "relu"])
    assert found["kernel_cosine"].missing["relu", "conv1"] == "layer 'relu' of 'a' has no weights"
    assert np.isfinite(found["cka"].to_numpy()).all()


def test_a_set_of_weights_is_a_subject(theirs, maps, images):
    a, b = maps(), maps()
    found = nk.compare(nk.ModelInput(weights=a.state_dict()), b, measures="kernel_cosine")
    assert found.to_numpy() == pytest.approx(nk.compare(a, b, measures="kernel_cosine").to_numpy(), nan_ok=True)
    with pytest.raises(InvalidValue, match="'a' is a set of weights, which can't be run; pass the model"):
        nk.compare(nk.ModelInput(weights=a.state_dict()), b, images, ["cka", "kernel_cosine"])
    with pytest.raises(InvalidValue, match="'a' has no weights; pass the model"):
        nk.compare({"x": images.flatten(1)}, measures="kernel_cosine")


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def both_right(theirs):
    """A measure that is fed by outputs: how often both models are right."""

    class Answers(theirs.LayerSigns):
        kind, feeds = "Answers", frozenset({"outputs"})

        def update(self, rows, numbers=None, **more):
            given = [rows["outputs"][model] for model, _ in self.names]
            right = torch.stack([(logits.argmax(1) == labels).double() for logits, labels in given])
            self.sums[0] += right @ right.T
            self.counts[0] += len(numbers)

        def pair(self, a, b, without=None):
            found = super().pair(a, b, without)
            return Pair(found.total, found.n)

    Pair = type("Pair", (theirs.Signs,), {"collectors": (Answers,)})
    Answers.settings_for = classmethod(lambda cls, measure: theirs.SignSettings())
    offer(Pair, "both_right")


def test_outputs_come_with_their_labels(both_right, maps, images):
    models = [maps().eval() for _ in range(3)]
    with torch.no_grad():
        answers = [model(images).argmax(1) for model in models]
    labels = torch.where(torch.arange(len(images)) % 2 == 0, *answers[:2])
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    wanted = pytest.approx(float((answers[0] == answers[1]).double().mean()), abs=1e-12)  # as then both are right
    assert nk.compare(*models[:2], batches, ["cka", "both_right"], layers="fc")["both_right"]["fc", "fc"] == wanted
    many = nk.compare_many(models, batches, "both_right", layers="fc", progress=False)
    assert many["0", "1"]["both_right"]["fc", "fc"] == wanted
    parts = [
        nk.collect(*models[:2], [batch], "both_right", layers="fc", start=16 * i) for i, batch in enumerate(batches)
    ]
    assert nk.merge(parts).compute()["both_right"]["fc", "fc"] == wanted


def test_outputs_that_are_no_numbers_or_not_there_are_refused(both_right, maps, images):
    data = [(images, torch.zeros(len(images)))]
    with pytest.raises(InvalidValue, match="the output of 'a' in batch 0 holds .* NaN"):
        nk.compare(maps(), maps(), data, "both_right", forward=lambda model, batch: model(batch[0]) * float("nan"))
    with pytest.raises(InvalidValue, match="'a' holds recorded rows, which have no outputs; pass the model"):
        nk.compare({"x": images.flatten(1)}, measures="both_right")


# --- what a package may get wrong -------------------------------------------------------------------------------------


def offer(pair, name):
    """Register a measure `name` that reads `pair`."""

    def read(given):
        """Return nothing of interest."""
        return given.total / given.n

    read.__name__ = read.__qualname__ = name
    read.__annotations__ = {"given": pair}
    nk.measure(higher_is_closer=True, bounds=(-1, 1), unchanged_by=[], reference="nobody")(read)


def test_a_pair_type_without_collectors_is_for_matrices_only(theirs, maps, images, tmp_path):
    offer(type("Bare", (theirs.Signs,), {"collectors": ()}), "bare")
    with pytest.raises(
        InvalidValue, match="'bare' can be called with two matrices and no more: Bare.* no `collectors`"
    ):
        nk.compare(maps(), maps(), images, "bare")
    nk.collect(maps(), data=images, layers="fc").save(tmp_path / "s.netkin")
    assert nk.load(tmp_path / "s.netkin").compute("cka")["fc", "fc"] == pytest.approx(1)


def test_files_are_read_by_the_collectors_of_their_own_measures(theirs, maps, images, tmp_path):
    kind = type("Other", (theirs.LayerSigns,), {"kind": "LayerMoments"})  # a name that is taken
    offer(type("Pair", (theirs.Signs,), {"collectors": (kind,)}), "other")
    nk.collect(maps(), data=images, layers="fc").save(tmp_path / "s.netkin")
    assert nk.load(tmp_path / "s.netkin").compute("cka")["fc", "fc"] == pytest.approx(1)


def test_layers_that_no_collector_fits_are_refused(theirs, maps, images, monkeypatch):
    monkeypatch.setattr(theirs.LayerSigns, "cost", lambda settings, study: None)
    with pytest.raises(InvalidValue, match="no collector of 'sign_agreement' fits these layers"):
        nk.compare(maps(), maps(), images, "sign_agreement")


def test_masked_tokens_come_with_their_owners(theirs, words, sentences):
    seen = []

    class Owned(theirs.LayerSigns):
        kind, numbers_rows = "Owned", True

        def update(self, rows, numbers=None, *, owners=None):
            seen.append((numbers, owners))

    offer(type("Pair", (theirs.Signs,), {"collectors": (Owned,), "total": torch.ones(()), "n": 1}), "owned")
    Owned.settings_for = classmethod(lambda cls, measure: theirs.SignSettings())
    nk.collect(words(), data=sentences, measures="owned", layers="embed", shape="tokens")
    lengths = [batch["attention_mask"].sum(1).tolist() for batch in sentences]
    for (numbers, owners), own in zip(seen, lengths, strict=True):
        assert np.bincount(owners["a", "embed"]).tolist() == own
        assert len(numbers) == len(own)
