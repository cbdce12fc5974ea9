"""`netkin compress`: a smaller network, whose layers see only the directions of their inputs that matter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.documents import as_json
from netkin.cli.options import BALANCED, EXAMPLES, FILE, JSON, QUIET
from netkin.cli.outputs import FORCE, Outputs
from netkin.cli.refusals import refusing
from netkin.cli.running import loaded, refuse_crash

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = """\b
Example:
  netkin compress netkin:digits --layer fc --layer conv4 --k 0.35 --data digits:train --test digits:test
"""


class Amount(click.ParamType):
    """A whole number, or a share of the width."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | float:
        """Return the number, whole where it is written so."""
        try:
            return int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor a share such as 0.35.", param, ctx)


@click.command(epilog=EXAMPLE)
@click.argument("model")
@click.option("--layer", "layers", multiple=True, required=True, metavar="PATTERN", help="Linear or Conv2d; several.")
@click.option("--data", required=True, metavar="DATA", help="The examples the directions come from; see `netkin data`.")
@click.option("--k", type=Amount(), metavar="K", help="Directions kept of each layer's input, or their share, as 0.35.")
@click.option("--variance", type=float, metavar="SHARE", help="Keep the directions that hold this share of variance.")
@click.option("--accuracy-drop", type=float, metavar="SHARE", help="Keep as few as this fall of right answers allows.")
@click.option("--test", metavar="DATA", help="The examples on which right answers are counted; --data if not given.")
@click.option("--against", metavar="MODEL", help="Another model, whose same layers are compared with; else the logits.")
@click.option("--from-the-top", is_flag=True, help="One layer after the other, the last one first.")
@click.option("--orthogonal", is_flag=True, help="Project at right angles instead of by least squares.")
@EXAMPLES
@BALANCED
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of --examples.")
@click.option("--save", type=FILE, help="Write the smaller network to this file, as small.netkin.")
@FORCE
@QUIET
@JSON
@refusing
def compress(model: str, save: Path | None, force: bool, json: bool, **options: Any) -> None:
    """Restrict layers of MODEL to the few directions of their inputs that matter, and show what that saves.

    Each layer becomes two smaller ones. The file that --save writes is read by `nk.load(FILE, model)`.
    """
    from netkin.applications.compression import save_compressed

    outputs = Outputs(force, model, options["against"], options["data"], options["test"])
    outputs.check("--save", save, "compressed")
    small = _compressed(model, **options)
    table: Any = small.compression
    click.echo(as_json(table.to_header()) if json else str(table))
    outputs.write(save, partial(save_compressed, small), f"saved to {save}")
    outputs.finish()


def _compressed(
    model: str, layers: tuple[str, ...], data: str, test: str | None, against: str | None, **options: Any
) -> nn.Module:
    """Load what was named and call the library."""
    from netkin.applications.compression import compress as compress_model
    from netkin.sources import load_data, load_model

    whole = load_model(model)
    batches = loaded(data, 128, options["examples"], options.pop("seed"), options.pop("balanced"))
    refuse_crash(model, whole, batches)
    return compress_model(
        whole,
        list(layers),
        data=batches,
        test=load_data(test) if test else None,
        against=load_model(against) if against else "logits",
        order="from_the_top" if options.pop("from_the_top") else "at_once",
        projection="orthogonal" if options.pop("orthogonal") else "least_squares",
        **options,
    )
