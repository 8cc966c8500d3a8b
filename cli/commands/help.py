"""The classes of all commands: help with titled sections, suggestions for a mistyped command, and a check of texts."""

from __future__ import annotations

from typing import Any

import click


class SectionedOption(click.Option):
    """An option that the help shows below the title `section`."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows its own options first, then each section of `SectionedOption`.

    Texts that are not UTF-8 are refused: names are UTF-8, and databases and messages cannot store anything else. Paths
    are accepted.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            if isinstance(parameter.type, click.types.StringParamType):
                _check_text(ctx.params.get(parameter.name or ""), parameter, ctx)
        return rest

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


def _check_text(value: Any, parameter: click.Parameter, ctx: click.Context) -> None:
    """Raise BadParameter if a text, or one of several, is not UTF-8. The message has none of it: it may be a token.

    Python reads bytes of the command line that are not UTF-8 as lone surrogates.
    """
    for text in value if isinstance(value, tuple | list) else (value,):  # pyright: ignore[reportUnknownVariableType]
        try:
            str(text).encode()  # pyright: ignore[reportUnknownArgumentType]
        except UnicodeEncodeError as error:
            raise click.BadParameter(f"not UTF-8 at character {error.start + 1}.", ctx, parameter) from None


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
