"""`netkin completion`: the script that lets a shell complete netkin's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from netkin.cli.options import example


@click.command(epilog=example("completion bash"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash  eval "$(netkin completion bash)"                    in ~/.bashrc
    zsh   eval "$(netkin completion zsh)"                     in ~/.zshrc
    fish  netkin completion fish > ~/.config/fish/completions/netkin.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "netkin", "_NETKIN_COMPLETE").source())
