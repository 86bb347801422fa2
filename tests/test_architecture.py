"""Who may import what, how long files and functions may grow, how many keys the configuration may have."""

import ast
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for package in ("rlflow", "megatron_bridge") for path in (ROOT / package).rglob("*.py"))
PURE_BRIDGE = (
    "megatron_bridge/boxes.py",
    "megatron_bridge/plan.py",
    "megatron_bridge/meeting.py",
    "megatron_bridge/demand.py",
    "megatron_bridge/balance.py",
    "megatron_bridge/assignment.py",
    "megatron_bridge/placement.py",
    "megatron_bridge/describe.py",
    "megatron_bridge/fingerprint.py",
    "megatron_bridge/layout_options.py",
    "megatron_bridge/streams.py",
    "megatron_bridge/families",
    "megatron_bridge/layouts",
)

# package -> the places that may import it
MAY_IMPORT = {
    "megatron": (
        "rlflow/parallel", "rlflow/models", "rlflow/roles", "rlflow/checkpoint",
        "megatron_bridge/bind_megatron.py", "megatron_bridge/compat.py",
    ),
    "vllm": ("rlflow/rollout", "megatron_bridge/bind_vllm.py", "megatron_bridge/compat.py"),
    "transformer_engine": ("rlflow/models", "megatron_bridge/compat.py"),
    "ray": ("rlflow/rollout", "rlflow/rewards"),
    "wandb": ("rlflow/tracking",),
    "rlflow.trainers": ("rlflow/trainers", "rlflow/job.py"),
}  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth; relative imports as absolute ones."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(path: Path, places: tuple[str, ...]) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    return any(relative == place or relative.startswith(place + "/") for place in places)


def is_part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_heavy_packages_stay_where_they_belong(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in SOURCES
        if not within(path, MAY_IMPORT[package])
        for module in imports(path)
        if is_part_of(module, package)
    ]
    assert not wrong


def test_the_bridge_does_not_know_rlflow() -> None:
    bridge = [path for path in SOURCES if within(path, ("megatron_bridge",))]
    assert bridge
    assert not [path for path in bridge if any(is_part_of(module, "rlflow") for module in imports(path))]


def test_planning_needs_no_torch() -> None:
    pure = [path for path in SOURCES if within(path, PURE_BRIDGE)]
    assert pure
    assert not [path for path in pure if any(is_part_of(module, "torch") for module in imports(path))]


@pytest.mark.parametrize("package", ["algorithms", "batch"])
def test_the_maths_imports_torch_alone(package: str) -> None:
    import sys

    allowed = {"torch", *sys.stdlib_module_names}
    for path in (path for path in SOURCES if within(path, (f"rlflow/{package}",))):
        foreign = {
            module for module in imports(path)
            if module.split(".")[0] not in allowed
            and not any(is_part_of(module, ours) for ours in ("rlflow.algorithms", "rlflow.batch"))
        }  # fmt: skip
        assert not foreign - {"rlflow"}, f"{path} imports {foreign}"


def test_versions_are_asked_in_one_place() -> None:
    asking = ("version.parse", "packaging.version", "importlib.metadata", ".__version__")
    wrong = [
        path for path in SOURCES
        if not within(path, ("megatron_bridge/compat.py",)) and any(word in path.read_text() for word in asking)
    ]  # fmt: skip
    assert not [path.relative_to(ROOT).as_posix() for path in wrong]


def test_files_stay_short() -> None:
    long = {path: lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > 400}
    assert not long


def test_the_training_loop_fits_on_a_page() -> None:
    tree = ast.parse((ROOT / "rlflow" / "trainers" / "online.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    loop = next(node for node in functions if node.name == "train")
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 50


def test_there_are_few_configuration_keys() -> None:
    """Each is counted where it is declared; what roles share is declared once."""
    from rlflow.config import schema

    sections = [value for value in vars(schema).values() if is_dataclass(value)]
    assert 20 < sum(len(vars(section)["__annotations__"]) for section in sections) <= 150
