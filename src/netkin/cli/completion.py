"""`netkin completion`: the script for a shell, and the names of measures, shapes, devices, data and models.

Nothing here imports torch, so that a shell does not wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from glob import escape, glob
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class
from click.types import StringParamType

from netkin.cli.options import KNOWN, example

# Bash splits a line at colons, equals signs and ats, too, and puts the reply in the place of the last piece alone.
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


@click.command(epilog=example("completion bash"))
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
    """A text that a shell completes."""

    def __init__(self, words: Callable[[str], Iterable[str]]):
        self.words = words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin with what was typed."""
        return [CompletionItem(word) for word in self.words(incomplete) if word.startswith(incomplete)]


def devices(typed: str) -> list[str]:
    """Return the names of devices, as far as the system shows them."""
    return ["cpu", "cuda", *(f"cuda:{i}" for i in range(len(glob("/dev/nvidia[0-9]*")))), "mps"]


def data(typed: str) -> list[str]:
    """Return the data sets, or the files that may stand behind one."""
    name, kind, place = _split_spec(typed)
    if ":" in kind and not typed.startswith(f"{name}digits"):
        return [f"{name}{kind}{path}" for path in paths(place)]
    return [
        f"{name}{one}"
        for one in ("digits:test", "digits:train", *(f"{kind}:" for kind in KNOWN["data"] if kind != "digits"))
    ]


def models(typed: str) -> list[str]:
    """Return the reference networks and files, or the weights that may stand behind one."""
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


def known(kind: str) -> Callable[[str], Iterable[str]]:
    """Return what completes names of that kind."""
    return lambda typed: KNOWN[kind]


COMPLETED = {
    **dict.fromkeys(["measures", "measure", "measures name"], known("measures")),
    "device": devices, "shape": known("shapes"), "hows": known("stitching methods"),
    "stitch scores": known("stitching scores"), "recommend scores": known("transfer scores"),
    **dict.fromkeys(["data", "test", "public"], data),
    **dict.fromkeys(["a", "b", "more", "model", "models", "other", "against", "tasks tasks"], models),
    "run": paths,
}  # fmt: skip


def with_completion(command: click.Command) -> click.Command:
    """Return a command whose texts of known kinds a shell completes."""
    for parameter in command.params:
        found = COMPLETED.get(f"{command.name} {parameter.name}") or COMPLETED.get(str(parameter.name))
        if parameter.type is click.STRING and found:
            parameter.type = Words(found)
    return command
