"""What holds for every command."""

import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from headrace import Busy, InvalidArgument, NotSupported, PayloadTooLarge, Start, StorageFull
from headrace.cli.commands.help import SectionedCommand
from headrace.cli.commands.options import parse_start
from headrace.cli.main import COMMANDS, ERROR_HANDLER, cli, main
from headrace.cli.outcome import exit_code, message
from headrace.streams.outcomes import CommandFailed, CommandInterrupted
from headrace.streams.subscriptions import StartKind
from headrace.streams.wording import counted
from tests.cli.commandline import ENVIRONMENT, SCRIPT, Headrace, ended
from tests.cli.commandline import Start as StartProcess


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def all_commands() -> dict[str, click.Command]:
    """The commands with those of groups."""
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = command_of(name)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for each in command.list_commands(context):
                inner = command.get_command(context, each)
                assert inner is not None
                found[f"{name} {each}"] = inner
        else:
            found[name] = command
    return found


def test_help_lists_every_command(headrace: Headrace):
    out = headrace("--help").out
    assert [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines() if line[2] != " "] == list(
        COMMANDS
    )


def test_help_imports_nothing_that_a_command_needs():
    program = (
        "import sys; from headrace.cli.main import main; main(['--help'])\n"
        "print(sorted({'sqlalchemy', 'lmdb', 'rich', 'prometheus_client', 'asyncio'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(name: str, headrace: Headrace):
    ran = headrace(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"headrace {name}" in ran.out


@pytest.mark.parametrize("group", [[], ["subscriptions"], ["deadletters"], ["tokens"], ["pipeline"]])
def test_a_group_alone_prints_its_help(group: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(group) == 2
    alone = capsys.readouterr()
    main([*group, "--help"])
    assert (alone.out, alone.err) == ("", capsys.readouterr().out)


@pytest.mark.parametrize("group", ["cluster", "deadletters", "pipeline", "repair", "subscriptions", "tokens"])
def test_the_help_of_a_group_cuts_no_sentence(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    main([group, "--help"])
    assert "..." not in capsys.readouterr().out.partition("\n")[2]


def test_help_shows_the_options_of_the_command_before_those_of_its_connection(capsys: pytest.CaptureFixture[str]):
    main(["subscribe", "--help"])
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Options:", "Data directory or silo:", "Connection to the silo:", "Queues of the provider, with --data:",
    ]  # fmt: skip
    options, place, connection, queues = out.split("Options:\n")[1].split("\n\n")
    assert ("--filter" in options, "--data" in place, "--tls" in connection, "--adapter" in queues) == (True,) * 4


@pytest.mark.parametrize("name", ["subscriptions", "deadletters", "tokens"])
def test_a_group_shows_whole_sentences(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([name, "--help"])
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_every_command_that_reports_has_json():
    without = {
        name for name, command in all_commands().items() if not any(p.opts == ["--json"] for p in command.params)
    }
    assert without == {"dev", "silo"}


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["deadletters", "list", "--data", "d", "--subscription", "s\udcff"], "'--subscription'"),
        (["subscriptions", "show", "--data", "d", "s\udcff"], "'NAME'"),
        (["effects", "prune", "sqlite:///d", "--older-than", "1d", "--origin", "s\udcff"], "'--origin'"),
        (["state", "set", "--database", "sqlite:///d", "s", "a/b", "1\udcff"], "'VALUE'"),
        (["subscribe", "--data", "d", "a/*", "--filter", "field:b=1", "--filter", "s\udcff"], "'--filter'"),
    ],
)
def test_text_that_is_not_utf_8_is_refused_in_one_line(
    arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    line = f"headrace: Invalid value for {where}: not UTF-8 at character 2. (see headrace {arguments[0]}"
    assert capsys.readouterr().err.startswith(line)


def test_every_command_refuses_text_that_is_not_utf_8():
    assert not [name for name, command in all_commands().items() if not isinstance(command, SectionedCommand)]


def test_a_path_that_is_not_utf_8_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["check", "--data", f"{tmp_path}/\udcff"]) == 1
    assert "is no data directory" in capsys.readouterr().err


def test_version(headrace: Headrace):
    assert headrace("--version").out == f"headrace, version {version('headrace')}\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["flow"], "No such command 'flow'. (see headrace --help)"),
        (["publsh"], "No such command 'publsh'. Did you mean 'publish'?"),
        (["subscriptions", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["cluster", "drian"], "Did you mean one of: 'drain', 'undrain'?"),
        (["pipeline", "archiv"], "No such command 'archiv'. Did you mean 'archive'?"),
        (["--verbose"], "No such option '--verbose'"),
        (["streams", "--bogus"], "No such option '--bogus'. (see headrace streams --help)"),
        (["streams"], "Missing option '--data'"),
        (["subscribe", "--data", "d"], "Missing argument 'SELECTOR'"),
        (["subscribe", "--data", "d", "a/*", "--max", "0"], "0 is not in the range x>=1"),
        (["subscribe", "--data", "d", "nothing"], "'nothing' selects no stream"),
        (["subscribe", "--data", "d", "a/*", "--from", "noon"], "'noon' is not a start"),
        (["subscribe", "--data", "d", "a/*", "--from", "3"], "a token is a position in one queue"),
        (["subscribe", "--data", "d", "a/*", "--filter", "x=1"], "--filter x=1: write it as header:NAME=VALUE"),
        (["subscribe", "--data", "d", "a/*", "--option", "durability"], "--option durability: write it as NAME=VALUE"),
        (["publish", "--data", "d", "--stream", "a/b", "--option", "durability=often"],
         "--option NAME=VALUE: adapter 'log': durability = \"often\": expected \"commit\" or \"relaxed\""),
        (["publish", "--data", "d", "--stream", "a/b", "--option", "durabilty=commit"],
         "--option NAME=VALUE: adapter 'log': durabilty: unknown option; accepted are durability, "),
        (["publish", "--data", "d", "--stream", "a/b", "--option", "retain_age_s=1d"],
         "adapter 'log': retain_age_s = \"1d\": expected a number > 0"),
        (["subscribe", "--data", "d", "a/*", "--name", "not a name"], "'not a name' is not a subscription name"),
        (["subscribe", "--data", "d", "a/*", "--provider", "../up"], "'../up' is not a provider name"),
        (["publish", "--data", "d", "--stream", "a/b", "--option", f"x={'[' * 20_000}"],
         "--option x: the JSON is nested too deeply"),
        (["cluster", "stop-agents", "--server", "localhost:1", "--queue", "99999999999999999999"],
         "'--queue': 99999999999999999999 is not in the range 0<=x<=1023"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_code_2(arguments: list[str], reason: str, headrace: Headrace):
    assert reason in headrace(*arguments).refused(2)


LOOKING = [["streams"], ["queues"], ["subscriptions", "list"], ["deadletters", "list"], ["subscribe", "a/*"],
           ["subscribe", "a/*", "--name", "n"], ["subscriptions", "create", "n", "a/*"]]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("command", LOOKING)
def test_looking_at_a_directory_that_is_none_makes_nothing(command: list[str], tmp_path: Path, headrace: Headrace):
    assert "'typo' is no data directory" in headrace(*command, "--data", "typo").refused(1)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("command", [["subscriptions", "create", "n", "a/*"], ["subscribe", "a/*", "--no-follow"]])
def test_a_command_that_can_make_the_directory_says_how(command: list[str], headrace: Headrace):
    refused = headrace(*command, "--data", "d").refused(1)
    assert refused == "'d' is no data directory: check its name, or create it with --adapter log"
    assert headrace(*command, "--data", "d", "--adapter", "log").code == 0


@pytest.mark.parametrize("command", LOOKING)
def test_looking_at_an_unknown_provider_names_those_there_are(command: list[str], headrace: Headrace):
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    assert "has no provider 'orders': there is default" in headrace(
        *command, "--data", "d", "--provider", "orders"
    ).refused(1)


def test_publish_reports_a_provider_that_it_creates(headrace: Headrace):
    publish = ["publish", "--data", "d", "--stream", "a/b"]
    published = "headrace: published 1 event from 1 line in "
    assert [line.partition(" in ")[0] for line in headrace(*publish, stdin=b"1\n").err.splitlines()] == [
        "headrace: created data directory 'd'",
        "headrace: created provider 'default' with 8 queues",
        published.partition(" in ")[0],
    ]
    first, last = headrace(*publish, "--provider", "orders", "--queues", "1", stdin=b"1\n").err.splitlines()
    assert first == "headrace: created provider 'orders' with 1 queue"
    assert last.startswith(published)
    assert headrace(*publish, stdin=b"1\n").err.startswith(published)


def test_an_adapter_that_is_named_makes_its_provider(headrace: Headrace):
    ran = headrace("subscriptions", "create", "--data", "d", "--adapter", "log", "--queues", "1", "n", "a/*")
    assert ran.code == 0
    assert "created provider 'default' with 1 queue" in ran.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T10:00:00", Start(kind=StartKind.TIME, time_us=1_795_255_200_000_000)),
        ("2026-11-21T10:00:00Z", Start(kind=StartKind.TIME, time_us=1_795_255_200_000_000)),
        ("2026-11-21T10:00:00+01:00", Start(kind=StartKind.TIME, time_us=1_795_251_600_000_000)),
        ("2026-11-21", Start(kind=StartKind.TIME, time_us=1_795_219_200_000_000)),
        ("20261121", Start(kind=StartKind.OFFSETS, token="20261121")),
        ("7.1", Start(kind=StartKind.OFFSETS, token="7.1")),
        ("latest", Start.latest()),
    ],
)
def test_a_time_without_zone_is_in_utc(text: str, expected: Start):
    assert parse_start(text) == expected


def test_one_of_a_thing_has_no_plural():
    assert [counted(number, "event") for number in (0, 1, 2, 1000)] == [
        "0 events", "1 event", "2 events", "1,000 events",
    ]  # fmt: skip


def test_a_foreign_directory_is_refused_by_every_command(tmp_path: Path, headrace: Headrace):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("x")
    for arguments in (
        ["publish", "--stream", "a/b"],
        ["subscribe", "a/*"],
        ["queues"],
        ["silo"],
        ["demo", "--flights", "f"],
    ):
        assert "not empty and not made by headrace" in headrace(*arguments, "--data", "thesis").refused(1)
    assert [entry.name for entry in (tmp_path / "thesis").iterdir()] == ["chapter"]


@pytest.mark.long
@pytest.mark.parametrize("damage", ["providers/default/log/data.mdb", "control.db", "headrace.json"])
def test_a_damaged_directory_is_refused_with_one_line(damage: str, tmp_path: Path, headrace: Headrace):
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n2\n")
    (victim,) = [path for path in (tmp_path / "d").rglob(Path(damage).name) if path.is_file()]
    victim.write_bytes(b"\xff" * victim.stat().st_size)

    for arguments in (["publish", "--stream", "a/b"], ["streams"], ["subscriptions", "list"]):
        assert str(tmp_path / "d") in headrace(*arguments, "--data", "d").refused(1)


def test_another_number_of_queues_is_refused(headrace: Headrace):
    headrace("publish", "--data", "d", "--stream", "a/b", "--queues", "4", stdin=b"1\n")
    refused = headrace("publish", "--data", "d", "--stream", "a/b", "--queues", "5", stdin=b"2\n").refused(2)
    assert "provider 'default' has 4 queues, not 5" in refused


def test_options_can_be_given_by_variables(headrace: Headrace):
    headrace("publish", "--stream", "a/b", stdin=b"1\n", HEADRACE_DATA="d", HEADRACE_PROVIDER="orders")
    assert headrace("streams", "--data", "d", "--provider", "orders", "--json").json[0]["stream"] == "a/b"


def test_a_reader_that_leaves_early_is_no_error(headrace: Headrace, start: StartProcess):
    headrace("publish", "--data", "d", "--stream", "a/b", "--format", "raw", stdin=(b"x" * 1000 + b"\n") * 2000)
    process = start("subscribe", "--data", "d", "a/*", "--from", "earliest", "--no-follow")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"a/b 0 ")
    process.stdout.close()

    assert (process.wait(60), process.stderr and process.stderr.read()) == (1, b"")


def test_the_script_and_the_module_are_the_same():
    assert Path(SCRIPT).exists()
    assert import_module("headrace.cli.main").main(["--version"]) == 0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidArgument("bad\nthing"), 2, "bad thing"),
        (NotSupported("cannot"), 2, "cannot"),
        (PayloadTooLarge("it", 3, 2), 1, "it has 3 bytes, the limit is 2: split it, or store it elsewhere"),
        (Busy("taken"), 1, "taken"),
        (StorageFull("full"), 1, "full"),
        (OSError(2, "No such file", "a.toml"), 1, "a.toml: No such file"),
        (OSError(5, "Input/output error"), 1, "Input/output error"),
        (CommandFailed("one", "two"), 1, "one\ntwo"),
        (CommandInterrupted("stopped"), 130, "stopped"),
        (CommandInterrupted("", 0), 0, ""),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 1, ""),
        (ExceptionGroup("group", [Busy("taken"), ValueError("x")]), 1, "taken"),
        (ValueError("a bug"), None, "a bug"),
    ],
)
def test_exit_code_and_message_of_an_error(error: BaseException, code: int | None, text: str):
    assert exit_code(error) == code
    assert message(error).startswith(text)


@pytest.mark.long
@pytest.mark.parametrize(
    "imported", ["click.globals", "click", "headrace.cli.main", "asyncio", "sqlalchemy", "headrace.silo.provider"]
)
def test_an_interrupted_start_ends_at_once(headrace: Headrace, start: StartProcess, imported: str):
    """Python would lose an interrupt during an import now and then, or show a traceback."""
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    process = start("subscribe", "--data", "d", "a/*", program=(sys.executable, "-X", "importtime", SCRIPT))
    assert process.stderr is not None
    for line in process.stderr:
        if line.split()[-1] == imported.encode():
            break
    process.send_signal(2)
    ran = ended(process)
    assert ran.code in {130, -2}  # -2: before there was anything to end in order
    assert "Traceback" not in ran.err


def test_an_interrupt_between_the_import_and_the_command_is_no_traceback():
    program = (
        "import signal, sys\n"
        "from headrace.cli import main, starting\n"
        "main.main = lambda: signal.raise_signal(signal.SIGINT)\n"
        "sys.exit(starting.main())"
    )
    ran = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.long
def test_a_stdout_that_is_closed_or_full_is_one_line(headrace: Headrace, tmp_path: Path):
    assert headrace("publish", "--data", "data", "--adapter", "log", "--stream", "o/1", stdin=b"1\n").code == 0
    queues = ("queues", "--data", "data")
    commands = (
        queues,
        (*queues, "--json"),
        ("subscribe", "--data", "data", "--no-follow", "--from", "earliest", "*/*"),
    )
    for redirection, why in ((">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")):
        for command in commands:
            line = shlex.join([SCRIPT, *command]) + redirection
            ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, check=False)
            assert (ran.returncode, ran.stderr.decode()) == (1, f"headrace: stdout: {why}\n"), line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_tables_are_shown_in_the_encoding_of_stdout(encoding: str, headrace: Headrace, tmp_path: Path):
    lines = '{"key": "é€"}\n'.encode()
    assert headrace("publish", "--data", "d", "--namespace", "o", "--key-field", "key", stdin=lines).code == 0
    shown = tmp_path / "shown"
    with shown.open("w", encoding=encoding) as stdout, redirect_stdout(stdout):
        assert main(["streams", "--data", str(tmp_path / "d")]) == 0
        assert main(["queues", "--data", str(tmp_path / "d")]) == 0
    text = shown.read_text(encoding)
    assert {"ascii": r"\xe9\u20ac", "latin-1": r"é\u20ac", "utf-8": "é€"}[encoding] in text
    assert ("–" if encoding == "utf-8" else " -") in text


def test_each_character_that_an_encoding_lacks_is_shown_plainly():
    assert "é…–€ …é".encode("ascii", ERROR_HANDLER) == rb"\xe9...-\u20ac ...\xe9"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "headrace", "--version"]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert ran.stdout == f"headrace, version {version('headrace')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell: str, headrace: Headrace) -> None:
    script = headrace("completion", shell, PATH="/usr/bin:/bin").out
    assert f"_HEADRACE_COMPLETE={shell}_complete" in script


def test_bash_completes_commands() -> None:
    script = (
        'eval "$(headrace completion bash)"; COMP_WORDS=(headrace subscriptions cr); COMP_CWORD=2; '
        '_headrace_completion headrace; echo "${COMPREPLY[@]}"'
    )
    environment = {**ENVIRONMENT, "PATH": f"{Path(SCRIPT).parent}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "create\n"
