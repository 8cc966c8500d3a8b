"""Whether each value that one JSON schema describes can be read by another one. Pure.

It knows the schemas that msgspec and pydantic make. If it cannot tell, it reports a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

Schema = Mapping[str, Any]

WRITTEN = "x-written"
"""Keyword of objects: the fields that are always written."""
_LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_SAME = ("pattern", "format", "multipleOf", "uniqueItems", "contentEncoding", "propertyNames", "not", "allOf")
"""If the reader has such a keyword, the writer must have the same."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def unreadable(writer: Schema, reader: Schema) -> list[str]:
    """Return the reasons why a reader of `reader` cannot read all values of `writer`, each with its place."""
    return list(_SchemaReading(writer.get("$defs", {}), reader.get("$defs", {})).problems(writer, reader, "$"))


class _SchemaReading:
    """Compares two schemas, with the definitions to which they refer."""

    def __init__(self, written: Mapping[str, Schema], read: Mapping[str, Schema]) -> None:
        self._written = written
        self._read = read
        self._begun = set[tuple[str, str]]()
        """Pairs of definitions that are compared already: types may contain themselves."""

    def problems(self, writer: Schema, reader: Schema, at: str) -> Iterator[str]:
        pair = writer.get("$ref", ""), reader.get("$ref", "")
        if all(pair):
            if pair in self._begun:
                return
            self._begun.add(pair)
        writes, reads = _resolved(writer, self._written), _resolved(reader, self._read)
        if written := _alternatives(writes):
            for each in written:
                yield from self.problems(each, reader, at)
        elif taken := _alternatives(reads):
            yield from self._of_any(writer, taken, at)
        else:
            yield from self._of_plain(writes, reads, at)

    def _of_any(self, writer: Schema, taken: Sequence[Schema], at: str) -> Iterator[str]:
        """The value has to fit one of the alternatives."""
        found, kind = list[list[str]](), _kind(_resolved(writer, self._written))
        for each in taken:
            reading = _SchemaReading(self._written, self._read)
            reading._begun = set(self._begun)
            problems = list(reading.problems(writer, each, at))
            if not problems:
                return
            found.append(problems)
        same = [p for p, each in zip(found, taken, strict=True) if _kind(_resolved(each, self._read)) == kind]
        if len(same) == 1:
            yield from same[0]
        else:
            kinds = " or ".join(_kind(_resolved(each, self._read)) for each in taken)
            yield f"{at} is {kind}, and {kinds} is read"

    def _of_plain(self, writer: Schema, reader: Schema, at: str) -> Iterator[str]:
        if not reader.keys() - {"$defs", WRITTEN}:
            return  # any value
        if "enum" in reader or "const" in reader:
            yield from _of_values(writer, reader, at)
            return
        if "enum" in writer or "const" in writer:
            kinds = _TYPES.get(reader.get("type", ""), ())
            if wrong := [value for value in _values(writer) if not isinstance(value, kinds)]:
                yield f"{at} may be {wrong[0]!r}, and {_kind(reader)} is read"
            return
        if _kind(writer) != _kind(reader) and (_kind(writer), _kind(reader)) != ("integer", "number"):
            yield f"{at} is {_kind(writer)}, and {_kind(reader)} is read"
            return
        yield from _of_limits(writer, reader, at)
        if reader.get("type") == "object":
            yield from self._of_objects(writer, reader, at)
        elif reader.get("type") == "array":
            yield from self._of_arrays(writer, reader, at)

    def _of_objects(self, writer: Schema, reader: Schema, at: str) -> Iterator[str]:
        written, read = writer.get("properties", {}), reader.get("properties", {})
        always = writer.get(WRITTEN, ())
        for name in reader.get("required", ()):
            if name not in written:
                yield f"{at}.{name} is not written, and has no default where it is read"
            elif name not in always:
                yield f"{at}.{name} may be left out, and has no default where it is read"
        others = reader.get("additionalProperties", True)
        for name, each in written.items():
            if name in read:
                yield from self.problems(each, read[name], f"{at}.{name}")
            elif others is False:
                yield f"{at}.{name} is written, and unknown fields are refused where it is read"
            elif (taken := _schema(others)) is not None:
                yield from self.problems(each, taken, f"{at}.{name}")
        keys = _schema(writer.get("additionalProperties"))
        if keys is not None and others is False:
            yield f"{at} has any keys, and unknown fields are refused where it is read"
        elif keys is not None and (taken := _schema(others)) is not None:
            yield from self.problems(keys, taken, f"{at}.*")

    def _of_arrays(self, writer: Schema, reader: Schema, at: str) -> Iterator[str]:
        written, read = writer.get("prefixItems", ()), reader.get("prefixItems", ())
        if bool(written) != bool(read):
            yield f"{at} is a {'tuple' if written else 'list'}, and a {'tuple' if read else 'list'} is read"
            return
        for number, (each, other) in enumerate(zip(written, read, strict=False)):
            yield from self.problems(each, other, f"{at}[{number}]")
        items, taken = _schema(writer.get("items", {})), _schema(reader.get("items", {}))
        if items is not None and taken is not None:
            yield from self.problems(items, taken, f"{at}[]")


def _schema(value: object) -> Schema | None:
    """Return a value that is a schema; None for True and False."""
    return cast("Schema", value) if isinstance(value, Mapping) else None


def _resolved(schema: Schema, defs: Mapping[str, Schema]) -> Schema:
    while "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    return schema


def _alternatives(schema: Schema) -> Sequence[Schema]:
    found: Sequence[Schema] = schema.get("anyOf") or schema.get("oneOf") or ()
    kinds: str | list[str] = schema.get("type", "")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else found


def _values(schema: Schema) -> Sequence[Any]:
    return [schema["const"]] if "const" in schema else schema["enum"]


def _of_values(writer: Schema, reader: Schema, at: str) -> Iterator[str]:
    known = _values(reader)
    if not ("enum" in writer or "const" in writer):
        yield f"{at} is any {_kind(writer)}, and only {', '.join(map(repr, known))} is read"
    elif new := [value for value in _values(writer) if value not in known]:
        yield f"{at} may be {', '.join(map(repr, new))}, and only {', '.join(map(repr, known))} is read"


def _of_limits(writer: Schema, reader: Schema, at: str) -> Iterator[str]:
    for limit in (*_LOWEST, *_HIGHEST):
        if limit not in reader:
            continue
        mine, theirs = writer.get(limit), reader[limit]
        if mine is None or (mine < theirs if limit in _LOWEST else mine > theirs):
            yield f"{at} has {limit} {'none' if mine is None else mine}, and {limit} {theirs} where it is read"
    for keyword in _SAME:
        if keyword in reader and reader[keyword] != writer.get(keyword):
            yield f"{at} has {keyword} {writer.get(keyword, 'none')}, and {keyword} {reader[keyword]} where it is read"


def _kind(schema: Schema) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(map(repr, _values(schema)))
    return str(schema.get("type", "any value"))
