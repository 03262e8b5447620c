"""Three `opendiloco train` processes, started together, train as the simulation does and say so in their metrics."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opendiloco.config import ComputeConfig, Contract
from opendiloco.inner import learning_rate
from opendiloco.metrics import read_metrics
from opendiloco.settings import load_settings
from opendiloco.simulate import simulate

if TYPE_CHECKING:
    from support.commands import Command, Commands
    from support.peers import Network
    from support.waiting import WaitUntil

WORKERS, ROUNDS, STEPS, BATCH, SEQ_LEN, VALIDATION = 3, 5, 3, 2, 32, 4
TOKENS = STEPS * BATCH * SEQ_LEN  # of one worker in a round

FIELDS = {
    "join": "round lineage source donors received_bytes seconds_s params_hash",
    "inner_step": "round inner_step global_inner_step loss lr grad_norm tokens_seen tokens_per_s",
    "round": (
        "round verdict participants weights lineage params_hash loss inner_steps tokens shards swarm_tokens inner_s "
        "wait_s rendezvous_s allreduce_s outer_s sent_bytes received_bytes codec pseudo_gradient_norm "
        "outer_gradient_norm"
    ),
    "eval": "round loss perplexity tokens",
    "leave": "round reason",
}


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    contract: Contract
    workers: list[Command]
    helpers: list[psutil.Process]
    """Guards, network processes and daemons while it lasted."""

    @property
    def peers(self) -> list[str]:
        return [worker.events("join")[0]["peer"] for worker in self.workers]

    def events(self, kind: str) -> list[list[dict[str, Any]]]:
        return [worker.events(kind) for worker in self.workers]


@pytest.fixture(scope="module")
def run(module_network: Network, module_commands: Commands, wait_until: WaitUntil) -> Run:
    """All start at the same moment and know one address. Two bring the contract, one takes it from the swarm."""
    bootstrap = module_network.peer().open()
    patience = {"grace": 600.0, "failure_timeout_s": 60.0}  # on a busy machine too nobody is left out
    contract = module_commands.contract(rounds=ROUNDS, codec="none", start_peers=WORKERS, **patience)
    sinks = ['log.sinks=["tensorboard"]']
    workers = [module_commands.worker(bootstrap.addresses, brings, sets=sinks) for brings in (contract, contract, None)]
    helpers: list[psutil.Process] = []
    for worker in workers:
        wait_until(lambda worker=worker: worker.events("join") or worker.popen.poll() is not None, "it has joined")
        helpers += worker.below()
    assert [worker.wait() for worker in workers] == [0] * WORKERS, [worker.errors for worker in workers]
    return Run(contract, workers, helpers)


def test_nothing_of_a_finished_run_is_left(run: Run) -> None:
    assert len(run.helpers) >= WORKERS  # they were there
    assert not [process for process in run.helpers if process.is_running()]


def test_workers_started_together_from_nothing_begin_with_the_same_parameters(run: Run) -> None:
    joins = [events[0] for events in run.events("join")]
    assert len({join["params_hash"] for join in joins}) == 1
    assert len({join["lineage"] for join in joins}) == 1
    assert [(join["round"], join["source"], join["donors"]) for join in joins] == [(0, "fresh", [])] * WORKERS


def test_every_round_is_committed_by_all_with_identical_replicas(run: Run) -> None:
    rounds = run.events("round")
    assert [[event["round"] for event in events] for events in rounds] == [list(range(1, ROUNDS + 1))] * WORKERS
    for events in zip(*rounds, strict=True):
        assert {event["verdict"] for event in events} == {"commit"}
        assert all(event["participants"] == sorted(run.peers) for event in events)
        assert all(event["weights"] == dict.fromkeys(run.peers, 1.0) for event in events)
        assert len({event["params_hash"] for event in events}) == 1
        assert len({event["lineage"] for event in events}) == 1
        assert len({event["outer_gradient_norm"] for event in events}) == 1
    assert len({event["params_hash"] for event in rounds[0]}) == ROUNDS
    assert len({event["lineage"] for event in rounds[0]}) == ROUNDS


def test_a_sink_has_what_metrics_jsonl_has(run: Run) -> None:
    for worker in run.workers:
        found = EventAccumulator(str(worker.folder / "tensorboard"), {"scalars": 0}).Reload()
        for name, of_events in (("inner/loss", "inner_step"), ("round/loss", "round"), ("validation/loss", "eval")):
            losses = [event["loss"] for event in worker.events(of_events)]
            assert [point.value for point in found.Scalars(name)] == pytest.approx(losses)
        steps = [event["global_inner_step"] for event in worker.events("inner_step")]
        assert [point.step for point in found.Scalars("inner/loss")] == steps == list(range(ROUNDS * STEPS))
        assert [point.step for point in found.Scalars("round/loss")] == list(range(STEPS, ROUNDS * STEPS + 1, STEPS))


def test_rendezvous_takes_less_than_a_second(run: Run) -> None:
    """The median: the machine may be busy, but a fixed waiting time would be in all rounds."""
    for events in run.events("round"):
        assert statistics.median(event["rendezvous_s"] for event in events) < 1.0


def test_workers_read_different_text(run: Run) -> None:
    read = [{shard for event in events for shard in event["shards"]} for events in run.events("round")]
    assert sum(map(len, read)) == len(set.union(*read)) > WORKERS  # some have gone on to another shard
    for events in zip(*run.events("round"), strict=True):
        assert len({event["loss"] for event in events}) == WORKERS
        assert len({event["pseudo_gradient_norm"] for event in events}) == WORKERS


def test_swarm_follows_the_simulation_within_rounding(run: Run, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        finished = simulate(run.contract, ComputeConfig(threads=1), run.peers, tmp_path)
    finally:
        torch.set_num_threads(threads)
    for peer, of_worker, of_eval in zip(run.peers, run.events("round"), run.events("eval"), strict=True):
        simulated = read_metrics(tmp_path / peer / "metrics.jsonl")
        rounds = [event["loss"] for event in simulated if event["event"] == "round"]
        evaluations = [event["loss"] for event in simulated if event["event"] == "eval"]
        assert [event["loss"] for event in of_worker] == pytest.approx(rounds, rel=1e-5)
        assert [event["loss"] for event in of_eval] == pytest.approx(evaluations, rel=1e-5)
    real = load_file(run.workers[0].folder / "model" / "model.safetensors")
    expected = {name: value for name, value in finished[0].model.state_dict().items() if name in real}
    assert len(expected) == len(real)
    torch.testing.assert_close(real, expected, rtol=1e-4, atol=2e-6)


def test_models_on_disk_are_the_same_bytes(run: Run) -> None:
    models = [(worker.folder / "model" / "model.safetensors").read_bytes() for worker in run.workers]
    assert len(set(models)) == 1


def test_metrics_have_the_promised_events_and_fields(run: Run) -> None:
    for worker, peer in zip(run.workers, run.peers, strict=True):
        events = worker.events()
        assert events[0]["event"] == "join"
        assert events[-1]["event"] == "leave"
        counts = {kind: len(worker.events(kind)) for kind in FIELDS}
        assert counts == {"join": 1, "inner_step": ROUNDS * STEPS, "round": ROUNDS, "eval": ROUNDS + 1, "leave": 1}
        assert len(events) == sum(counts.values())  # no other kind, no warning
        for event in events:
            assert set(event) == {"event", "time", "peer", *FIELDS[event["event"]].split()}
            assert event["peer"] == peer
            assert all(event[name] >= 0 for name in event if name.endswith(("_s", "_bytes")))
        assert max(event["time"] for event in events) - min(event["time"] for event in events) < 300


def test_inner_steps_count_and_learn_as_the_contract_says(run: Run) -> None:
    total = ROUNDS * STEPS
    for events in run.events("inner_step"):
        assert [event["global_inner_step"] for event in events] == list(range(total))
        assert [event["round"] for event in events] == [step // STEPS for step in range(total)]
        assert [event["inner_step"] for event in events] == [step % STEPS + 1 for step in range(total)]
        assert [event["tokens_seen"] for event in events] == [(step + 1) * BATCH * SEQ_LEN for step in range(total)]
        expected = [learning_rate(step, config=run.contract.inner, total_steps=total) for step in range(total)]
        assert [event["lr"] for event in events] == pytest.approx(expected)
        assert all(0 < event["loss"] < 7 and event["grad_norm"] > 0 for event in events)
        assert all(event["tokens_per_s"] > 0 for event in events)


def test_round_lines_add_up(run: Run) -> None:
    for worker in run.workers:
        losses = [event["loss"] for event in worker.events("inner_step")]
        for event in worker.events("round"):
            first = (event["round"] - 1) * STEPS
            assert event["loss"] == pytest.approx(statistics.fmean(losses[first : first + STEPS]))
            assert (event["inner_steps"], event["tokens"], event["swarm_tokens"]) == (STEPS, TOKENS, WORKERS * TOKENS)
            assert event["codec"] == "none"
            assert event["pseudo_gradient_norm"] > 0
            assert event["outer_gradient_norm"] > 0
    totals = [
        [sum(event[name] for event in events) for name in ("sent_bytes", "received_bytes")]
        for events in zip(*run.events("round"), strict=True)
    ]
    assert all(sent == pytest.approx(received, rel=0.01) for sent, received in totals)
    vector = 4 * 983_680  # fp32 values of the tiny model, give or take
    assert all(sent == pytest.approx(2 * (WORKERS - 1) * vector, rel=0.05) for sent, _ in totals)


def test_evaluations_agree_and_fall(run: Run) -> None:
    for events in run.events("eval"):
        assert [event["round"] for event in events] == list(range(ROUNDS + 1))
        assert all(event["perplexity"] == pytest.approx(math.exp(event["loss"])) for event in events)
        assert all(event["tokens"] == VALIDATION * (SEQ_LEN - 1) for event in events)
        assert events[-1]["loss"] < events[0]["loss"] - 0.1
    for events in zip(*run.events("eval"), strict=True):
        assert len({event["loss"] for event in events}) == 1


def test_folders_hold_settings_and_log(run: Run) -> None:
    for worker in run.workers:
        settings = load_settings(worker.folder / "run.toml", worker.folder / "peer.toml")
        assert settings.contract == run.contract  # also where it was taken from the swarm
        assert settings.peer.compute.threads == 1
        log = (worker.folder / "log.txt").read_text()
        for round in range(1, ROUNDS + 1):
            assert f"round {round} | 3 of 3 workers | loss" in log
            assert f"round {round} | 3 of 3 workers | loss" in worker.errors
        assert "Traceback" not in log


def test_last_line_of_a_worker_says_where_the_outer_parameters_of_which_round_are(run: Run) -> None:
    for worker in run.workers:
        line = f"the outer parameters of round {ROUNDS} are in {worker.folder / 'model'}"
        assert worker.errors.splitlines()[-1].endswith(line)


def test_reason_to_leave_is_the_end_of_the_run(run: Run) -> None:
    leaves = [events[0] for events in run.events("leave")]
    assert [(leave["round"], leave["reason"]) for leave in leaves] == [(ROUNDS, "finished")] * WORKERS
