"""The command line: a file for each family of commands, each of which parses, makes one call of the library and prints.

The library is imported inside the commands, so that `netkin --help` starts at once. Shells complete the names of
measures, shapes, devices, data and models; that imports no torch, to be quick.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from glob import escape, glob
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class
from click.types import StringParamType

from netkin import __version__
from netkin.cli.catalogue import listing
from netkin.cli.checking import doctor
from netkin.cli.compare import collect, compare, merge
from netkin.cli.demo import demo
from netkin.cli.diff import diff
from netkin.cli.options import KNOWN, QUIET, Commands, GroupedCommand, example
from netkin.cli.outputs import ARGUMENTS, REFUSED
from netkin.cli.saved import jobs, report, show
from netkin.cli.several_models import atoms, recommend, tasks
from netkin.cli.single_model import classes, compress, sparsity
from netkin.cli.stitch import stitch
from netkin.cli.train import train
from netkin.cli.training import continual, dynamics, federate

NAMING_LAYERS = ("--layers", "--layer", "--at", "--into", "--head")


FAMILIES = {  # headings of `netkin --help` with the commands below them
    "Compare networks": "compare collect merge stitch atoms tasks diff",
    "Look into one network": "classes compress sparsity",
    "Choose a network": "recommend",
    "Train, and follow training": "train dynamics federate continual",
    "Results, jobs and lists": "show report jobs list",
    "This installation": "demo doctor completion",
}


class Remembering(Commands):
    """The group of all commands, which keeps the arguments as typed for the provenance of results."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; what is written to a closed stream is dropped, a full one ends the command in one sentence."""
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # in this order, each gets its own number, which no other file then has
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the process runs
        try:
            return super().main(*args, **options)
        except BrokenPipeError:  # of a reader who has stopped, to whom nothing is told
            sys.exit(REFUSED)
        except OSError as fault:  # of help, of the version or of wrong usage; commands handle their own
            with suppress(OSError):
                click.echo(f"netkin: the output could not be written: {fault.strerror}.", err=True)
            sys.exit(REFUSED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by their families."""
        for heading, names in FAMILIES.items():
            with formatter.section(heading):
                known = [name for name in names.split() if name in self.commands]
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in known])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments as typed, before they are parsed; from here on stdout takes any character."""
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # which the encoding of a terminal may lack
        if not ctx.resilient_parsing:
            _require_filled(args)
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


def _require_filled(args: Sequence[str]) -> None:
    """Refuse an empty argument or value, as of a variable of the shell that is not set; "" names a model's output."""
    for before, typed in pairwise(["netkin", *args]):
        if (typed == "" and before not in NAMING_LAYERS) or re.fullmatch(r"--(?!layer)[\w-]+=", typed):
            where = typed or f"after {before!r}"
            raise click.UsageError(f"an argument is empty ({where}); is a variable of the shell not set?")


@click.group(cls=Remembering, epilog="Example: netkin demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="netkin")
@click.option("--debug", is_flag=True, help="Print the full traceback before an error message.")
def cli(debug: bool) -> None:
    """Measure how similar neural networks are: their representations of the same examples, layer by layer.

    A model is BUILDER[@WEIGHTS]. BUILDER is netkin:NAME (a reference architecture, such as netkin:tiny10),
    package.module:function (called without arguments), hf:DIR (a transformers model, with options as in
    hf:DIR,dtype=bfloat16 or hf:DIR,adapter=DIR) or the path of an exported program (.pt2). WEIGHTS is a safetensors
    file, a state dict saved by torch, or a file saved by `netkin compress`; hf:DIR and .pt2 files contain their own.
    Data is digits:test, images:DIR, cifar10:DIR, text:FILE or package.module:function; `netkin list data` lists all.
    NAME=DATA gives the data a name of your own, and NAME=MODEL a model that is compared with others.

    Results go to stdout, progress to stderr. The exit code is 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.
    """


# --- completion -------------------------------------------------------------------------------------------------------


# Bash splits a line at colons, equals signs and ats, too, and puts the reply in place of the last piece alone.
BASH = r"""%(complete_func)s() {
    local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT} response type value
    local -a words=($line)
    local count=$((${#words[@]} - 1))
    [[ $line == *[$' \t'] ]] && count=$((count + 1))
    local word=${words[count]}
    local head=${word%%"${word##*[:=@]}"}
    response=$(env COMP_WORDS="$line" COMP_CWORD=$count %(complete_var)s=bash_complete $1)
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames 2>/dev/null ;;
            file) compopt -o default 2>/dev/null ;;
            plain) COMPREPLY+=("${value#"$head"}")
                [[ $value == *[:/@] ]] && compopt -o nospace 2>/dev/null ;;
        esac
    done <<< "$response"
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@QUIET
@click.command(cls=GroupedCommand, epilog=example("completion bash"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    It completes commands, options, and the names of measures, shapes, devices, data and models.

    \b
    bash  eval "$(netkin completion bash)"                    in ~/.bashrc
    zsh   eval "$(netkin completion zsh)"                     in ~/.zshrc
    fish  netkin completion fish > ~/.config/fish/completions/netkin.fish
    """
    made = _Bash if shell == "bash" else get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "netkin", "_NETKIN_COMPLETE").source())


class _Bash(BashComplete):
    source_template = BASH


class Words(StringParamType):
    """A text option whose values a shell completes."""

    def __init__(self, words: Callable[[str], Iterable[str]]):
        self.words = words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin with what was typed."""
        return [CompletionItem(word) for word in self.words(incomplete) if word.startswith(incomplete)]


def device_names(typed: str) -> list[str]:
    """Return the names of devices, as far as the system shows them."""
    return ["cpu", "cuda", *(f"cuda:{i}" for i in range(len(glob("/dev/nvidia[0-9]*")))), "mps"]


def data_specs(typed: str) -> list[str]:
    """Return the data sets, or the files that can follow the beginning of one."""
    name, kind, place = _split_spec(typed)
    if ":" in kind and not typed.startswith(f"{name}digits"):
        return [f"{name}{kind}{path}" for path in paths(place)]
    return [
        f"{name}{one}"
        for one in ("digits:test", "digits:train", *(f"{kind}:" for kind in KNOWN["data"] if kind != "digits"))
    ]


def model_specs(typed: str) -> list[str]:
    """Return the reference networks and files, or the weights that can follow the beginning of one."""
    name, _, place = _split_spec(typed)
    if "@" in typed:
        head, _, weights = typed.partition("@")
        return [f"{head}@{path}" for path in paths(weights)]
    if typed.startswith(f"{name}hf:"):
        return [f"{name}hf:{path}" for path in paths(place)]
    return [*(f"{name}netkin:{one}" for one in KNOWN["networks"]), f"{name}hf:", *paths(typed)]


def paths(start: str) -> list[str]:
    """Return the files and folders whose path begins with `start`."""
    return sorted(f"{path}/" if Path(path).is_dir() else path for path in glob(f"{escape(start)}*"))


def _split_spec(typed: str) -> tuple[str, str, str]:
    """Return the name that a user gives with its equals sign, the kind of thing with its colon, and the rest.

    Example:
        >>> _split_spec("photos=images,size=64:pic")
        ('photos=', 'images,size=64:', 'pic')
    """
    name = found.group() if (found := re.match(r"[^=:,@/]+=", typed)) else ""
    kind, colon, place = typed.removeprefix(name).partition(":")
    return name, kind + colon, place


def registered(kind: str) -> Callable[[str], Iterable[str]]:
    """Return a function that completes names of that kind."""
    return lambda typed: KNOWN[kind]


COMPLETED = {
    **dict.fromkeys(["measures", "measure", "measures name"], registered("measures")),
    "device": device_names, "shape": registered("shapes"), "methods": registered("stitching methods"),
    "stitch scores": registered("stitching scores"), "recommend scores": registered("transfer scores"),
    **dict.fromkeys(["data", "test", "public"], data_specs),
    **dict.fromkeys(["a", "b", "more", "model", "models", "other", "against", "tasks tasks"], model_specs),
    "run": paths,
}  # fmt: skip


def with_completion(command: click.Command) -> None:
    """Let shells complete those arguments of a command whose values are known."""
    for parameter in command.params:
        found = COMPLETED.get(f"{command.name} {parameter.name}") or COMPLETED.get(str(parameter.name))
        if parameter.type is click.STRING and found:
            parameter.type = Words(found)


COMMANDS = (
    demo, compare, diff, collect, merge, train, dynamics, atoms, stitch, classes, tasks, compress, sparsity,
    recommend, federate, continual, report, show, listing, jobs, doctor, completion,
)  # fmt: skip
for one in COMMANDS:
    cli.add_command(one)


def commands(group: click.Group = cli, before: str = "") -> dict[str, click.Command]:
    """Return all commands by their names on the command line, such as "compare" and "jobs list"."""
    found: dict[str, click.Command] = {}
    for name, one in group.commands.items():
        typed = f"{before}{name}"
        found |= commands(one, f"{typed} ") if isinstance(one, click.Group) else {typed: one}
    return found


for one in commands().values():
    with_completion(one)
