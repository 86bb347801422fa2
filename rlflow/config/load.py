"""A configuration file, overrides of the command line and the environment to a `Config`, and back to text.

Precedence: the schema's default < the file < an override; keys of a role that follows the actor take the actor's
values where they are absent. Every fault is collected; rules between keys are in `check`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_bridge.families import load_architecture
from rlflow.config.check import Purpose, check
from rlflow.config.convert import Mismatch, Text, build, plain
from rlflow.config.document import parse, write
from rlflow.config.faults import Fault, independent, refuse
from rlflow.config.ranks import ranks_on_node, written_out, written_short
from rlflow.config.roles import follow, is_followed, without_idle_sections
from rlflow.config.schema import Config, Rollout
from rlflow.errors import UserError

VARIABLE = re.compile(r"\$(\$\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    purpose: Purpose = "train",
) -> Config:
    """The checked configuration of a run; raises one UserError that lists all faults.

    `overrides` are `section.key=value`; rules that need the number of ranks are skipped where `world_size` is None.
    Nodes that it names are counted by `ranks_per_node`, by default what torchrun says.
    """
    return assemble(
        read(path), overrides, world_size=world_size, ranks_per_node=ranks_per_node, purpose=purpose, source=str(path)
    )


def assemble(
    tree: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    purpose: Purpose = "train",
    source: str = "configuration",
) -> Config:
    """As `load`, from the plain mapping of a file."""
    config, faults = interpret(tree, overrides, ranks_per_node or ranks_on_node())
    refuse(source, faults + independent(check(config, world_size, purpose), faults))
    return resolve(config)


def of_model(folder: str) -> dict[str, Any]:
    """The mapping of a configuration that has a model and nothing else, with lengths that fit its positions."""
    tree: dict[str, Any] = {"model": {"path": folder}}
    try:
        positions = load_architecture(folder).max_positions
    except UserError:  # the check will say it
        return tree
    if positions < Rollout.max_prompt_length + Rollout.max_response_length:
        tree["rollout"] = dict.fromkeys(("max_prompt_length", "max_response_length"), positions // 2)
    return tree


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, as it stands there; raises UserError."""
    if Path(path).is_dir():
        raise UserError(path, "is a folder; a YAML file in it is due")
    if not Path(path).is_file():
        raise UserError(path, "no such file")
    try:
        tree = parse(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(path, f"is not valid YAML: {error}") from error
    if not isinstance(tree, dict | None):
        raise UserError(path, "must hold sections such as `model:` and `trainer:`")
    return tree or {}


def interpret(
    tree: dict[str, Any], overrides: Sequence[str] = (), ranks_per_node: int | None = None
) -> tuple[Config, list[Fault]]:
    """The typed configuration and every unknown key and wrong type in it; a faulty key has its default."""
    faults: list[Fault] = []
    for override in overrides:
        tree = _override(tree, override, faults)
    given = written_out(_read_sections(_substitute(tree, "", faults), faults), ranks_per_node, faults)
    config = build(Config, follow(given), "", faults)
    return config, [fault for fault in faults if not is_followed(fault.key, given)]


def resolve(config: Config) -> Config:
    """`config` with the keys that default to another key filled in, so that what is saved is what runs."""
    model, rollout = config.model, config.rollout
    if model.tokenizer is None:
        model = replace(model, tokenizer=model.path)
    if rollout.dtype is None:
        rollout = replace(rollout, dtype=model.dtype)
    rewards = tuple(replace(reward, name=reward.label) for reward in config.rewards)
    return replace(config, model=model, rollout=rollout, rewards=rewards)


def dump(config: Config) -> str:
    """YAML text that loads as an equal configuration, whatever the environment; it leaves out roles that are absent."""
    return write(_escape(written_short(without_idle_sections(config, asdict(config)))))


def _read_sections(tree: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """`tree` with the sections that are given as text read; what is no YAML is left out."""
    read = {}
    for name, section in tree.items():
        try:
            read[name] = plain(section) if isinstance(section, Text) else section
        except Mismatch as mismatch:
            faults.append(Fault(name, section, mismatch.args[0]))
    return read


def _override(tree: dict[str, Any], override: str, faults: list[Fault]) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        faults.append(Fault(override, None, "must be written section.key=value"))
        return tree
    try:
        return _put(tree, path.split("."), Text(text))
    except LookupError as error:
        faults.append(Fault(path, text, str(error.args[0])))
        return tree


def _put(tree: Any, path: Sequence[str], value: Text) -> Any:
    """A copy of `tree` with `value` at `path`, missing mappings made on the way; a list grows at its end."""
    if not path:
        return value
    name, rest = path[0], path[1:]
    if isinstance(tree, list) or (tree is None and name.isdecimal()):
        items = list(tree or [])
        if not name.isdecimal() or int(name) > len(items):
            raise LookupError(f"{name} is no index of a list of {len(items)}")
        items[int(name) : int(name) + 1] = [_put((items[int(name) :] or [None])[0], rest, value)]
        return items
    if not isinstance(tree, dict | None):
        raise LookupError(f"{tree} has no key {name}")
    return {**(tree or {}), name: _put((tree or {}).get(name), rest, value)}


def _substitute(value: Any, path: str, faults: list[Fault]) -> Any:
    """`value` with ${NAME} and ${NAME:-default} replaced from the environment; $${ stands for ${ itself."""
    if isinstance(value, dict):
        return {name: _substitute(item, f"{path}.{name}".strip("."), faults) for name, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, f"{path}.{number}".strip("."), faults) for number, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def replacement(match: re.Match[str]) -> str:
        escaped, name, default = match.groups()
        if escaped:
            return escaped
        found = os.environ.get(name, "" if default is not None else None)
        if found is None:
            faults.append(Fault(path, value, f"the environment variable {name} is not set"))
        return found or default or ""

    text = VARIABLE.sub(replacement, value)
    substituted = isinstance(value, Text) or any(match[2] for match in VARIABLE.finditer(value))
    return Text(text) if substituted else text


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
