"""Follows a page as a reader does: writes its files, and runs its programs and commands, in one directory."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from tests.cli.forking import Process, forking
from tests.plain_english import REPOSITORY

PATIENCE_S = 100


class CodeBlock(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    file: str
    """The name of the file that it is, named in code style in the sentence before it; "" for none."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def code_blocks(page: str) -> list[CodeBlock]:
    """The fenced blocks of a page of the repository, as in "docs/guide.md"."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found: list[CodeBlock] = []
    for match in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        sentence = text[: match.start()].rstrip().rpartition("\n\n")[2]
        names = re.findall(r"`([\w./-]+\.(?:py|toml|txt|jsonl))`[^`]*:$", sentence) if sentence.endswith(":") else []
        found.append(CodeBlock(page, line, match[2], textwrap.dedent(match[3]), names[-1] if names else ""))
    return found


class Follower:
    """`replaced` maps addresses in the text to those of the test's servers."""

    def __init__(self, directory: Path, replaced: Mapping[str, str]) -> None:
        self._directory = directory
        self._replaced = replaced
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(directory),
            "PYTHONUNBUFFERED": "1",
        }
        self._background = ExitStack()
        self._silo = self._background.enter_context(ExitStack())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    def follow(self, block: CodeBlock) -> str:
        """Return the text that the block prints. Compare it with the text of the block, if that has some."""
        text = block.text
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        if block.file:
            (self._directory / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self._directory / block.file).write_text(text, encoding="utf-8")
            return ""
        if block.language == "python":
            return self._forked(block, [], text)
        assert block.language == "console", f"{block}: name the file that it is in the sentence before it"
        return "".join(self._command(block, *each) for each in _commands(text))

    def _command(self, block: CodeBlock, command: str, expected: str) -> str:
        if command.startswith("headrace silo") or command.endswith(" &"):
            self._start(block, command.removesuffix(" &"))
            return ""
        deadline = time.monotonic() + PATIENCE_S
        printed = self._printed(block, command)
        if expected:
            pattern = re.escape(expected.strip()).replace("…", ".*")
            while not re.fullmatch(pattern, printed.strip(), re.DOTALL):
                # It may show a state that silos reach a moment later: they tell each other once a second.
                assert time.monotonic() < deadline, f"{block}: {command}\n{printed}"
                time.sleep(0.5)
                printed = self._printed(block, command)
        return printed

    def _printed(self, block: CodeBlock, command: str) -> str:
        if (called := self._forkable(command)) is not None:
            return self._forked(block, *called)
        return self._run(block, ["bash", "-c", f"set -e -o pipefail; {command}"])

    def _forkable(self, command: str) -> tuple[list[str], str] | None:
        """Arguments and script of a command that needs neither a shell nor a new interpreter, else None."""
        if set(command) & set("|<>;&$"):
            return None
        program, *arguments = shlex.split(command, comments=True)
        if program == "headrace":
            return arguments, ""
        if program == "python" and arguments[0].endswith(".py"):
            return arguments[1:], (self._directory / arguments[0]).read_text(encoding="utf-8")
        return None

    def _forked(self, block: CodeBlock, arguments: list[str], script: str = "") -> str:
        """As a process of its own, in which headrace is imported already."""
        code, out, err = forking().run(arguments, b"", self._directory, self._environment, PATIENCE_S, script)
        assert code == 0, f"{block}:\n{out.decode()}{err.decode()}"
        return out.decode()

    def _run(self, block: CodeBlock, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self._directory, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, block: CodeBlock, command: str) -> None:
        """Start a silo, in place of the one before, or another program that goes on."""
        is_silo = command.startswith("headrace silo")
        if is_silo:
            self._silo.close()
        called, null = self._forkable(command), subprocess.DEVNULL
        stderr = subprocess.PIPE if is_silo else null
        process: Process
        if called is not None:
            process = forking().start(
                called[0], cwd=self._directory, env=self._environment, stdout=null, stderr=stderr, script=called[1]
            )
        else:
            process = subprocess.Popen(
                command.split(), cwd=self._directory, env=self._environment, stdout=null, stderr=stderr
            )
        (self._silo if is_silo else self._background).callback(_stop, process)
        if is_silo:
            assert process.stderr is not None
            workers, lines = int(re.findall(r"--workers (\d+)|$", command)[0] or 1), list[str]()
            while sum("silo is ready" in line for line in lines) < workers:
                lines.append(process.stderr.readline().decode())
                assert lines[-1], f"{block}: {command}\n{''.join(lines)}"


def _stop(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)


def _commands(text: str) -> list[tuple[str, str]]:
    """The commands of a block, each with the text that it should print."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    found: list[tuple[str, str]] = []
    for part in parts:
        lines = part.splitlines(keepends=True)
        length = next(number for number, line in enumerate(lines, 1) if not line.rstrip().endswith("\\"))
        found.append(("".join(lines[:length]).strip(), "".join(lines[length:])))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
