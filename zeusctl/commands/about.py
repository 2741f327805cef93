"""`zeusctl schema`, `completion` and `man`: about zeusctl itself."""

from __future__ import annotations

import json
from pathlib import Path

import click

from zeus_ipc.options import FOLDER, option
from zeusctl.arguments import without_effect
from zeusctl.completing import complete_schema, complete_verb
from zeusctl.reports import schemas as published
from zeusctl.session import Session, verb


@click.command()
@click.argument("name", required=False, shell_complete=complete_schema)
def schema(name: str | None) -> None:
    """Print the JSON schema of the output of --json.

    Every answer has a field `schema`, such as zeusctl.status/1. Within one version, fields are
    added and never changed or removed.
    """
    kinds = published()
    if name is not None and name not in kinds:
        raise click.UsageError(f"there is no schema {name}; there are: {', '.join(kinds)}")
    schemas = {key: kind() for key, kind in kinds.items() if name in (None, key)}
    click.echo(json.dumps(schemas if name is None else schemas[name], indent=2))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  zeusctl completion bash > /etc/bash_completion.d/zeusctl
    zsh:   zeusctl completion zsh > /usr/share/zsh/site-functions/_zeusctl
    fish:  zeusctl completion fish > /etc/fish/completions/zeusctl.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    # click's own bash class runs bash to get its version, which source() does not need.
    source = kind(root, {}, "zeusctl", "_ZEUSCTL_COMPLETE")
    click.echo(source.source_template % source.source_vars())


@verb()
@click.argument("verb", required=False, shell_complete=complete_verb)
@option("--write directory", "Write all pages to this folder, for `man` to find.", FOLDER)
@click.pass_context
def man(context: click.Context, session: Session, verb: str | None, directory: Path | None) -> None:
    """Show the manual page of zeusctl, or of one of its commands.

    \b
    zeusctl man set
    zeusctl man --write /usr/local/share/man/man1
    """
    from zeusctl.man import pages, show

    root = context.find_root()
    found = pages(root.command)
    if directory is None:
        name = f"zeusctl-{verb}" if verb else "zeusctl"
        if name not in found:
            raise click.UsageError(f"there is no command {verb!r}; run `zeusctl` to list them")
        if not show(found[name]):
            assert isinstance(root.command, click.Group)
            command = root.command.get_command(root, verb) if verb else root.command
            assert command is not None
            click.echo(command.get_help(click.Context(command, info_name=verb, parent=root)))
        return
    without_effect("with --write", "VERB")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (directory / f"{name}.1").write_text(text, encoding="utf-8")
    session.done(directory, len(found), f"{len(found)} pages in {directory}")
