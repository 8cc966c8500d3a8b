"""Help of the commands: options in titled sections, and suggestions for a mistyped command."""

from __future__ import annotations

from typing import Any

import click


class SectionedOption(click.Option):
    """An option that the help shows below the title `section`."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows its own options first, then each section of `SectionedOption`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                title = parameter.section if isinstance(parameter, SectionedOption) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class CommandGroup(click.Group):
    """A group of commands. For an unknown name it suggests similar ones, also of commands not imported yet."""

    command_class = SectionedCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(
                error.command_name, possibilities=self.list_commands(ctx), ctx=error.ctx
            ) from None
