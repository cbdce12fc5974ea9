"""The command line: a file for each family of commands, each of which parses, makes one call of the library and prints.

The library is imported inside the commands, so that `netkin --help` starts at once.
"""

import click

from netkin import __version__
from netkin.cli.catalogue import completion, data, layers, measures, with_completion
from netkin.cli.checking import doctor, reproduce
from netkin.cli.compare import collect, compare, explain, merge
from netkin.cli.demo import demo
from netkin.cli.options import QUIET
from netkin.cli.refusals import ARGUMENTS
from netkin.cli.saved import jobs, report, show
from netkin.cli.several_models import atoms, recommend, tasks
from netkin.cli.single_model import compress, sensitivity, sparsity
from netkin.cli.stitch import stitch
from netkin.cli.training import dynamics, federate, learn_tasks


class Remembering(click.Group):
    """A group of commands that remembers what was typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments before they are taken apart."""
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their whole first sentences, which click would cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(200)) for name in self.list_commands(ctx)]
            )


@click.group(cls=Remembering, epilog="Example: netkin demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="netkin")
@click.option("--debug", is_flag=True, help="Print the full traceback before an error message.")
def cli(debug: bool) -> None:
    """Measure how similar neural networks are: their representations of the same examples, layer by layer.

    A model is BUILDER[@WEIGHTS]. BUILDER is netkin:NAME (a reference architecture, such as netkin:tiny10),
    package.module:function (called without arguments), hf:DIR (a transformers model) or the path of an exported program
    (.pt2). WEIGHTS is a safetensors file, a state dict saved by torch, or a file saved by `netkin compress`; hf:DIR and
    .pt2 files contain their own. Data is digits:test, images:DIR, cifar10:DIR or package.module:function; `netkin data`
    lists all. NAME=DATA gives the data a name of your own, and NAME=MODEL a model that is compared with others.

    Results go to stdout, progress to stderr. The exit code is 0, 1 for an error, or 2 for wrong usage.
    """


COMMANDS = (
    demo, compare, explain, collect, merge, dynamics, atoms, stitch, sensitivity, tasks, compress, sparsity,
    recommend, federate, learn_tasks, report, show, measures, layers, data, reproduce, jobs, doctor, completion,
)  # fmt: skip
for command in COMMANDS:
    cli.add_command(with_completion(QUIET(command)))
