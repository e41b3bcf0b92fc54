"""Who may import whom. The rule is docs/structures.md's table; this walk holds it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "actors",
    "buffer",
    "configs",
    "launcher",
    "learner",
    "metrics",
    "tasks",
    "toolcall",
    "weightsync",
)
EVERYONE = {"configs", "metrics"}
ALLOWED = {
    "actors": {
        "buffer.client",
        "buffer.messages",
        "tasks",
        "toolcall",
        "weightsync.receiver",
        "weightsync.vllm_engine",
        "weightsync.worker",
    },
    "buffer": set(),
    "configs": set(),
    "launcher": {
        "actors.evaluation_tables",
        "actors.preview",
        "buffer.client",
        "buffer.messages",
        "buffer.reader",
        "tasks",
        "toolcall",
    },
    "learner": {"buffer.client", "buffer.messages", "weightsync.adapters", "weightsync.publisher"},
    "metrics": set(),
    "tasks": {"toolcall"},
    "toolcall": set(),
    "weightsync": set(),
}
# Role mains that the launcher's Ray process starts by name, in the role's own process.
ROLE_MAINS = {"launcher/ray_roles.py": {"actors.actor", "buffer.server", "learner.learner"}}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package):
    allowed = ALLOWED[package] | EVERYONE | {package}
    for path in (ROOT / package).rglob("*.py"):
        here = allowed | ROLE_MAINS.get(str(path.relative_to(ROOT)), set())
        for name in imports_of(path):
            parents = {".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)}
            assert parents & here, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", ["configs.load", "tasks.loading", "toolcall", "buffer.client", "launch"])
def test_light_modules_import_without_torch_and_vllm(module):
    code = f"import sys, {module}; print({{'torch', 'vllm', 'transformers', 'ray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
