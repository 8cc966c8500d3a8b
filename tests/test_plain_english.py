"""The measure of plain English finds the phrases that it should find, and nothing in names or code."""

import pytest

from tests.plain_english import LIMIT, Hit, folder_of, is_measured, measure, measure_folders

PLAIN = "Return the next batch of the queue. Raise `Closed` if the consumer was closed. "


def phrases(path: str, text: str) -> list[tuple[int, str]]:
    return [(hit.line, hit.phrase) for hit in measure(path, text)[1]]


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("Return what is left.", "what is"),
        ("Return what\nis left.", "what is"),
        ("Tell whoever holds it.", "whoever"),
        ("Where the queue ends, stop.", "Where the"),
        ("Stop, where there is nothing.", "where there"),
        ("Wait for somebody.", "somebody"),
        ("The operator stops his silo.", "his"),
        ("Nothing waits. Nor does the agent.", ". Nor does"),
        ("All but for the last one.", "but for"),
    ],
)
def test_a_phrase_that_hides_the_noun_is_found(sentence: str, phrase: str) -> None:
    assert phrase in [found for _, found in phrases("docs/page.md", f"{PLAIN}\n\n{sentence}\n")]


def test_docstrings_attribute_docstrings_comments_and_messages_are_read_with_their_lines() -> None:
    text = '''"""Say what is left."""

size = 1
"""How large what is left may be."""


def check():
    # somebody waits
    text = "what is a value of the code"
    raise ValueError(f"tell {size} who it was")
'''
    assert phrases("silo/part.py", text) == [(1, "what is"), (4, "what is"), (8, "somebody"), (10, "who")]


def test_comments_of_a_protocol_are_read() -> None:
    text = "message A {\n  string name = 1;  // What whoever reads it needs.\n}\n"
    assert phrases("proto/v1/a.proto", text) == [(2, "whoever")]


def test_code_blocks_tables_and_names_are_not_prose() -> None:
    text = "Call `what is`.\n\n```python\n# what is\n```\n\n| who | what is |\n\n    what is\n"
    assert phrases("docs/page.md", text) == []


def test_a_bad_sentence_moves_a_folder_over_the_limit_and_is_named_with_a_suggestion() -> None:
    plain = ("docs/page.md", PLAIN * 20)
    rates, hits = measure_folders([plain, ("docs/other.md", "Read\nwhat is left.")])
    assert rates["docs"] > LIMIT
    assert hits["docs"] == [Hit("docs/other.md", 2, "what is", "name the thing instead of 'what …'")]
    assert measure_folders([plain])[0] == {"docs": 0}


def test_generated_files_are_not_measured() -> None:
    assert is_measured("silo/provider.py")
    assert not is_measured("proto/v1/events_pb2.py")
    assert not is_measured("docs/architecture.svg")
    assert (folder_of("silo/services/reader.py"), folder_of("README.md")) == ("silo", ".")
