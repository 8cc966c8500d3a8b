"""Changes of payload types that programs of another version cannot read."""

import json
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from headrace import InvalidArgument
from headrace.testing import assert_schema_compatible
from headrace.testing.schema_reading import unreadable
from headrace.testing.schemas import schema_of

NOT_WRITTEN = "is not written, and has no default where it is read"
REMEDY = (
    "give a new field a default, keep a default for a field that goes, and take another namespace for another type "
    "(docs/payloads.md#change-a-type)"
)


class Named(msgspec.Struct):
    name: str


class Numbered(msgspec.Struct):
    name: int


def struct(options: dict[str, Any] | None = None, **fields: Any) -> type[msgspec.Struct]:
    """Return a struct. A field's value is its type, or its type and default."""
    listed: Any = [(name, *given) if isinstance(given, tuple) else (name, given) for name, given in fields.items()]
    return msgspec.defstruct("Order", listed, **(options or {}), kw_only=True)


def problems(writer: Any, reader: Any) -> list[str]:
    return unreadable(schema_of(writer), schema_of(reader))


STRICT = {"forbid_unknown_fields": True}
READABLE = [
    (struct(id=int), struct(id=int)),
    (struct(id=int), struct(id=int, note=(str, ""))),
    (struct(id=int, note=(str, "")), struct(id=int)),
    (struct(id=int, note=(str, "")), struct(id=int, note=str)),  # msgspec writes defaults
    (struct(id=int), struct(id=float)),
    (struct(id=int), struct(id=int | None)),
    (struct(kind=Literal["a"]), struct(kind=Literal["a", "b"])),
    (struct(kind=Literal["a"]), struct(kind=str)),
    (struct(n=Annotated[int, msgspec.Meta(ge=5)]), struct(n=Annotated[int, msgspec.Meta(ge=1)])),
    (struct(id=int), dict[str, int]),
    (list[int], list[int | str]),
    (tuple[int, str], tuple[int, str]),
    (struct(id=int), Any),
]
UNREADABLE = [
    (struct(id=int), struct(id=int, note=str), "$.note is not written, and has no default where it is read"),
    (struct({"omit_defaults": True}, id=(int, 0)), struct(id=int), "$.id may be left out, and has no default where it"),
    (struct(id=(int | msgspec.UnsetType, msgspec.UNSET)), struct(id=int), "$.id may be left out, and has no default"),
    (struct(id=int), struct(id=str), "$.id is integer, and string is read"),
    (struct(id=float), struct(id=int), "$.id is number, and integer is read"),
    (struct(id=int | None), struct(id=int), "$.id is null, and integer is read"),
    (struct(id=int | str), struct(id=int | None), "$.id is string, and integer or null is read"),
    (struct(kind=Literal["a", "c"]), struct(kind=Literal["a", "b"]), "$.kind may be 'c', and only 'a', 'b' is read"),
    (struct(kind=str), struct(kind=Literal["a"]), "$.kind is any string, and only 'a' is read"),
    (struct(kind=Literal["a"]), struct(kind=int), "$.kind may be 'a', and integer is read"),
    (struct(id=int, more=int), struct(STRICT, id=int), "$.more is written, and unknown fields are refused where it is"),
    (dict[str, int], struct(STRICT, id=(int, 0)), "$ has any keys, and unknown fields are refused where it is read"),
    (dict[str, int], dict[str, str], "$.* is integer, and string is read"),
    (struct(a=list[Named]), struct(a=list[Numbered]), "$.a[].name is string, and integer is read"),
    (tuple[int, str], tuple[int, int], "$[1] is string, and integer is read"),
    (tuple[int, str], list[int], "$ is a tuple, and a list is read"),
    (struct(n=int), struct(n=Annotated[int, msgspec.Meta(ge=1)]), "$.n has minimum none, and minimum 1 where it is"),
    (
        struct(n=Annotated[str, msgspec.Meta(max_length=9)]),
        struct(n=Annotated[str, msgspec.Meta(max_length=5)]),
        "$.n has maxLength 9, and maxLength 5 where it is read",
    ),
    (
        struct(n=Annotated[str, msgspec.Meta(pattern="a")]),
        struct(n=Annotated[str, msgspec.Meta(pattern="b")]),
        "$.n has pattern a, and pattern b where it is read",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader"), READABLE)
def test_values_that_can_be_read(writer: Any, reader: Any) -> None:
    assert problems(writer, reader) == []


@pytest.mark.parametrize(("writer", "reader", "problem"), UNREADABLE)
def test_values_that_cannot_be_read(writer: Any, reader: Any, problem: str) -> None:
    [found] = problems(writer, reader)
    assert found.startswith(problem)


def test_types_that_contain_themselves_are_compared() -> None:
    assert problems(Tree, Tree) == []
    [found] = problems(Tree, StrictTree)
    assert found == "$.name is string, and integer is read"


def test_types_that_refer_to_themselves_as_an_option_are_compared():
    assert problems(Link, Link) == []
    [found] = problems(Link, StrictLink)
    assert "$.weight is not written" in found


class Link(msgspec.Struct):
    name: str
    next: "Link | None" = None


class StrictLink(msgspec.Struct):
    weight: int
    next: "StrictLink | None" = None


class Tree(msgspec.Struct):
    name: str
    branches: "list[Tree]" = []


class StrictTree(msgspec.Struct):
    name: int
    branches: "list[StrictTree]" = []


class Model(pydantic.BaseModel):
    id: int
    tags: list[str] = []
    note: str | None = None


class StrictModel(pydantic.BaseModel, extra="forbid"):
    id: int


@dataclass
class Plain:
    id: int
    tags: list[str] = field(default_factory=list[str])


def test_pydantic_models_and_dataclasses_are_compared_with_each_other() -> None:
    assert problems(Model, Plain) == []
    assert problems(Plain, Model) == []
    assert problems(Model, make_dataclass("Plain", [("id", int), ("tags", list[str]), ("note", str | None)])) == []
    refused = "is written, and unknown fields are refused where it is read"
    assert problems(Model, StrictModel) == [f"$.note {refused}", f"$.tags {refused}"]


@pytest.mark.parametrize(("writer", "reader"), READABLE[:8])
def test_the_verdict_agrees_with_msgspec(writer: Any, reader: Any) -> None:
    """Only for structs whose fields are all written."""
    samples = {"id": 1, "note": "n", "kind": "a"}
    value = writer(**{name: samples[name] for name in writer.__struct_fields__})
    msgspec.json.decode(msgspec.json.encode(value), type=reader)


def test_a_new_type_is_recorded_and_the_test_fails_once(tmp_path: Path) -> None:
    file = tmp_path / "schemas" / "order.json"
    with pytest.raises(AssertionError, match="Order is recorded as version 1; commit this file, and run again"):
        assert_schema_compatible(struct(id=int), file)
    assert_schema_compatible(struct(id=int), file)
    with pytest.raises(AssertionError, match="Order is recorded as version 2"):
        assert_schema_compatible(struct(id=int, note=(str, "")), file)
    assert_schema_compatible(struct(id=int, note=(str, "")), file)
    assert len(json.loads(file.read_text())["versions"]) == 2


def test_a_change_that_breaks_programs_is_not_recorded_and_names_each_problem(tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    for version in (struct(id=int), struct(id=int, note=(str, ""))):
        with pytest.raises(AssertionError, match="recorded"):
            assert_schema_compatible(version, file)
    before = file.read_text()
    for _ in range(2):
        with pytest.raises(AssertionError) as caught:
            assert_schema_compatible(struct(id=str, country=str), file)
        assert str(caught.value).splitlines() == [
            f"{file}: the change of Order breaks programs:",
            f"  version 1 was written, Order cannot read it: $.country {NOT_WRITTEN}",
            "  version 1 was written, Order cannot read it: $.id is integer, and string is read",
            "  Order is written, version 1 cannot read it: $.id is string, and integer is read",
            f"  version 2 was written, Order cannot read it: $.country {NOT_WRITTEN}",
            "  version 2 was written, Order cannot read it: $.id is integer, and string is read",
            "  Order is written, version 2 cannot read it: $.id is string, and integer is read",
            REMEDY,
        ]
    assert file.read_text() == before


def test_a_damaged_file_and_a_type_without_a_schema_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text("{}")
    with pytest.raises(InvalidArgument, match=r"no versions of a schema .*; restore it from version control"):
        assert_schema_compatible(struct(id=int), file)
    with pytest.raises(InvalidArgument, match="Path has no schema"):
        assert_schema_compatible(Path, file)
