"""Settings of a command: defaults < TOML files < --set < options of their own, every error one line."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from opendiloco.config import Contract, PeerConfig, contract_difference
from opendiloco.config import contract_from_wire as contract_from_wire
from opendiloco.config import contract_to_wire as contract_to_wire
from opendiloco.errors import SettingsError
from opendiloco.section import Section
from opendiloco.section import allowed as allowed
from opendiloco.section import shown as shown

Config = TypeVar("Config", Contract, PeerConfig)


@dataclass(frozen=True)
class Settings:
    """All settings of one peer, and which of the run contract's its user asked for."""

    contract: Contract
    peer: PeerConfig
    explicit: frozenset[str] = frozenset()
    """Contract settings (section.key) given in RUN.toml or on the command line."""
    has_run_file: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    """Those of them given on the command line -> what was written there, such as --set inner.steps."""

    def adopt(self, theirs: Contract) -> Settings:
        """These settings with the swarm's contract; SettingsError when the user asked for something else.

        With a RUN.toml the whole contracts must agree, without one only the settings given explicitly.
        """
        differences = [
            difference
            for difference in contract_difference(self.contract, theirs)
            if self.has_run_file or difference[0] in self.explicit
        ]
        if differences:
            raise SettingsError(self._conflict(differences, theirs.run.id))
        check_together(theirs, self.peer)
        return replace(self, contract=theirs)

    def _conflict(self, differences: Sequence[tuple[str, object, object]], run_id: str) -> str:
        setting, mine, other = differences[0]
        more = f" ({len(differences) - 1} more differ)" if len(differences) > 1 else ""
        given = [self.options[name] for name, _, _ in differences[:3] if name in self.options]
        leave_out = " and ".join(["--run"] * self.has_run_file + given) or setting
        return (
            f"{setting} is {shown(mine)} here and {shown(other)} in run {run_id}{more}: "
            f"join with the run's own contract (leave out {leave_out})"
        )


@dataclass(frozen=True)
class Flag:
    """A setting with an option of its own, such as --peers: it wins over --set."""

    option: str
    setting: str
    value: object


@dataclass(frozen=True)
class _Given:
    value: object
    source: str  # file or option, for error lines


def load_settings(
    run_toml: Path | None = None,
    peer_toml: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    flags: Sequence[Flag] = (),
) -> Settings:
    """Read RUN.toml, PEER.toml, `section.key=value` overrides and flags; the later wins."""
    given: dict[str, _Given] = {}
    if run_toml is not None:
        given |= _read_toml(run_toml, own=Contract, other=PeerConfig)
    if peer_toml is not None:
        given |= _read_toml(peer_toml, own=PeerConfig, other=Contract)
    given |= dict(map(_parse_override, overrides))
    given |= {flag.setting: _Given(flag.value, flag.option) for flag in flags}

    contract, peer = _build(Contract, given), _build(PeerConfig, given)
    if run_toml is not None or not peer.swarm.peers:  # others get the contract from the swarm: adopt checks it
        check_together(contract, peer)
    explicit = {name: item.source for name, item in given.items() if name.split(".")[0] in Contract.model_fields}
    written = {"--set": "--set {}"} | {flag.option: flag.option for flag in flags}
    options = {name: written[source].format(name) for name, source in explicit.items() if source in written}
    return Settings(contract, peer, frozenset(explicit), has_run_file=run_toml is not None, options=options)


def settings_to_resume(
    asked: Settings,
    folder: Path,
    run_toml: Path | None,
    peer_toml: Path | None,
    overrides: Sequence[str],
    *,
    flags: Sequence[Flag],
) -> Settings:
    """The settings of a worker that goes on in its folder: those kept there, where `asked` for no file and no other.

    Whom it joins is what it was asked for, now: with peers it takes the run contract from the swarm.
    """
    kept_run, kept_peer = folder / "run.toml", folder / "peer.toml"
    if run_toml is None and not asked.peer.swarm.peers and kept_run.is_file():
        run_toml = kept_run
    if peer_toml is None and kept_peer.is_file():
        peer_toml = kept_peer
        flags = [*flags, Flag("--peers", "swarm.peers", list(asked.peer.swarm.peers))]
    return load_settings(run_toml, peer_toml, overrides, flags=flags)


def check_together(contract: Contract, peer: PeerConfig) -> None:
    """Checks across the run contract and a peer's own settings; raises SettingsError."""
    micro, batch = peer.compute.micro_batch_size, contract.inner.batch_size
    if micro > batch:
        raise SettingsError(
            f"compute.micro_batch_size is {micro} and inner.batch_size is {batch}: "
            f"set compute.micro_batch_size to at most {batch}, or to 0 for the whole batch"
        )


def write_toml(path: Path, config: Contract | PeerConfig) -> None:
    """Write every setting so that load_settings reads the same again; the file is complete or absent."""
    text = f"# Resolved settings.\n{tomli_w.dumps(config.model_dump(mode='json'))}"
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise SettingsError(f"cannot write {path}: {error.strerror}: choose another --out") from None


def settings_help() -> str:
    """All settings with default, description and allowed values, as plain text."""
    lines = ["Order: defaults < TOML file < --set section.key=value (a TOML value or plain text)."]
    for title, config in (
        ("Run contract, equal on all peers of a run: --run RUN.toml", Contract),
        ("A peer's own settings: --peer PEER.toml", PeerConfig),
    ):
        lines += ["", title]
        for section, model in _sections(config).items():
            lines += ["", f"[{section}]"]
            for key, info in model.model_fields.items():
                description = " ".join((info.description or "").split())
                lines.append(f"  {section}.{key} = {shown(info.default)}")
                lines.append(f"      {description}")
                lines.append(f"      Allowed: {allowed(info)}")
    return "\n".join(lines)


# --- sources -------------------------------------------------------------------------------------------


def _read_toml(path: Path, *, own: type[Section], other: type[Section]) -> dict[str, _Given]:
    option, other_option = ("--run", "--peer") if own is Contract else ("--peer", "--run")
    document = _parse_file(path, option)
    given: dict[str, _Given] = {}
    for section, values in document.items():
        if section in other.model_fields:
            owner = "a peer's own settings" if other is PeerConfig else "the run contract"
            raise SettingsError(
                f"section {section} in {path} belongs to {owner}: "
                f"move it to the file given with {other_option}, or use --set {section}.KEY=VALUE"
            )
        if section not in own.model_fields:
            raise SettingsError(_unknown_section(section, str(path), own))
        if not isinstance(values, dict):
            raise SettingsError(
                f"{section} is {shown(values)} in {path}: write a line [{section}] and below it KEY = VALUE"
            )
        for key, value in values.items():
            _field(f"{section}.{key}", str(path))
            given[f"{section}.{key}"] = _Given(value, str(path))
    return given


def _parse_file(path: Path, option: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist: give an existing file with {option}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text: save it as UTF-8 or correct {option}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}: correct {option}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason, _, place = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", place)
        line = found[1] if found else text.rstrip().count("\n") + 1
        raise SettingsError(f"{path}, line {line}: {reason}: correct the TOML there") from None


def _parse_override(text: str) -> tuple[str, _Given]:
    """`section.key=value`; the value is TOML, or plain text when it is no TOML or the setting is a text."""
    setting, equals, raw = text.partition("=")
    setting = setting.strip()
    if not equals or setting.count(".") != 1:
        raise SettingsError(f"--set {text}: write section.key=value, for example --set inner.steps=100")
    info = _field(setting, "--set")
    try:
        document = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        document = {}
    value = document["value"] if document.keys() == {"value"} else raw
    if info.annotation is str and not isinstance(value, str):
        value = raw
    return setting, _Given(value, "--set")


# --- checks --------------------------------------------------------------------------------------------


def _sections(config: type[Section]) -> dict[str, type[Section]]:
    return {name: cast(type[Section], info.annotation) for name, info in config.model_fields.items()}


def _all_fields() -> dict[str, FieldInfo]:
    return {
        f"{section}.{key}": info
        for config in (Contract, PeerConfig)
        for section, model in _sections(config).items()
        for key, info in model.model_fields.items()
    }


def _field(setting: str, source: str) -> FieldInfo:
    info = _all_fields().get(setting)
    if info is None:
        raise SettingsError(_unknown(setting, source))
    return info


def _unknown(setting: str, source: str) -> str:
    known = list(_all_fields())
    key = setting.rpartition(".")[2]
    near = [name for name in known if name.endswith(f".{key}")] or difflib.get_close_matches(setting, known)
    cure = f"did you mean {near[0]}?" if near else "`opendiloco settings` lists all of them"
    return f"unknown setting {setting} in {source}: {cure}"


def _unknown_section(section: str, source: str, own: type[Section]) -> str:
    cure = f"the sections are {', '.join(own.model_fields)}"
    if near := difflib.get_close_matches(section, own.model_fields):
        cure = f"did you mean {near[0]}?"
    elif inside := [name for name in _all_fields() if name.endswith(f".{section}")]:
        cure = f"write {section} below a line [{inside[0].partition('.')[0]}]"
    return f"unknown section {section} in {source}: {cure}"


def _build(config: type[Config], given: Mapping[str, _Given]) -> Config:
    values: dict[str, dict[str, object]] = {}
    for setting, item in given.items():
        section, _, key = setting.partition(".")
        if section in config.model_fields:
            values.setdefault(section, {})[key] = item.value
    try:
        # Strict JSON: arrays may become tuples and 1 a float, but "100" or true is no number.
        return config.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    setting = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "json_invalid":
        raise SettingsError("a setting is no UTF-8 text: correct the value of --set or of the option")
    if setting not in given:  # a check of a whole section
        raise SettingsError(first["msg"].removeprefix("Value error, "))
    value, source = shown(given[setting].value), given[setting].source
    raise SettingsError(f"{setting} is {value} in {source}: must be {allowed(_all_fields()[setting])}")
