"""`netkin demo`: two small networks, trained on the spot and compared with each other and with an untrained one.

The results are also summarised in sentences that follow from the numbers.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click

from netkin.cli.options import OVERWRITE, command
from netkin.cli.outputs import SILENT, OutputFiles
from netkin.errors import InflatedWarning

if TYPE_CHECKING:
    from torch import nn

    from netkin.results import Comparison, Values


MEASURES = ["cka", "svcca(variance=0.95)", "procrustes_distance"]
LAYERS = ["relu1", "relu2", "relu3", "relu4", "fc"]


@command("demo --out netkin-demo")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    default="netkin-demo",
    show_default=True,
    help="Folder for the networks, the comparisons and the report.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="First of three random seeds."
)
@OVERWRITE
def demo(out: Path, seed: int, overwrite: bool) -> None:
    """Train two small networks on the bundled digits, compare them, explain the results and write a report.

    The two differ only in their seeds; a third network stays untrained. Takes a few seconds on a CPU.
    """
    first, second, untrained = names = (f"seed{seed}", f"seed{seed + 1}", "untrained")
    pairs = [(first, second), (first, untrained)]
    results, page = [out / f"{a}-{b}.netkin" for a, b in pairs], out / "report.html"
    weights = [out / f"{name}.safetensors" for name in names]
    out.mkdir(parents=True, exist_ok=True)
    outputs = OutputFiles(overwrite)
    for path in (*results, *weights, page):
        outputs.check("--out", path, (path.suffix,))
    networks = _networks(seed)
    comparisons = [_compare(networks, *pair) for pair in pairs]
    for comparison, path in zip(comparisons, results, strict=True):
        outputs.write(path, comparison.save)
    for model, path in zip(networks.values(), weights, strict=True):
        outputs.write(path, partial(_save_weights, model))
    outputs.write(page, partial(_report, comparisons))
    lost = {path for path, _ in outputs.faults}
    files = [path for path in (*results, *weights) if path not in lost]
    shown = [
        _accuracies(networks),
        *map(str, comparisons),
        _sentences(*comparisons),
        *([_files(files)] if files else []),
        *([] if page in lost else [_where_to_look(page)]),
    ]
    click.echo("\n\n".join(shown))
    outputs.finish()


def _networks(seed: int) -> dict[str, nn.Module]:
    from netkin.training import untrained_digits_net

    trained = {f"seed{s}": _train(s) for s in (seed, seed + 1)}
    return trained | {"untrained": untrained_digits_net(seed + 2)}


def _train(seed: int) -> nn.Module:
    from netkin.training import trained_digits_net

    if click.get_current_context().meta.get(SILENT):
        return trained_digits_net(seed)
    click.echo(f"training a network from seed {seed} on 1,437 digits ", err=True, nl=False)
    model = trained_digits_net(seed, progress=lambda epoch, loss: click.echo(".", err=True, nl=False))
    click.echo(" done", err=True)
    return model


def _compare(networks: dict[str, nn.Module], a: str, b: str) -> Comparison:
    from netkin.comparing.compare import compare as compare_models
    from netkin.sources import load_data

    with warnings.catch_warnings():
        # the comparison carries these warnings and its text shows them
        warnings.simplefilter("ignore", InflatedWarning)
        data = load_data("digits:test")
        return compare_models(networks[a], networks[b], data=data, measures=MEASURES, layers=LAYERS, names=(a, b))


def _save_weights(model: nn.Module, path: Path, *, overwrite: bool) -> None:
    from safetensors.torch import save

    from netkin import files

    files.write_bytes(path, save(model.state_dict()), overwrite=overwrite)


def _report(comparisons: list[Comparison], path: Path, *, overwrite: bool) -> None:
    from netkin.reporting import report

    report(comparisons, path, overwrite=overwrite)


def _where_to_look(page: Path) -> str:
    return f"Open the report in a browser\n  {page}"


def _accuracies(networks: dict[str, nn.Module]) -> str:
    from netkin.sources import load_data
    from netkin.training import accuracy

    data = load_data("digits:test")
    shares = ", ".join(f"{name} {accuracy(model, data):.1%}" for name, model in networks.items())
    return f"accuracy on {data.examples} digits that none of them saw: {shares}"


def _sentences(trained: Comparison, untrained: Comparison) -> str:
    return "\n".join(["What to notice", *(f"- {sentence}" for sentence in observations(trained, untrained))])


def _files(files: list[Path]) -> str:
    models = [f"netkin:digits@{file}" for file in files if file.suffix == ".safetensors" and file.stem != "untrained"]
    further = ["Go on with", f"  netkin compare {' '.join(models)} --data digits:test --measure pwcca"]
    return "\n".join(["Saved", *(f"  {file}" for file in files), *(further if len(models) == 2 else [])])


def observations(first: Comparison, second: Comparison) -> list[str]:
    """Return sentences about two comparisons that share their model `a`, their layers and their measures."""
    sentences = [_nearer_model(first, second, measure) for measure in first.measures]
    leading = first.measures[0]
    sentences += [_extremes(comparison, leading) for comparison in (first, second)]
    sentences += [_matches_of_same_name(comparison) for comparison in (first, second)]
    return [sentence for sentence in sentences if sentence]


def _nearer_model(first: Comparison, second: Comparison, measure: str) -> str:
    tables = first[measure], second[measure]
    if not all(table.corresponding() for table in tables):
        return ""
    one, other = (fmean(table.corresponding().values()) for table in tables)
    kind = "a similarity" if tables[0].higher_is_closer else "a distance"
    verdict = _verdict(first, second, one, other, tables[0].higher_is_closer)
    return (
        f"{measure}, {kind}: layers of the same name average {one:.2f} for {_pair(first)} and {other:.2f} for "
        f"{_pair(second)}, so {verdict}."
    )


def _verdict(first: Comparison, second: Comparison, one: float, other: float, higher_is_closer: bool) -> str:
    if round(one, 2) == round(other, 2):
        return f"{first.a} is as close to {first.b} as to {second.b}"
    nearer = first if (one > other) == higher_is_closer else second
    return f"{first.a} is closer to {nearer.b}"


def _extremes(comparison: Comparison, measure: str) -> str:
    table = comparison[measure]
    values = table.corresponding()
    if len(values) < 2:
        return ""
    ordered = sorted(values, key=lambda name: values[name], reverse=table.higher_is_closer)
    near, far = ordered[0], ordered[-1]
    return (
        f"By {measure}, {_pair(comparison)} are most alike at {near} ({values[near]:.2f}) and differ most at {far} "
        f"({values[far]:.2f})."
    )


def _matches_of_same_name(comparison: Comparison) -> str:
    counts = ", ".join(_match_count(name, table) for name, table in comparison.tables.items())
    return f"Layers of {comparison.a} whose closest layer in {comparison.b} is the one of the same name: {counts}."


def _match_count(name: str, table: Values) -> str:
    matches = table.best_matches()
    return f"{sum(layer == match for layer, (match, _) in matches.items())} of {len(table.layers_a)} by {name}"


def _pair(comparison: Comparison) -> str:
    return f"{comparison.a} and {comparison.b}"
