"""The names of all keys, and the one that was probably meant by a name that does not exist."""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from rlflow.config.faults import Fault, nearest
from rlflow.config.schema import Config


@cache
def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the schema's order; `rewards` gives the class of its entries."""
    hints = get_type_hints(Config)
    return {name: hint if is_dataclass(hint) else get_args(hint)[0] for name, hint in hints.items()}  # type: ignore[misc]


@cache
def leader(section: str) -> str | None:
    """The first section that has the keys which `section` shares with others, None where that is itself."""
    bases = {*sections()[section].__mro__} - {object}
    first = next(name for name, cls in sections().items() if bases & {*cls.__mro__})
    return None if first == section else first


@cache
def own_keys(section: str) -> tuple[str, ...]:
    """The keys of `section` without those that it shares with an earlier one."""
    first = leader(section)
    shared = {item.name for item in fields(sections()[first])} if first else set()
    return tuple(item.name for item in fields(sections()[section]) if item.name not in shared)


@cache
def _names(section: str) -> dict[str, str]:
    """Every name by which a key of `section` may be asked for, those of other tools included -> the key's name."""
    items = fields(sections()[section])
    aliases = {alias: item.name for item in items for alias in item.metadata.get("known_as", ())}
    return {**aliases, **{item.name: item.name for item in items}}


def unknown_keys(path: str, value: Any) -> list[Fault]:
    """A fault for a key that no section declares, with the key that was probably meant; a section has one a key."""
    section, _, rest = path.partition(".")
    if rest == "" and isinstance(value, dict) and value:
        return [fault for name, item in value.items() for fault in unknown_keys(f"{path}.{name}", item)]
    shown = None if isinstance(value, dict | list) else value
    if section not in sections():
        return [Fault(path, shown, f"unknown section; sections are {', '.join(sections())}", _meant(section, rest))]
    *prefix, name = path.split(".")
    here, name = _names(section), _clean(name)
    elsewhere = _in_optimizer(section, name) or _same_elsewhere(name)
    found = here.get(name) or (None if elsewhere else here.get(nearest(name, here) or ""))
    suggestion = ".".join([*prefix, found]) if found else elsewhere or _similar_elsewhere(name)
    keys = ", ".join(item.name for item in fields(sections()[section]))
    return [Fault(path, shown, "unknown key" if suggestion else f"unknown key; {section} has {keys}", suggestion)]


def _meant(section: str, rest: str) -> str | None:
    """The section, or its key `rest`, that an unknown section probably stands for."""
    name = _clean(rest.rpartition(".")[2] or section)
    meant = nearest(_clean(section), sections())
    if meant is None or not rest:
        return meant or _same_elsewhere(name) or _similar_elsewhere(name)
    found = _names(meant).get(name) or _names(meant).get(nearest(name, _names(meant)) or "")
    return f"{meant}.{found}" if found else _same_elsewhere(name) or meant


def _clean(name: str) -> str:
    return name.strip("+-~").replace("-", "_").lower()


def _in_optimizer(role: str, name: str) -> str | None:
    """What a role's own optimizer calls `name`, or the section of that, where the role has one."""
    section = f"{role}_optimizer"
    if section not in sections():
        return None
    if name == "optimizer":
        return section
    found = _names(section).get(name)
    return f"{section}.{found}" if found else None


def _same_elsewhere(name: str) -> str | None:
    return (
        " or ".join(f"{part}.{meant}" for part in sections() for word, meant in _own_names(part) if word == name)
        or None
    )


def _similar_elsewhere(name: str) -> str | None:
    everything = {word: f"{part}.{meant}" for part in sections() for word, meant in _own_names(part)}
    return everything.get(nearest(name, everything, cutoff=0.75) or "")


def _own_names(section: str) -> list[tuple[str, str]]:
    return [(word, meant) for word, meant in _names(section).items() if meant in own_keys(section)]
