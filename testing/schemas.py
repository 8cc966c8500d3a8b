"""Changes of payload types: can handlers of now read the events that are stored, and older handlers the new events?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from ..streams.codecs import is_model, name_of
from ..streams.errors import InvalidArgument
from .schema_reading import WRITTEN, Schema, unreadable

_NOISE = ("title", "description", "default", "examples", "discriminator")
"""Keywords that say nothing about which values can be read."""
_REMEDY = (
    "give a new field a default, keep a default for a field that goes, and take another namespace for another type "
    "(docs/payloads.md#change-a-type)"
)


def assert_schema_compatible(kind: Any, file: str | os.PathLike[str]) -> None:
    """Check that a payload's type can be read across all its versions: the present type reads the payloads of each
    earlier version, and each earlier version reads those of the present type.

    `kind` is a msgspec Struct, a pydantic model, a dataclass, or another type that msgspec decodes. `file` keeps the
    versions as JSON: commit it. A type that is new or has changed compatibly is added to the file, and the test fails
    once, so that the file is committed, too. Raises AssertionError with all problems; InvalidArgument for a type
    without a schema, and for a file that is damaged.
    """
    __tracebackhide__ = True
    path, name, now = Path(file), name_of(kind), schema_of(kind)
    versions: Sequence[Schema] = _versions(path) if path.exists() else ()
    if versions and versions[-1] == now:
        return
    problems = list[str]()
    for number, before in enumerate(versions, 1):
        problems += [f"version {number} was written, {name} cannot read it: {each}" for each in unreadable(before, now)]
        problems += [f"{name} is written, version {number} cannot read it: {each}" for each in unreadable(now, before)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise AssertionError(f"{path}: the change of {name} breaks programs:{listed}\n{_REMEDY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": [*versions, now]}, indent=1) + "\n", encoding="utf-8")
    raise AssertionError(f"{path}: {name} is recorded as version {len(versions) + 1}; commit this file, and run again")


def schema_of(kind: Any) -> Schema:
    """Return the JSON schema of a type's payloads. Each object has its fields that are always written, too."""
    try:
        if is_model(kind):
            root: dict[str, Any] = kind.model_json_schema()
            defs: dict[str, Any] = root.pop("$defs", {})
            omitted = dict.fromkeys(["", *defs], frozenset[str]())  # the codecs write all fields
        else:
            (root,), defs = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
            omitted = _omitted(msgspec.inspect.type_info(kind))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise InvalidArgument(f"{name_of(kind)} has no schema: {error}") from None
    return {
        **_plain(root, omitted.get("")),
        "$defs": {name: _plain(each, omitted.get(name)) for name, each in sorted(defs.items())},
    }


def _plain(schema: Mapping[str, Any], omitted: frozenset[str] | None = None) -> dict[str, Any]:
    """Return a schema without noise, and with the fields that are always written. `omitted` are those that may be left
    out. None: all that have a default."""
    plain = {key: _plain_value(key, value) for key, value in schema.items() if key not in _NOISE}
    if "properties" in plain:
        required = plain.get("required", ())
        plain[WRITTEN] = sorted(required if omitted is None else plain["properties"].keys() - omitted)
    return plain


def _plain_value(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: _plain(each) for name, each in sorted(value.items())}
    if key == "required":
        return sorted(value)
    if isinstance(value, Mapping):
        return _plain(cast("Mapping[str, Any]", value))
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_plain_value("", each) for each in items]
    return value


def _omitted(info: Any, found: dict[str, frozenset[str]] | None = None) -> dict[str, frozenset[str]]:
    """Return the fields that may be left out of payloads, by the name of their class: those that are UNSET, and the
    defaults of structs with `omit_defaults`."""
    found = {} if found is None else found
    kind = getattr(info, "cls", None)
    fields = getattr(info, "fields", ())
    if kind is not None and fields and kind.__name__ not in found:
        all_defaults = getattr(getattr(kind, "__struct_config__", None), "omit_defaults", False)
        found[kind.__name__] = frozenset(
            field.encode_name for field in fields if not field.required and (all_defaults or _is_unset(field))
        )
        for field in fields:
            _omitted(field.type, found)
    for part in ("item_type", "key_type", "value_type"):
        if (inner := getattr(info, part, None)) is not None:
            _omitted(inner, found)
    for inner in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
        _omitted(inner, found)
    return found


def _is_unset(field: Any) -> bool:
    """Whether the default of an optional field is UNSET: such a field has none for msgspec."""
    return field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT


def _versions(path: Path) -> Sequence[Schema]:
    try:
        versions = json.loads(path.read_text(encoding="utf-8"))["versions"]
        assert isinstance(versions, list)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise InvalidArgument(f"{path}: no versions of a schema ({error}); restore it from version control") from None
    return cast("list[Schema]", versions)
