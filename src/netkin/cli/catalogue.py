"""Lists of what is available: `netkin measures`, `netkin layers` of a model, `netkin data`, and `netkin completion`.

Shells complete the names of measures, shapes, devices, data and models; that imports no torch, to be quick.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class
from click.types import StringParamType

from netkin.cli.options import JSON, KNOWN, example
from netkin.cli.outputs import align_columns, as_json
from netkin.cli.refusals import with_refusals
from netkin.errors import PackageWarning

if TYPE_CHECKING:
    from netkin.measures import Measure


@click.command(epilog=example("measures procrustes_distance"))
@click.argument("name", required=False)
@JSON
@with_refusals
def measures(name: str | None, json: bool) -> None:
    """List all measures, or describe the measure NAME."""
    from netkin.measures import broken_packages, find
    from netkin.measures import measures as all_measures

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # said below, in a line each
        chosen = [find(name)] if name else list(all_measures().values())
    if json:
        click.echo(as_json([_document(measure) for measure in chosen]))
    else:
        click.echo(_describe(chosen[0]) if name else _list(chosen))
    for sentence in broken_packages().values():
        click.echo(f"warning: {sentence}", err=True)


def _list(chosen: list[Measure]) -> str:
    return align_columns([[m.name, _direction(m), _range(m.facts.bounds), m.summary] for m in chosen])


def _describe(measure: Measure) -> str:
    document = _document(measure)
    words = {
        key.replace("_", " "): _as_text(value) for key, value in document.items() if key not in ("name", "summary")
    }
    return f"{measure.id}: {inspect.getdoc(measure.function)}\n\n{align_columns(list(words.items()))}"


def _document(measure: Measure) -> dict[str, Any]:
    facts = measure.facts
    return {
        "name": measure.name,
        "summary": measure.summary,
        "direction": _direction(measure),
        "bounds": facts.bounds,
        "symmetric": facts.symmetric,
        "is_metric": facts.is_metric,
        "unchanged_by": sorted(facts.unchanged_by),
        "parameters": measure.settings,
        "reads": facts.reads.__name__,
        "convention": facts.convention,
        "reference": facts.reference,
    }


def _direction(measure: Measure) -> str:
    return "similarity" if measure.facts.higher_is_closer else "distance"


def _range(bounds: tuple[float, float]) -> str:
    return "..".join(_number(bound) for bound in bounds)


def _number(bound: float) -> str:
    return f"{bound:.4g}" if math.isfinite(bound) else f"{bound:.0f}".replace("inf", "∞")


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _range(value)
    if isinstance(value, dict):
        value = [f"{key}={setting}" for key, setting in value.items()]
    return ", ".join(value) or "none" if isinstance(value, list) else value


@click.command(epilog=example("layers netkin:tiny10"))
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="List every module, not only the default layers.")
@JSON
@with_refusals
def layers(model: str, every: bool, json: bool) -> None:
    """List the layers of MODEL that are compared by default, with their types."""
    from netkin.representations.layers import layers as default_layers
    from netkin.representations.layers import modules
    from netkin.sources import load_model

    loaded = load_model(model)
    types = {name: type(module).__name__ for name, module in modules(loaded).items()}
    names = [name for name in types if name] if every else default_layers(loaded)
    rows = [{"name": name, "type": types[name]} for name in names]
    click.echo(as_json(rows) if json else align_columns([[row["name"], row["type"]] for row in rows]))


WORDS = ("name", "what", "where", "example", "options")


@click.command(epilog=example("data"))
@JSON
@with_refusals
def data(json: bool) -> None:
    """List the kinds of data that --data accepts, and where each is expected."""
    from netkin.sources.datasets import CATALOGUE

    rows = [{word: getattr(source, word) for word in WORDS} for source in CATALOGUE]
    click.echo(as_json(rows) if json else "\n\n".join(map(_describe_source, rows)))


def _describe_source(row: dict[str, str]) -> str:
    details = [row["what"], f"where: {row['where']}", f"example: --data {row['example']}"]
    details += [f"options: {row['options']}"] if row["options"] else []
    return "\n".join([row["name"], *map(_wrap, details)])


def _wrap(text: str) -> str:
    """Return `text` in lines of a hundred characters; what people will type is not broken."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


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


def device_names(typed: str) -> list[str]:
    """Return the names of devices, as far as the system shows them."""
    return ["cpu", "cuda", *(f"cuda:{i}" for i in range(len(glob("/dev/nvidia[0-9]*")))), "mps"]


def data_specs(typed: str) -> list[str]:
    """Return the data sets, or the files that may stand behind one."""
    name, kind, place = _split_spec(typed)
    if ":" in kind and not typed.startswith(f"{name}digits"):
        return [f"{name}{kind}{path}" for path in paths(place)]
    return [
        f"{name}{one}"
        for one in ("digits:test", "digits:train", *(f"{kind}:" for kind in KNOWN["data"] if kind != "digits"))
    ]


def model_specs(typed: str) -> list[str]:
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


def registered(kind: str) -> Callable[[str], Iterable[str]]:
    """Return what completes names of that kind."""
    return lambda typed: KNOWN[kind]


COMPLETED = {
    **dict.fromkeys(["measures", "measure", "measures name"], registered("measures")),
    "device": device_names, "shape": registered("shapes"), "hows": registered("stitching methods"),
    "stitch scores": registered("stitching scores"), "recommend scores": registered("transfer scores"),
    **dict.fromkeys(["data", "test", "public"], data_specs),
    **dict.fromkeys(["a", "b", "more", "model", "models", "other", "against", "tasks tasks"], model_specs),
    "run": paths,
}  # fmt: skip


def with_completion(command: click.Command) -> click.Command:
    """Return a command whose texts of known kinds a shell completes."""
    for parameter in command.params:
        found = COMPLETED.get(f"{command.name} {parameter.name}") or COMPLETED.get(str(parameter.name))
        if parameter.type is click.STRING and found:
            parameter.type = Words(found)
    return command
