"""`netkin demo`: two small networks trained here and now, compared with each other and with an untrained one."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netkin.cli.noticing import observations
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.errors import InflatedWarning

if TYPE_CHECKING:
    from torch import nn

    from netkin.results import Comparison

MEASURES = ["cka", "svcca(variance=0.95)", "procrustes_distance"]
LAYERS = ["relu1", "relu2", "relu3", "relu4", "fc"]
EXAMPLE = """\b
Example:
  netkin demo --out netkin-demo
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    default="netkin-demo",
    show_default=True,
    help="The folder for the networks, the comparisons and the report.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="The first of three seeds."
)
@FORCE
@click.option("--quiet", is_flag=True, help="Show no progress.")
@refusing
def demo(out: Path, seed: int, force: bool, quiet: bool) -> None:
    """Train two small networks on the bundled digits, compare them, say what to notice and write a report.

    They differ in nothing but their seeds. A third network stays untrained. Takes a few seconds on a CPU.
    """
    first, second, untrained = names = (f"seed{seed}", f"seed{seed + 1}", "untrained")
    pairs = [(first, second), (first, untrained)]
    results, page = [out / f"{a}-{b}.netkin" for a, b in pairs], out / "report.html"
    weights = [out / f"{name}.safetensors" for name in names]
    out.mkdir(parents=True, exist_ok=True)
    outputs = Outputs(force)
    for kind, paths in (("comparison", results), ("weights", weights), ("page", [page])):
        for path in paths:
            outputs.check("--out", path, kind)
    networks = _networks(seed, quiet)
    comparisons = [_compared(networks, *pair) for pair in pairs]
    for comparison, path in zip(comparisons, results, strict=True):
        outputs.write(path, comparison.save)
    for model, path in zip(networks.values(), weights, strict=True):
        outputs.write(path, partial(_save_weights, model))
    outputs.write(page, partial(_report, comparisons))
    files = [*results, *weights]
    shown = [_accuracies(networks), *map(str, comparisons), _notes(*comparisons), _files(files), _ending(page)]
    click.echo("\n\n".join(shown))
    outputs.finish()


def _networks(seed: int, quiet: bool) -> dict[str, nn.Module]:
    from netkin.training import untrained_digits_net

    trained = {f"seed{s}": _trained(s, quiet) for s in (seed, seed + 1)}
    return trained | {"untrained": untrained_digits_net(seed + 2)}


def _trained(seed: int, quiet: bool) -> nn.Module:
    from netkin.training import trained_digits_net

    if quiet:
        return trained_digits_net(seed)
    click.echo(f"training a network from seed {seed} on 1,437 digits ", err=True, nl=False)
    model = trained_digits_net(seed, progress=lambda epoch, loss: click.echo(".", err=True, nl=False))
    click.echo(" done", err=True)
    return model


def _compared(networks: dict[str, nn.Module], a: str, b: str) -> Comparison:
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

    contents = save(model.state_dict(), {"made by": files.MARK})
    files.write_bytes(path, contents, "weights", overwrite=overwrite)


def _report(comparisons: list[Comparison], path: Path, *, overwrite: bool) -> None:
    from netkin.reporting import report

    report(comparisons, path, overwrite=overwrite)


def _ending(page: Path) -> str:
    return f"Open the report in a browser\n  {page}"


def _accuracies(networks: dict[str, nn.Module]) -> str:
    from netkin.sources import load_data
    from netkin.training import accuracy

    data = load_data("digits:test")
    shares = ", ".join(f"{name} {accuracy(model, data):.1%}" for name, model in networks.items())
    return f"accuracy on {data.examples} digits that none of them saw: {shares}"


def _notes(trained: Comparison, untrained: Comparison) -> str:
    return "\n".join(["What to notice", *(f"- {sentence}" for sentence in observations(trained, untrained))])


def _files(files: list[Path]) -> str:
    first, second = (file for file in files if file.suffix == ".safetensors" and file.stem != "untrained")
    return "\n".join(
        [
            "Saved",
            *(f"  {file}" for file in files),
            "Go on with",
            f"  netkin compare netkin:digits@{first} netkin:digits@{second} --data digits:test --measure pwcca",
        ]
    )
