"""The options of the commands, each with its help text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from opendiloco.errors import SettingsError

Run = Annotated[Path | None, typer.Option("--run", metavar="RUN.toml", help="Run contract. Default: every default.")]
Peer = Annotated[Path | None, typer.Option("--peer", metavar="PEER.toml", help="Own settings. Default: every default.")]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS...",
        help="Full addresses (/ip4/.../p2p/...) of peers of the swarm to join, one or several after the "
        "option. Default: none, start a new swarm.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one setting; may be given many times. VALUE is TOML or plain text, for example "
        "--set inner.steps=100. `opendiloco settings` lists them.",
    ),
]
AddressFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the peer's full addresses there, one a line, once it can be joined. Default: no file.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an unexpected error.")]
HostMaddrs = Annotated[
    list[str] | None,
    typer.Option(
        "--host-maddr",
        metavar="ADDRESS",
        help="Address to listen on, may be given many times; /ip4/0.0.0.0/tcp/PORT is reachable from "
        "other machines. Default: /ip4/127.0.0.1/tcp/0, this machine only, a free port.",
    ),
]
AnnounceMaddrs = Annotated[
    list[str] | None,
    typer.Option(
        "--announce-maddr",
        metavar="ADDRESS",
        help="Address told to others when it differs from the one listened on; may be given many times. "
        "Default: the same.",
    ),
]
Identity = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Key file, made when missing. Default: OUT/identity.key, or a new key."),
]
RunId = Annotated[
    str | None,
    typer.Option(
        "--run-id",
        metavar="NAME",
        help="Name of the run, setting run.id. Default: the only one of the swarm; demo for one that is started here.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="latest|PATH",
        help="Start from a checkpoint: the newest one in OUT, or the one at PATH. Default: do not.",
    ),
]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model folder.")]
ExportOut = Annotated[
    Path, typer.Argument(metavar="OUT_DIR", help="A worker's folder: run.toml, metrics.jsonl, checkpoints/, model/.")
]
HfDir = Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder to write; one that holds a model is replaced.")]
ExportCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="round-NNNNNN|PATH|latest",
        help="Export this checkpoint. Default: the model that training ended with, else the newest whole checkpoint.",
    ),
]
Dtype = Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Number format of the weights.")]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="TASK,TASK...",
        help="Run these tasks of the lm-eval harness instead of the validation text. Default: none.",
    ),
]
TaskDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with task files (YAML) of your own for --tasks. Default: none."),
]
WorkerOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The worker's folder. Default: runs/RUN_ID."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON and end.")]
Web = Annotated[
    str | None,
    typer.Option(
        "--web",
        metavar="[HOST:]PORT",
        help="Serve a page instead. Without HOST only this machine can look at it. Default: none.",
    ),
]
HistoryOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder that keeps what was seen for the next start. Default: none."),
]
SimulationOut = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for metrics, log and model.")]
EvalRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN.toml",
        help="Run contract whose data settings name the validation text. "
        "Default: run.toml beside MODEL_DIR when it exists, else every default.",
    ),
]


def spread_peers(arguments: Sequence[str]) -> list[str]:
    """`--peers A B C` as `--peers A --peers B --peers C`, which is what the parser understands."""
    spread: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if option != "--peers":
            spread.append(argument)
            continue
        addresses = [value] if equals else []
        while rest and not rest[0].startswith("-"):
            addresses.append(rest.pop(0))
        if not addresses:
            raise SettingsError(
                "--peers has no address: give those of a peer (its --address-file is there once it can be joined), or "
                "leave --peers out to start a new swarm"
            )
        spread += [item for address in addresses for item in ("--peers", address)]
    return spread
