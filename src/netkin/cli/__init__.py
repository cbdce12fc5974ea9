"""The command line: one file a command, each of which parses, makes one call of the library and prints.

The library is imported inside the commands, so that `netkin --help` starts at once.
"""

import click

from netkin import __version__
from netkin.cli.compare import compare
from netkin.cli.demo import demo
from netkin.cli.layers import layers
from netkin.cli.measures import measures


@click.group(epilog="Example: netkin demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="netkin")
def cli() -> None:
    """Measure the kinship of neural networks: how alike they represent the same examples, layer by layer.

    A model is BUILDER[@WEIGHTS], where BUILDER is netkin:tiny10, netkin:digits or package.module:function, and WEIGHTS
    is a safetensors file or a state dict saved by torch. Data is digits, digits:train, digits:test, cifar10:DIR,
    cifar10-train:DIR or package.module:function.
    """


for command in (demo, compare, measures, layers):
    cli.add_command(command)
