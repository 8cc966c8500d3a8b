"""`headrace completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ...streams.outcomes import CommandFailed
from .help import SectionedCommand
from .output import json_option, print_json

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HEADRACE_COMPLETE"
"""The variable by which the shell asks the program for completions: click reads it."""


@click.command("completion", cls=SectionedCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def command(*, shell: str, as_json: bool) -> None:
    """Print the script with which SHELL completes commands and options.

    \b
    bash  add to ~/.bashrc:  eval "$(headrace completion bash)"
    zsh   add to ~/.zshrc:   eval "$(headrace completion zsh)"
    fish  run:               headrace completion fish > ~/.config/fish/completions/headrace.fish
    """  # noqa: D301 (click keeps the lines below the mark as they are)
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    if kind is None:
        raise CommandFailed(f"this version of click has no completion for {shell}: install click 8.4 or newer")
    script = kind(root, {}, "headrace", VARIABLE).source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
