"""Data flows one way: flows may use tasks, tasks storage, storage schemas; never upward."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("schemas", "storage", "tasks", "flows")
HEAVY = {"torch", "bpy", "open3d", "decord", "cv2", "sklearn", "matplotlib", "h5py"}
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the layer; write the full name"
        return [node.module or ""]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests", "benchmarks"}
    for node in ast.walk(ast.parse(path.read_text())):
        for name in imported(node):
            assert name.split(".")[0] not in above, f"{path}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prefect_lives_in_flows(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if name.startswith("flows/"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert all(used.split(".")[0] != "prefect" for used in imported(node)), name


SHARED_ROOMS = {
    "engine": set(),
    "ingest": {"engine"},
    "learning": {"engine"},
    "scores": {"engine", "learning"},
    "evaluation": {"engine", "learning", "scores", "networks", "models"},
    "features": {"engine", "learning"},
    "networks": {"engine"},
    "models": {"engine", "learning", "scores", "features", "networks"},
    "predictors": {"engine", "learning", "features", "scores"},
    "report": {"engine", "evaluation"},
    "publish": {"engine", "report", "operations"},
}
"""What each room of tasks/ may import beside itself; none of them a benchmark."""
BENCHMARKS = {"condda", "kowl", "novelcraft", "semantic", "threedos"}


def rooms_used(path: Path) -> set[str]:
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for name in imported(node):
            parts = name.split(".")
            if parts[0] == "tasks" and len(parts) > 1:
                used.add(parts[1])
    return used


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(ROOT).parts[0] == "tasks"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_rooms_of_tasks_keep_their_directions(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    room = path.relative_to(ROOT).parts[1]
    others = rooms_used(path) - {room}
    if room in SHARED_ROOMS:
        wrong = others - SHARED_ROOMS[room]
    else:
        wrong = others & BENCHMARKS if room in BENCHMARKS else set()
    assert not wrong, f"{name} imports {sorted(wrong)}"


LIGHT = [p for p in FILES if p.relative_to(ROOT).parts[:2] != ("tasks", "features")]


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        assert not {used.split(".")[0] for used in imported(node)} & HEAVY, f"{path}:{node.lineno}"


def test_no_vague_module_names() -> None:
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in FILES if path.stem in vague or path.parent.name in vague]
