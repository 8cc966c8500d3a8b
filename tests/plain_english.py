"""Measure how plain the English of the repository is: `python -m tests.plain_english [-v] [FOLDER...]`.

Counted are turns of phrase that stand in for a noun (`what is left`, `whoever holds it`), in docstrings, attribute
docstrings, comments, messages of raised errors, Markdown prose and comments of `.proto` files. The limit is
`LIMIT` hits per 1,000 words for each top-level folder. If a folder is above it, the lines to change are printed and the
exit code is 1. With `-v` all lines with a hit are printed. A low number does not prove that a text is good: read it.
"""

import argparse
import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent

LIMIT = 1.5
"""Hits per 1,000 words that a folder may have: some uses are right, as in an indirect question."""

NOT_OURS = {"__pycache__", "build", "demo-data", "dist", "node_modules"}
"""Folders that are made and not written."""

_VERBS = "is|was|has|had|comes?|came|does|did|can|may|must|should|would|follows|goes|went|stands|remains|needs?"
_NOUNS = "it|they|there|one|a|an|the|this|that|others?|somebody|nobody"
_QUANTITIES = "no|nothing|none|some|somebody|nobody|all|many|more|several"


class Pattern(NamedTuple):
    expression: re.Pattern[str]
    suggestion: str


PATTERNS = (
    Pattern(re.compile(rf"\bwhat\s+(?:{_VERBS}|{_NOUNS})\b"), "name the thing instead of 'what …'"),
    Pattern(re.compile(r"\bwho(?:ever|mever|m)?\b", re.IGNORECASE), "name the person or the part instead of 'who'"),
    Pattern(
        re.compile(
            rf"(?:(?<=[.;:,(]\s)|^)\s*[Ww]here\s+(?:it|the|there|a|an|they|this|that|these|one|{_QUANTITIES})\b"
            r"|\bwhere\s+(?:it|there|nothing|none|nobody|somebody|they)\s+(?:is|are|was|has|had|have|can|does|did|may)\b"
        ),
        "write 'if' or 'when' for a condition",
    ),
    Pattern(re.compile(r"\b(?:some|any|no|every)body\b", re.IGNORECASE), "name the person or the part"),
    Pattern(re.compile(r"\b(?:he|his|him|himself)\b"), "write 'you', or name the role"),
    Pattern(re.compile(r"(?:^|[.;]\s)(?:Nor|So)\s+(?:is|are|do|does|did|has|have|can)\b"), "subject first, then verb"),
    Pattern(re.compile(r"\bbut\s+for\b|\bapart\b(?!\s+from)"), "write 'except', or 'separate'"),
)


_STRING_OR_COMMENT = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(#[^\n]*)",
    re.DOTALL,
)
"""Group 1 is a comment of Python. The module `tokenize` finds the same ones, but takes half of the whole time."""


class Hit(NamedTuple):
    """A turn of phrase that hides a noun."""

    path: str
    line: int
    phrase: str
    suggestion: str


def _prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring, comment and message of a raised error."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value
    line, end = 1, 0
    for match in _STRING_OR_COMMENT.finditer(text):
        if comment := match.group(1):
            line, end = line + text.count("\n", end, match.start()), match.start()
            if not re.match(r"noqa|type:|pyright|fmt:|pragma", comment := comment.lstrip("#: ")):
                yield line, comment


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs: neither code blocks nor tables."""
    without_code = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL)
    lines = [
        "" if line.lstrip().startswith("|") or line.startswith("    ") else line for line in without_code.split("\n")
    ]
    yield 1, "\n".join(lines)


def _prose_of_proto(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        _, slashes, comment = line.partition("//")
        if slashes:
            yield number, comment


_READERS = {".py": _prose_of_python, ".md": _prose_of_markdown, ".proto": _prose_of_proto}


def measure(path: str, text: str) -> tuple[int, list[Hit]]:
    """Return the number of words of prose in a file, and the hits in them. The suffix of `path` says how to read it."""
    words, hits = 0, list[Hit]()
    for first_line, prose in _READERS[Path(path).suffix](text):
        without_names = re.sub(r"`[^`\n]*`", "X", prose)  # a name of the code is no prose
        words += len(without_names.split())
        for expression, suggestion in PATTERNS:
            for match in expression.finditer(without_names):
                start = match.start() + len(match.group()) - len(match.group().lstrip())
                line = first_line + without_names.count("\n", 0, start)
                hits.append(Hit(path, line, " ".join(match.group().split()), suggestion))
    return words, sorted(hits)


def is_measured(path: str) -> bool:
    """Whether the file has prose of ours."""
    generated = re.search(r"_pb2(_grpc)?\.pyi?$", path)
    return Path(path).suffix in _READERS and not generated


def folder_of(path: str) -> str:
    """Return the top-level folder that the file counts for; '.' for files beside the folders."""
    folder, slash, _ = path.partition("/")
    return folder if slash else "."


def measure_folders(files: Iterable[tuple[str, str]]) -> tuple[dict[str, float], dict[str, list[Hit]]]:
    """Take (path, text) of files; return hits per 1,000 words, and the hits, for each top-level folder."""
    words, hits = defaultdict[str, int](int), defaultdict[str, list[Hit]](list)
    for path, text in files:
        if is_measured(path):
            words_of_file, hits_of_file = measure(path, text)
            words[folder_of(path)] += words_of_file
            hits[folder_of(path)] += hits_of_file
    return {folder: 1000 * len(hits[folder]) / words[folder] for folder in sorted(words) if words[folder]}, hits


def repository_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of the files to measure."""
    for folder, folders, names in os.walk(REPOSITORY):
        # Without git: the tests also run in a copy of the checkout.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_OURS)
        for name in sorted(names):
            file = Path(folder, name)
            path = file.relative_to(REPOSITORY).as_posix()
            if is_measured(path):
                yield path, file.read_text(encoding="utf-8")


def main() -> int:
    """Print the folders above the limit, with their hits. Return the exit code: 1 if there is one."""
    arguments = argparse.ArgumentParser(
        prog="python -m tests.plain_english", description="Measure how plain our English is."
    )
    arguments.add_argument("-v", "--verbose", action="store_true", help="print the lines of the other folders too")
    arguments.add_argument("folder", nargs="*", help="top-level folders to measure; all if none is given")
    options = arguments.parse_args()
    rates, hits = measure_folders(repository_files())
    chosen = {folder: rate for folder, rate in rates.items() if not options.folder or folder in options.folder}
    for folder, rate in chosen.items():
        if rate > LIMIT or options.verbose:
            for hit in hits[folder]:
                print(f"{hit.path}:{hit.line}: '{hit.phrase}': {hit.suggestion}")
    for folder, rate in chosen.items():
        if rate > LIMIT or options.verbose:
            print(f"{folder}: {rate:.1f} hits per 1,000 words; the limit is {LIMIT}")
    above = [folder for folder, rate in chosen.items() if rate > LIMIT]
    if above:
        print(f"The English is not plain enough in: {', '.join(above)}. CONTRIBUTING.md has the rules.")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
