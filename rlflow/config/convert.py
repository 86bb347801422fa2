"""A plain value to the type that a key declares, or the reason why not; a dataclass from a tree of such values."""

import math
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from rlflow.config.document import parse
from rlflow.config.faults import Fault, as_written, nearest
from rlflow.config.names import unknown_keys


class Text(str):
    """Text from the command line or the environment, whose type is not its own but that of the key it is for."""

    __slots__ = ()


class Mismatch(ValueError):
    """A value that a type does not allow: `args[0]` is the rule, `nearest` a value that would do."""

    def __init__(self, rule: str, nearest: str | None = None) -> None:
        super().__init__(rule)
        self.nearest = nearest


def convert(value: Any, expected: Any) -> Any:
    """`value` as the type `expected`; raises Mismatch. Text and quoted scalars are read as the type demands."""
    origin, options = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return _one_of(value, options)
    if origin is Literal:
        return _choice(value, options)
    if expected is str:
        if not isinstance(value, str):
            raise Mismatch(f"must be text; write '{value}' in quotes")
        return str(value)
    if isinstance(value, str) and expected is not Any:
        value = _read(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise Mismatch("must be a list")
        return tuple(convert(item, options[0]) for item in value)
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise Mismatch("must map names to values")
        return plain(value)
    return plain(value) if expected is Any else _scalar(value, expected)


def plain(value: Any) -> Any:
    """`value` with every Text in it read as YAML."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(_read(value)) if isinstance(value, Text) else value


def build(cls: type, tree: Any, path: str, faults: list[Fault]) -> Any:
    """The dataclass `cls` from `tree`; what does not fit is added to `faults` and left at its default."""
    tree, missing = _read_mapping(tree, path, faults)
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}
    prefix = f"{path}." if path else ""
    for name in tree:
        if name not in known:
            faults += unknown_keys(f"{prefix}{name}", tree[name])
    values = {}
    for name, item in known.items():
        if name in tree:
            values[name] = _field(item, hints[name], tree[name], prefix + name, faults)
        elif _default(item) is MISSING:
            values[name] = _missing(item, hints[name], prefix + name, missing)
    return cls(**values)


def _read_mapping(tree: Any, path: str, faults: list[Fault]) -> tuple[dict[str, Any], list[Fault]]:
    """The mapping, and where faults of keys that it lacks go: nowhere, if it is none at all."""
    value = plain(tree) if isinstance(tree, Text) else tree
    if value is None:
        return {}, faults
    if not isinstance(value, dict):
        faults.append(Fault(path, value, "must hold keys and values"))
        return {}, []
    return {str(name): item for name, item in value.items()}, faults


def _field(item: Field, hint: Any, value: Any, path: str, faults: list[Fault]) -> Any:
    if is_dataclass(hint):
        return build(hint, value, path, faults)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        return _list_of(get_args(hint)[0], value, path, faults)
    if hint is str and _is_null(value):
        return _missing(item, hint, path, faults, "null")
    try:
        return convert(value, hint)
    except Mismatch as mismatch:
        faults.append(Fault(path, as_written(value), mismatch.args[0], mismatch.nearest))
    default = _default(item)
    return "" if default is MISSING else default


def _list_of(cls: type, value: Any, path: str, faults: list[Fault]) -> tuple[Any, ...]:
    value = plain(value) if isinstance(value, Text) else value
    if not isinstance(value, list):
        faults.append(Fault(path, value, "must be a list"))
        return ()
    return tuple(build(cls, entry, f"{path}.{number}", faults) for number, entry in enumerate(value))


def _default(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _missing(item: Field, hint: Any, path: str, faults: list[Fault], given: str | None = None) -> Any:
    if is_dataclass(hint):
        return build(hint, {}, path, faults)  # type: ignore[arg-type]
    faults.append(Fault(path, given, f"must be given: {item.metadata['doc']}"))
    return ""


def _read(text: str) -> Any:
    try:
        return parse(text)
    except yaml.YAMLError as error:
        raise Mismatch("cannot be read as YAML") from error


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, Text) and value == "null")


def _one_of(value: Any, options: tuple[Any, ...]) -> Any:
    if type(None) in options and (_is_null(value) or (isinstance(value, Text) and not value)):
        return None
    mismatches = []
    for option in options:
        if option is not type(None):
            try:
                return convert(value, option)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
    rules = " or ".join(str(mismatch) for mismatch in mismatches)
    if type(None) in options:
        rules = _or_null(rules)
    nearest_value = next((mismatch.nearest for mismatch in mismatches if mismatch.nearest), None)
    raise Mismatch(rules, nearest_value)


def _or_null(rule: str) -> str:
    """`rule` with null as one more value that would do."""
    if rule == "must be true or false":
        return "must be true, false or null"
    demand, semicolon, advice = rule.partition(";")
    return f"{demand}{',' if 'one of' in demand else ''} or null{semicolon}{advice}"


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value in choices:
        return str(value)
    rule = f"must be one of {', '.join(choices)}"
    if _is_null(value):  # which is spelled like words that mean something else
        raise Mismatch(rule, "none" if "none" in choices else None)
    raise Mismatch(rule, nearest(str(value), choices, cutoff=0.4))


def _scalar(value: Any, expected: type) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if expected is bool:
        if not isinstance(value, bool):
            raise Mismatch("must be true or false")
    elif expected is int:
        if not number or isinstance(value, float):
            raise Mismatch("must be a whole number", f"{value:.0f}" if number and math.isfinite(value) else None)
    elif not number or not math.isfinite(value):
        raise Mismatch("must be a finite number")
    return expected(value)
