"""The layers of the package: a module imports only modules that stand above it, and few may import hivemind."""

from __future__ import annotations

import ast
from pathlib import Path

import opendiloco

LAYERS = """
errors machine section config settings options flat codec ledger rounds evaluation claims facts card leases
logs metrics scalars sinks trackers shared guard background leave ready addresses launcher identity outer phase moments
roundlog checkpoint progress hub files text tokenizer sequences mixture prefetch reader tokens
presets pretrained trained model generation separation loss compute lossscale optimizers inner precheck
evaluate harness export ranks replica averager contribution
membership tally agreement wire dialback uplink connect pace reducer allreduce lobby donor fetcher forks spare doubts
recovery heartbeat teller health sight presence rendezvous groups participation channel onlooker network peer swarm
bootstrap report schedule loop standing diloco callback display evaluator phaselog worker
folder trainer plan simulated simulate processes demo
monitor.__init__ monitor.sights monitor.troubles monitor.snapshot monitor.events monitor.history monitor.archive
monitor.watch monitor.terminal monitor.board monitor.door monitor.web monitor.command
needs doctor commands cli __main__ __init__
""".split()  # noqa: SIM905 - reads as the layers it lists
MAY_IMPORT_HIVEMIND = {"membership", "connect", "donor", "rendezvous", "groups", "onlooker", "dialback", "uplink"}
NEEDS_NO_TORCH = {
    "errors",
    "section",
    "config",
    "settings",
    "options",
    "ledger",
    "rounds",
    "evaluation",
    "claims",
    "leases",
    "logs",
    "metrics",
    "scalars",
    "sinks",
    "guard",
    "progress",
    "launcher",
    "identity",
    "cli",
    "commands",
}

FOLDER = Path(opendiloco.__file__).parent


def files() -> dict[str, Path]:
    """Of all modules, by their name within the package."""
    paths = {path.relative_to(FOLDER).with_suffix(""): path for path in FOLDER.rglob("*.py")}
    return {".".join(name.parts): path for name, path in paths.items()}


def imports(module: str) -> set[str]:
    """Everything a module imports, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(files()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(module: str) -> set[str]:
    inside = {name.removeprefix("opendiloco.") for name in imports(module) if name.startswith("opendiloco.")}
    return inside & set(files())


def test_every_module_has_its_place() -> None:
    assert sorted(LAYERS) == sorted(files())


def test_modules_import_only_what_stands_above_them() -> None:
    for place, module in enumerate(LAYERS):
        below = own_imports(module) - set(LAYERS[:place])
        assert not below, f"{module} imports {sorted(below)}, which stand below it"


def test_only_the_network_layer_imports_hivemind() -> None:
    importing = {module for module in LAYERS if any(name.split(".")[0] == "hivemind" for name in imports(module))}
    assert importing == MAY_IMPORT_HIVEMIND


def test_settings_and_decisions_need_no_torch() -> None:
    heavy = {"torch", "transformers", "hivemind", "datasets"}
    for module in NEEDS_NO_TORCH - {"cli", "commands"}:  # which imports the rest inside its commands
        assert not heavy & {name.split(".")[0] for name in imports(module)}, module


def test_files_stay_readable() -> None:
    long = {path.name: count for path in FOLDER.rglob("*.py") if (count := len(path.read_text().splitlines())) > 320}
    assert not long
