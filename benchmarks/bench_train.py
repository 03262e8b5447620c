"""How fast do systems train over slow links: DiLoCo here, elsewhere, and those that average at every step?

Every worker is a process on a host of its own in a network namespace, its link shaped by the kernel. All train the same
model of bytes, from the same parameters, on the same batches, with the same AdamW; a round is --steps steps of each
worker. The systems run one after the other. Held-out text is evaluated at the first worker between two rounds, while
the clock stands. All hosts share this machine's cores: a step is filled up to --step-s seconds, so that each worker
computes as if it had a machine of its own, as long as the computing itself takes less (`compute_s`).

torchft takes part where it is installed: .venv/bin/pip install -e '.[torchft]'
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.bench_wan import BARS
from benchmarks.common import CALL_LIMIT_S, BenchmarkError, about, parse_options, run_script, write_lines
from benchmarks.cost import payload_s
from benchmarks.netns import Hosts, why_not
from benchmarks.steps import Plan, System
from benchmarks.team import Team, summary
from opendiloco.config import DataConfig
from opendiloco.shared import create_shared_memory
from opendiloco.text import MemoryText, read_source

SYSTEMS = {
    "opendiloco-int8": System("opendiloco", "int8", averages="phases"),
    "opendiloco-fp16": System("opendiloco", "fp16", averages="phases"),
    "hivemind-diloco": System("hivemind DiLoCo", "fp16", averages="phases"),
    "torchft-diloco": System("torchft DiLoCo", "fp32", averages="phases"),
    "hivemind-optimizer": System("hivemind.Optimizer", "fp16", averages="gradients"),
    "gloo-ddp": System("gloo DDP", "fp32", averages="gradients"),
}
NEEDS_EXTRA = {"torchft-diloco"}
PLANNED = ("workers", "rounds", "steps", "batch", "seq_len", "held_out", "hidden", "layers", "lr", "step_s")
"""Options that are fields of a plan."""
TEXT_BYTES = 8_000_000
"""Of the standard library, enough that no sequence comes twice."""


def load_text() -> int:
    """Descriptor of the bytes that are trained on: source text of Python's standard library, in an order of its own."""
    source = read_source(DataConfig())
    assert isinstance(source, MemoryText)
    memory = create_shared_memory()
    os.write(memory, "".join(source.documents).encode()[:TEXT_BYTES])
    return memory


def measure(options: argparse.Namespace, plan: Plan, system: System, mbit: float) -> dict[str, Any]:
    """All rounds of one system over links of `mbit`, or those until the limit, or until it fails."""
    parameters, spent_s, failed = 0, 0.0, ""
    with Hosts(plan.workers, mbit=mbit) as network, contextlib.closing(Team(system, plan, network.hosts)) as team:
        try:
            parameters = team.start()
            while spent_s < options.limit_s and team.batches < plan.batches:
                team.train(options.limit_s - spent_s + CALL_LIMIT_S)
                spent_s += team.rounds[-1].seconds
                at = f"{system.label}, {mbit:g} Mbit/s, round {len(team.rounds)} after {spent_s:.0f} s"
                print(f"{at}: loss {team.losses[-1]:.3f}", file=sys.stderr, flush=True)
        except BenchmarkError as error:
            failed = str(error)
    exchanges = plan.steps if system.averages == "gradients" else 1
    return {
        "system": system.name,
        "codec": system.codec,
        "mbit": mbit,
        "parameters": parameters,
        "failed": failed,
        "wire_limit_s": exchanges * payload_s(parameters, plan.workers, system.codec, mbit),
        **summary(plan, team.rounds, team.losses, target=options.loss),
    }


def chosen(names: Sequence[str]) -> list[System]:
    """The systems of these names that can run here; a line for each other one."""
    found = []
    for name in names:
        try:
            if name in NEEDS_EXTRA:
                importlib.import_module("torchft")
        except ImportError as error:
            print(f"{name}: left out ({error}): .venv/bin/pip install -e '.[torchft]'", file=sys.stderr)
        else:
            found.append(SYSTEMS[name])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out; the exit code is 0 if the bars hold and replicas are equal."""
    options = parse(argv)
    if reason := why_not():
        print(f"bench train: skipped: {reason}", file=sys.stderr)
        return 0
    memory = load_text()
    shared = {name: getattr(options, name) for name in PLANNED}
    plan = Plan(**shared, memory=memory)
    asked = {**shared, "rounds_asked": plan.rounds, "target_loss": options.loss, "limit_s": options.limit_s}
    facts, systems, results = about_all(), chosen(options.systems), []
    try:
        for mbit in options.mbit:
            for system in systems:
                results.append({"benchmark": "train", **asked, **measure(options, plan, system, mbit), **facts})
                show(results[-1])
    finally:
        os.close(memory)
    write_lines(options.out, results)
    return 0 if all(holds(result, with_bars=not options.quick) for result in results) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="launch.sh bench train", description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(default all of them)")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 20.0], metavar="R", help="(default 100 20)")
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="(default 4)")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="(default 50)")
    parser.add_argument("--steps", type=int, default=20, metavar="H", help="steps of a round (default 20)")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="sequences of a step (default 4)")
    parser.add_argument("--seq-len", type=int, default=64, metavar="T", help="bytes of a sequence (default 64)")
    parser.add_argument("--held-out", type=int, default=256, metavar="N", help="sequences evaluated (default 256)")
    parser.add_argument("--hidden", type=int, default=192, metavar="D", help="size of the model (default 192)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the model (default 4)")
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help="of AdamW (default 1e-3)")
    parser.add_argument("--step-s", type=float, default=0.2, metavar="S", help="at least, of a step (default 0.2)")
    parser.add_argument("--loss", type=float, default=2.5, metavar="X", help="the time to this one (default 2.5)")
    parser.add_argument(
        "--limit-s", type=float, default=480.0, metavar="S", help="of a system; no round begins later (default 480)"
    )
    small = {"workers": 2, "rounds": 2, "steps": 2, "batch": 1, "seq_len": 16, "held_out": 8, "hidden": 32, "layers": 1}
    quick = {**small, "step_s": 0.0, "mbit": [100.0], "systems": ["opendiloco-int8", "hivemind-diloco", "gloo-ddp"]}
    return parse_options(parser, "train", argv, quick=quick)


def holds(result: dict[str, Any], *, with_bars: bool) -> bool:
    """Whether a result is as it should be; only opendiloco's are asked."""
    if result["system"] != "opendiloco":
        return True
    bar = BARS.get(result["mbit"]) if with_bars and result["codec"] == "int8" else None
    whole = not result["failed"] and not result["problems"] and result["identical_rounds"] == result["rounds_asked"]
    return whole and (bar is None or bool(result["round_s"] <= bar))


def about_all() -> dict[str, object]:
    """What results depend on, with the version of torchft."""
    facts = about()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions = facts["versions"]
        assert isinstance(versions, dict)
        versions["torchft"] = importlib.metadata.version("torchft")
    return facts


def show(result: dict[str, Any]) -> None:
    """Print a result of `measure`."""
    print(f"{result['system']} {result['codec']} at {result['mbit']:g} Mbit/s: {result['rounds']} rounds")
    if result["rounds"]:
        reached_s = result["loss_reached_s"]
        reached = "not reached" if reached_s is None else f"after {reached_s:.1f} s"
        print(
            f"  {result['tokens_per_s']:,.0f} tokens/s, {result['utilization']:.0%} of the time in steps, "
            f"{result['bytes_per_token']:,.0f} bytes a token\n"
            f"  a step computes for {result['compute_s']:.2f} s and is filled up to {result['step_s']:g} s\n"
            f"  a round takes {result['round_s']:.2f} s beside its steps (median; worst {result['worst_s']:.2f}; "
            f"payload alone {result['wire_limit_s']:.2f})\n"
            f"  loss {result['loss']:.3f} at the end, {result['target_loss']:g} {reached}; "
            f"replicas identical in {result['identical_rounds']} rounds"
        )
    for problem in (*result.get("problems", ()), *filter(None, [result["failed"]])):
        print(f"  {problem}")
    sys.stdout.flush()


if __name__ == "__main__":
    run_script("bench_train", main)
