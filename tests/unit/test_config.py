"""Settings: order, errors of one line with a cure, digest and the contract's way through the swarm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.config import (
    MAX_WIRE_BYTES,
    Contract,
    InnerConfig,
    OuterConfig,
    PeerConfig,
    RoundsConfig,
    RunConfig,
    SwarmConfig,
    contract_difference,
    contract_from_wire,
    contract_to_wire,
)
from opendiloco.errors import SettingsError
from opendiloco.settings import Flag, load_settings, settings_help, shown, write_toml

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"


def error_line(
    folder: Path, *overrides: str, run: str | None = None, peer: str | None = None, flags: tuple[Flag, ...] = ()
) -> str:
    """The error that these settings give, with the files' folder left out."""
    run_toml, peer_toml = (_write(folder / "run.toml", run), _write(folder / "peer.toml", peer))
    with pytest.raises(SettingsError) as caught:
        load_settings(run_toml, peer_toml, overrides, flags=flags)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == 64
    return line.replace(f"{folder}/", "")


def _write(path: Path, text: str | None) -> Path | None:
    if text is None:
        return None
    path.write_text(text)
    return path


def sections() -> Iterator[tuple[str, object]]:
    for config in (Contract, PeerConfig):
        yield from config.model_fields.items()


def test_later_sources_win_over_earlier_ones(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[inner]\nsteps = 10\nbatch_size = 4\nlr = 1\n")
    settings = load_settings(
        run, None, ["inner.steps=20", "inner.steps=30", "run.seed=1"], flags=[Flag("-", "run.seed", 2)]
    )
    inner = settings.contract.inner
    assert (inner.steps, inner.batch_size, inner.warmup_steps) == (30, 4, InnerConfig().warmup_steps)
    assert inner.lr == 1.0
    assert isinstance(inner.lr, float)
    assert settings.contract.run.seed == 2


def test_set_reaches_contract_and_peer_with_toml_values_or_plain_text() -> None:
    settings = load_settings(
        None,
        None,
        [
            "model.name=14m",
            'data.source="text:a b"',
            f'swarm.peers=["{ADDRESS}", "{ADDRESS}"]',
            "rounds.grace=30",
            "inner.betas=[0.8, 0.9]",
            "compute.compile=true",
            "run.id=42",
        ],
    )
    contract, peer = settings.contract, settings.peer
    assert (contract.model.name, contract.data.source, contract.run.id) == ("14m", "text:a b", "42")
    assert peer.swarm.peers == (ADDRESS, ADDRESS)
    assert contract.rounds.grace == 30.0
    assert contract.inner.betas == (0.8, 0.9)
    assert peer.compute.compile is True
    assert load_settings(None, None, ["rounds.grace=adaptive"]).contract.rounds.grace == "adaptive"


def test_explicit_contract_settings_are_known_and_defaults_and_peer_settings_are_not_among_them(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[outer]\nlr = 0.7\n")
    with_file = load_settings(run, None, ["inner.steps=50", "log.every_steps=1"])
    assert with_file.explicit == {"outer.lr", "inner.steps"}
    assert with_file.has_run_file
    without = load_settings()
    assert without.explicit == frozenset()
    assert not without.has_run_file


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("inner.step=3", "unknown setting inner.step in --set: did you mean inner.steps?"),
        ("iner.steps=3", "unknown setting iner.steps in --set: did you mean inner.steps?"),
        ("outer.steps=3", "unknown setting outer.steps in --set: did you mean inner.steps?"),
        ("a.b=3", "unknown setting a.b in --set: `opendiloco settings` lists all of them"),
        ("inner.steps", "--set inner.steps: write section.key=value, for example --set inner.steps=100"),
        ("inner={steps=3}", "--set inner={steps=3}: write section.key=value, for example --set inner.steps=100"),
        (
            "inner.steps=0",
            "inner.steps is 0 in --set: must be a whole number of inner steps, at least 1, at most 1000000000",
        ),
        (
            "inner.steps=true",
            "inner.steps is true in --set: must be a whole number of inner steps, at least 1, at most 1000000000",
        ),
        (
            'inner.steps="3"',
            'inner.steps is "3" in --set: must be a whole number of inner steps, at least 1, at most 1000000000',
        ),
        (
            "inner.steps=1.5",
            "inner.steps is 1.5 in --set: must be a whole number of inner steps, at least 1, at most 1000000000",
        ),
        ("inner.lr=nan", "inner.lr is NaN in --set: must be a number, above 0, at most 1000"),
        ("inner.lr=inf", "inner.lr is Infinity in --set: must be a number, above 0, at most 1000"),
        ("inner.lr=1e38", "inner.lr is 1e+38 in --set: must be a number, above 0, at most 1000"),
        ("inner.muon_lr=1e38", "inner.muon_lr is 1e+38 in --set: must be a number, at least 0, at most 1000"),
        ("inner.weight_decay=1e38", "inner.weight_decay is 1e+38 in --set: must be a number, at least 0, at most 1000"),
        ("outer.lr=1e38", "outer.lr is 1e+38 in --set: must be a number, above 0, at most 1000"),
        ("outer.codec=int4", 'outer.codec is "int4" in --set: must be one of none, fp16, int8'),
        ("outer.momentum=1", "outer.momentum is 1 in --set: must be a number, at least 0, below 1"),
        (
            "rounds.deadline=0",
            "rounds.deadline is 0 in --set: must be a number of seconds, above 0, at most 1000000000, or adaptive",
        ),
        ("inner.betas=[1]", "inner.betas is [1] in --set: must be a list of 2, each a number, at least 0, below 1"),
        (
            "compute.threads=99999999999",
            "compute.threads is 99999999999 in --set: must be a whole number of threads, at least 0, at most 4096",
        ),
        ('swarm.identity="a\\u0000b"', 'swarm.identity is "a\\u0000b" in --set: must be a text'),
        (
            'data.source=["stdlib", "a\\u0000b"]',
            'data.source is ["stdlib", "a\\u0000b"] in --set: must be a text, or a list ["A", "B", ...] of 1 to 16, '
            "each a text",
        ),
        (
            f"run.rounds={10**20}",
            f"run.rounds is {10**20} in --set: must be a whole number of outer rounds, at least 1, at most 1000000000",
        ),
        (
            "swarm.host_maddrs=[]",
            'swarm.host_maddrs is [] in --set: must be a list ["A", "B", ...] of at least 1, each an address such as '
            "/ip4/0.0.0.0/tcp/31337",
        ),
        ("compute.device=gpu", 'compute.device is "gpu" in --set: must be auto, cpu, cuda or cuda:N'),
        (
            "swarm.peers=[a]",
            'swarm.peers is "[a]" in --set: must be a list ["A", "B", ...] of at most 1000, each a full '
            "address such as /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...",
        ),
        *(
            (
                f"swarm.peers={json.dumps(peers)}",
                f"swarm.peers is {shown(peers)} in --set: must be a list "
                '["A", "B", ...] of at most 1000, each a full address such as '
                "/ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...",
            )
            for peers in (
                [""],
                ["foo"],
                ["/ip4/203.0.113.5/tcp/1"],
                [f"{ADDRESS}\0"],
                [f"{ADDRESS} {ADDRESS}"],
                [ADDRESS] * 1001,
            )
        ),
        ("data.source=\udcff", "a setting is no UTF-8 text: correct the value of --set or of the option"),
        (
            "swarm.heartbeat_s=10",
            "swarm.expiry_s is 12.0 and swarm.heartbeat_s is 10.0: "
            "set swarm.expiry_s to at least 20.0, twice the heartbeat",
        ),
        ("inner.optimizer=adam", 'inner.optimizer is "adam" in --set: must be one of adamw, adamw8bit, muon'),
        ("compute.precision=fp8", 'compute.precision is "fp8" in --set: must be one of fp32, bf16, fp16'),
        (
            "compute.micro_batch_size=16",
            "compute.micro_batch_size is 16 and inner.batch_size is 8: "
            "set compute.micro_batch_size to at most 8, or to 0 for the whole batch",
        ),
    ],
)
def test_wrong_override_gives_one_line_with_setting_value_and_cure(tmp_path: Path, override: str, line: str) -> None:
    assert error_line(tmp_path, override) == line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("inner.optimizer=muon", "inner.joiner_moments=donor"),
            "inner.joiner_moments is donor and inner.optimizer is muon: only adamw's moments travel; set "
            "inner.joiner_moments to zero",
        ),
        (
            ("model.lora_rank=4", 'model.frozen=["a.*"]'),
            "model.lora_rank is 4 and model.frozen is ['a.*']: with adapters the whole model is frozen; leave "
            "model.frozen out",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_one_line(tmp_path: Path, overrides: tuple[str, ...], line: str) -> None:
    assert error_line(tmp_path, *overrides) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[inner]\nstep = 3", "unknown setting inner.step in run.toml: did you mean inner.steps?"),
        ("[iner]\nsteps = 3", "unknown section iner in run.toml: did you mean inner?"),
        ("steps = 3", "unknown section steps in run.toml: write steps below a line [inner]"),
        (
            "[x]\ny = 3",
            "unknown section x in run.toml: the sections are run, model, data, inner, outer, rounds, evaluation",
        ),
        ("inner = 3", "inner is 3 in run.toml: write a line [inner] and below it KEY = VALUE"),
        (
            "[inner]\nsteps = 0",
            "inner.steps is 0 in run.toml: must be a whole number of inner steps, at least 1, at most 1000000000",
        ),
        ("[inner]\nsteps = \n", "run.toml, line 2: Invalid value: correct the TOML there"),
        ("\n[inner", "run.toml, line 2: Expected ']' at the end of a table declaration: correct the TOML there"),
        (
            "[swarm]\nheartbeat_s = 1",
            "section swarm in run.toml belongs to a peer's own settings: "
            "move it to the file given with --peer, or use --set swarm.KEY=VALUE",
        ),
    ],
)
def test_wrong_file_gives_one_line_with_file_and_cure(tmp_path: Path, text: str, line: str) -> None:
    assert error_line(tmp_path, run=text) == line


def test_contract_section_in_a_peer_file_is_sent_to_the_run_file(tmp_path: Path) -> None:
    assert error_line(tmp_path, peer="[inner]\nsteps = 3") == (
        "section inner in peer.toml belongs to the run contract: "
        "move it to the file given with --run, or use --set inner.KEY=VALUE"
    )


def test_unreadable_files_give_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, words in (("none", "does not exist"), ("", "Is a directory"), ("latin", "not UTF-8")):
        with pytest.raises(SettingsError, match=words):
            load_settings(tmp_path / name, None)


def test_a_value_from_an_option_is_blamed_on_that_option(tmp_path: Path) -> None:
    line = error_line(tmp_path, flags=(Flag("--run-id", "run.id", "a b"),))
    assert line.startswith('run.id is "a b" in --run-id: must be 1 to 64 letters')


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: SwarmConfig(peers=("127.0.0.1:31337",)),
            'swarm.peers is "127.0.0.1:31337": must be a list ["A", "B", ...] of at most 1000, each a full '
            "address such as /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...",
        ),
        (lambda: SwarmConfig(peer=(ADDRESS,)), "unknown setting swarm.peer: did you mean swarm.peers?"),
        (
            lambda: Contract(inner={"steps": 0}),
            "inner.steps is 0: must be a whole number of inner steps, at least 1, at most 1000000000",
        ),
        (
            lambda: PeerConfig(swarm={"expiry_s": 3.0}),
            "swarm.expiry_s is 3.0 and swarm.heartbeat_s is 2.0: set swarm.expiry_s to at least 4.0, twice the "
            "heartbeat",
        ),
    ],
)
def test_settings_that_a_script_makes_wrongly_are_one_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert str(caught.value) == line
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)  # nothing of pydantic's is shown


def test_too_many_sources_are_told_how_many_there_may_be(tmp_path: Path) -> None:
    sources = [f"text:{number}" for number in range(17)]
    load_settings(overrides=[f"data.source={json.dumps(sources[:16])}"])
    line = error_line(tmp_path, f"data.source={json.dumps(sources)}")
    assert line.endswith('must be a text, or a list ["A", "B", ...] of 1 to 16, each a text')


def test_written_files_load_to_the_same_settings(tmp_path: Path) -> None:
    first = load_settings(None, None, ["inner.lr=1e-5", f'swarm.peers=["{ADDRESS}"]', "rounds.grace=2", "model.name=é"])
    run, peer = tmp_path / "run.toml", tmp_path / "peer.toml"
    write_toml(run, first.contract)
    write_toml(peer, first.peer)
    second = load_settings(run, peer)
    assert (second.contract, second.peer) == (first.contract, first.peer)
    assert second.contract.digest == first.contract.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peer.toml", "run.toml"]


def test_every_setting_has_a_description_and_is_in_the_help() -> None:
    text = settings_help()
    for section, info in sections():
        for key, field in info.annotation.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, f"{section}.{key}"
            assert f"{section}.{key} = " in text
            assert " ".join(field.description.split()) in text


def test_digest_is_the_same_in_another_process_and_field_order() -> None:
    values = Contract().model_dump(mode="json")
    backwards = {section: dict(reversed(keys.items())) for section, keys in reversed(values.items())}
    assert Contract.model_validate_json(json.dumps(backwards)).digest == Contract().digest
    code = "from opendiloco.config import Contract; print(Contract().digest)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == Contract().digest
    assert len(Contract().digest) == 64


@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    steps=st.integers(min_value=1, max_value=10**9),
    grace=st.one_of(st.just("adaptive"), st.floats(min_value=1e-3, max_value=1e6)),
    codec=st.sampled_from(["none", "fp16", "int8"]),
)
def test_contract_survives_the_wire_and_only_an_equal_one_has_its_digest(
    lr: float, steps: int, grace: float | str, codec: str
) -> None:
    contract = Contract(
        inner=InnerConfig(lr=lr, steps=steps),
        outer=OuterConfig.model_validate({"codec": codec}),
        rounds=RoundsConfig.model_validate({"grace": grace}),
    )
    back = contract_from_wire(contract_to_wire(contract))
    assert back == contract
    assert (back.digest == Contract().digest) == (contract_difference(back, Contract()) == [])


def test_contract_of_an_untrusted_peer_must_be_small_valid_whole_and_canonical() -> None:
    good = contract_to_wire(Contract())
    values = json.loads(good)
    other_steps = {**values, "inner": {**values["inner"], "steps": "50"}}
    for bad in (
        b"",
        b"\xff",
        b"[" * 10_000,
        b"null",
        b"{}",
        good + b" ",
        good.replace(b'"seed":0', b'"seed":0,"seed":0'),
        good.replace(b'"seed":0', b'"seed":-1'),
        good.replace(b'"momentum":0.9', b'"momentum":NaN'),
        json.dumps(other_steps, sort_keys=True, separators=(",", ":")).encode(),
        good.replace(b'"run":{', b'"run":{"\\n":1,'),
    ):
        with pytest.raises(SettingsError, match="run contract") as caught:
            contract_from_wire(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match=f"more than {MAX_WIRE_BYTES}"):
        contract_from_wire(b" " * (MAX_WIRE_BYTES + 1))
    assert contract_from_wire(good) == Contract()


def test_joiner_without_run_file_is_compared_only_in_what_it_asked_for() -> None:
    swarm = Contract(run=RunConfig(id="demo", seed=7), inner=InnerConfig(steps=500))
    assert load_settings(None, None, ["inner.steps=500", "run.id=demo"]).adopt(swarm).contract == swarm
    with pytest.raises(SettingsError) as caught:
        load_settings(None, None, ["inner.steps=100"]).adopt(swarm)
    assert str(caught.value) == (
        "inner.steps is 100 here and 500 in run demo: join with the run's own contract (leave out --set inner.steps)"
    )


def test_joiner_with_run_file_is_compared_in_everything(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    write_toml(run, Contract())
    swarm = Contract(inner=InnerConfig(steps=500), outer=OuterConfig(lr=0.5))
    with pytest.raises(SettingsError) as caught:
        load_settings(run, None, ["inner.steps=100"]).adopt(swarm)
    assert str(caught.value) == (
        "inner.steps is 100 here and 500 in run demo (1 more differ): "
        "join with the run's own contract (leave out --run and --set inner.steps)"
    )


def test_adopted_contract_must_fit_the_peers_own_settings() -> None:
    settings = load_settings(
        None, None, ["compute.micro_batch_size=16"], flags=[Flag("--peers", "swarm.peers", [ADDRESS])]
    )
    assert settings.adopt(Contract(inner=InnerConfig(batch_size=16))).contract.inner.batch_size == 16
    with pytest.raises(SettingsError, match="at most 2"):
        settings.adopt(Contract(inner=InnerConfig(batch_size=2)))


def test_difference_names_settings_and_both_values_in_order() -> None:
    mine, theirs = Contract(), Contract(outer=OuterConfig(lr=0.5), inner=InnerConfig(steps=500))
    assert contract_difference(mine, mine) == []
    assert contract_difference(mine, theirs) == [("inner.steps", 50, 500), ("outer.lr", 0.7, 0.5)]


def test_expiry_of_twice_the_heartbeat_is_enough() -> None:
    assert SwarmConfig(heartbeat_s=3, expiry_s=6).expiry_s == 6


def test_a_phase_of_fixed_length_needs_weights_that_follow_the_steps(tmp_path: Path) -> None:
    line = error_line(tmp_path, "rounds.deadline=30")
    assert "rounds.deadline is 30 and outer.weighting is uniform" in line
    assert "set outer.weighting to tokens" in line
    settings = load_settings(None, None, ["rounds.deadline=30", "outer.weighting=tokens"])
    assert settings.contract.rounds.deadline == 30.0
