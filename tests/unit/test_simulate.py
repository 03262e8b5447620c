"""Simulated workers follow a plain DiLoCo written down here, stay identical with every codec, and learn."""

from __future__ import annotations

import argparse
import copy
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from opendiloco.averager import contribution_bytes, vector_sizes
from opendiloco.codec import CODECS, get_codec
from opendiloco.config import ComputeConfig, Contract, EvaluationConfig, ModelConfig, OuterConfig
from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.ledger import Reading
from opendiloco.metrics import read_metrics
from opendiloco.model import build_model
from opendiloco.plan import EVERYBODY, Plan
from opendiloco.rounds import RoundRequest, leader_order
from opendiloco.simulate import simulate
from opendiloco.simulated import SimulatedGroup
from opendiloco.tokenizer import load_tokenizer
from opendiloco.tokens import training_stream
from opendiloco.worker import Worker

COMPUTE = ComputeConfig(device="cpu", threads=1)
NAMES = ("worker-a", "worker-b", "worker-c")


def contract_of(*, rounds: int = 3, steps: int = 3, inner_lr: float = 1e-3, **outer: object) -> Contract:
    """A run small enough for a test: 0.98 M parameters, 2 sequences of 16 tokens a step."""
    return Contract.model_validate(
        {
            "run": {"id": "test", "rounds": rounds, "seed": 7},
            "data": {"source": f"text:{argparse.__file__}", "seq_len": 16, "validation_sequences": 4},
            "inner": {"lr": inner_lr, "warmup_steps": 2, "batch_size": 2, "steps": steps},
            "outer": {"codec": "none", **outer},
        }
    )


def replicas_of(out: Path, names: Sequence[str]) -> dict[int, set[str]]:
    """Hashes that workers had after each round."""
    found: dict[int, set[str]] = {}
    for name in names:
        for line in events(out, name, "round"):
            if line["verdict"] == "commit":
                found.setdefault(line["round"], set()).add(line["params_hash"])
    return found


def run(contract: Contract, out: Path, names: Sequence[str] = NAMES) -> list[Worker]:
    return simulate(contract, COMPUTE, names, out)


def events(out: Path, name: str, event: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out / name / "metrics.jsonl") if line["event"] == event]


def flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


# --- the oracle ----------------------------------------------------------------------------------------


def initial_model(contract: Contract) -> nn.Module:
    size = load_tokenizer(contract.data.tokenizer).vocab_size
    return build_model(contract.model, vocab_size=size, seq_len=contract.data.seq_len, seed=contract.run.seed)


def initial_theta(contract: Contract) -> Tensor:
    return flat(list(initial_model(contract).parameters()))


def batches_of(contract: Contract, name: str, names: Sequence[str]) -> Iterator[Tensor]:
    """Those of its first shard: the run is too short for another one."""
    first = Reading(shard=leader_order("0", names).index(name))
    return training_stream(
        contract.data,
        load_tokenizer(contract.data.tokenizer),
        seed=contract.run.seed,
        batch_size=contract.inner.batch_size,
        lease=lambda at, *_: at or first,
    )


def plain_diloco(
    contract: Contract, names: Sequence[str], plan: Plan = EVERYBODY
) -> tuple[Tensor, Tensor, list[float]]:
    """DiLoCo, Algorithm 1, arXiv:2311.08105, on torch's own optimizers: theta, momentum and losses of all steps.

    A worker whose pseudo-gradient is lost goes on from the new theta with it on top.
    """
    inner, outer, total = contract.inner, contract.outer, contract.run.rounds * contract.inner.steps
    theta = [parameter.detach().clone() for parameter in initial_model(contract).parameters()]
    outer_optimizer = torch.optim.SGD(theta, lr=outer.lr, momentum=outer.momentum, nesterov=True)
    models = [initial_model(contract) for _ in names]
    batches = [batches_of(contract, name, names) for name in names]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": inner.weight_decay},
                {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            betas=inner.betas,
        )
        for model in models
    ]
    losses = []
    for step in range(total):
        after_warmup = (step - inner.warmup_steps) / (total - inner.warmup_steps)
        cosine = inner.min_lr_ratio + (1 - inner.min_lr_ratio) * (1 + math.cos(math.pi * after_warmup)) / 2
        lr = inner.lr * ((step + 1) / inner.warmup_steps if step < inner.warmup_steps else cosine)
        for model, optimizer, stream in zip(models, optimizers, batches, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
            tokens = next(stream)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
            optimizer.step()
            losses.append(loss.item())
        if (step + 1) % inner.steps == 0:
            gradients = [
                [anchor - own.detach() for anchor, own in zip(theta, model.parameters(), strict=True)]
                for model in models
            ]
            lost = [plan.is_lost(name, (step + 1) // inner.steps) for name in names]
            for index, anchor in enumerate(theta):
                came = [gradient[index] for gradient, is_lost in zip(gradients, lost, strict=True) if not is_lost]
                anchor.grad = torch.stack(came).mean(0)
            outer_optimizer.step()
            for model, gradient, is_lost in zip(models, gradients, lost, strict=True):
                for parameter, anchor, late in zip(model.parameters(), theta, gradient, strict=True):
                    parameter.data.copy_(anchor - late if is_lost else anchor)
    momentum = [outer_optimizer.state[anchor]["momentum_buffer"] for anchor in theta]
    return flat(theta), flat(momentum), losses


def distance(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest relative error in the sense of the Euclidean norm."""
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(scale))


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]], ids=["three workers", "one worker"])
def test_codec_none_follows_a_plain_diloco_within_fp32_rounding(names: Sequence[str], tmp_path: Path) -> None:
    contract = contract_of(rounds=3)
    theta, momentum, losses = plain_diloco(contract, names)
    workers = run(contract, tmp_path, names)
    moved = theta - initial_theta(contract)
    assert moved.abs().max() > 1e-3  # else the comparison would prove nothing
    for worker in workers:
        outer = worker.optimizer.outer
        assert distance(outer.theta, theta, moved) < 5e-6
        assert distance(outer.momentum, momentum, momentum) < 5e-6
        assert torch.equal(flat(list(worker.model.parameters())), outer.theta)
    in_round = contract.inner.steps * len(names)
    means = [sum(losses[at : at + in_round]) / in_round for at in range(0, len(losses), in_round)]
    logged = [[line["loss"] for line in events(tmp_path, name, "round")] for name in names]
    found = [sum(losses) / len(names) for losses in zip(*logged, strict=True)]
    assert found == pytest.approx(means, rel=1e-5)


def test_what_comes_too_late_for_a_round_counts_in_the_next_one(tmp_path: Path) -> None:
    contract = contract_of(rounds=3, steps=2)
    plan = Plan(is_lost=lambda name, round: (name, round) in {(NAMES[0], 1), (NAMES[1], 2), (NAMES[2], 2)})
    theta, momentum, _ = plain_diloco(contract, NAMES, plan)
    workers = simulate(contract, COMPUTE, NAMES, tmp_path, plan=plan)
    for worker in workers:
        assert distance(worker.optimizer.outer.theta, theta, theta - initial_theta(contract)) < 5e-6
        assert distance(worker.optimizer.outer.momentum, momentum, momentum) < 5e-6
    rounds = {name: events(tmp_path, name, "round") for name in NAMES}
    assert [line["verdict"] for line in rounds[NAMES[0]]] == ["resync", "commit", "commit"]
    assert [line["participants"] for line in rounds[NAMES[0]][1:]] == [[NAMES[0]], list(NAMES)]
    assert rounds[NAMES[1]][0]["participants"] == [NAMES[1], NAMES[2]]


@pytest.mark.parametrize("change", [{"inner_lr": 1.01e-3}, {"momentum": 0.91}], ids=str)
def test_the_oracle_tells_other_settings_apart(change: dict[str, Any], tmp_path: Path) -> None:
    contract = contract_of(rounds=1)
    theta, _, _ = plain_diloco(contract, NAMES[:1])
    worker = run(contract_of(rounds=1, **change), tmp_path, NAMES[:1])[0]
    assert distance(worker.optimizer.outer.theta, theta, theta - initial_theta(contract)) > 1e-3


# --- replicas ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Worker], Path]]:
    """Three workers with every codec, and with another outer optimizer: two rounds of two steps."""
    variants = {codec: {"codec": codec} for codec in CODECS}
    variants["adam"] = {"codec": "int8", "optimizer": "adam", "lr": 0.001}
    folders = {name: tmp_path_factory.mktemp(name) for name in variants}
    return {
        name: (run(contract_of(rounds=2, steps=2, **variant), folders[name]), folders[name])
        for name, variant in variants.items()
    }


@pytest.mark.parametrize("variant", [*CODECS, "adam"])
def test_replicas_are_identical_after_every_round(variant: str, runs: dict[str, tuple[list[Worker], Path]]) -> None:
    workers, out = runs[variant]
    logged = [events(out, name, "round") for name in NAMES]
    assert [[line["round"] for line in lines] for lines in logged] == [[1, 2]] * 3
    for key in ("params_hash", "lineage", "verdict", "participants", "weights", "swarm_tokens", "outer_gradient_norm"):
        values = [[line[key] for line in lines] for lines in logged]
        assert values == values[:1] * 3, key
    assert len({line["params_hash"] for line in logged[0]}) == 2
    assert {line["verdict"] for line in logged[0]} == {"commit"}
    assert logged[0][0]["participants"] == sorted(NAMES)
    assert len({worker.optimizer.params_hash for worker in workers}) == 1


def test_workers_read_different_text_and_start_from_the_same_parameters(
    runs: dict[str, tuple[list[Worker], Path]],
) -> None:
    _, out = runs["none"]
    joins = [events(out, name, "join")[0] for name in NAMES]
    assert len({(join["params_hash"], join["lineage"]) for join in joins}) == 1
    norms = [events(out, name, "round")[0]["pseudo_gradient_norm"] for name in NAMES]
    assert len(set(norms)) == 3


def test_workers_of_a_model_without_weights_start_from_the_same_parameters(tmp_path: Path) -> None:
    """They are drawn from torch's global generator, and the workers are threads of one process."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=32, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "config")
    contract = contract_of(rounds=1, steps=1)
    own = contract.model_copy(update={"model": ModelConfig(name=f"hf:{tmp_path / 'config'}")})
    workers = run(own, tmp_path)
    joins = [events(tmp_path, name, "join")[0] for name in NAMES]
    assert len({join["params_hash"] for join in joins}) == 1
    assert len({worker.optimizer.params_hash for worker in workers}) == 1


def test_the_same_run_twice_gives_the_same_bits(runs: dict[str, tuple[list[Worker], Path]], tmp_path: Path) -> None:
    once = runs["int8"][0][0].optimizer
    again = run(contract_of(rounds=2, steps=2, codec="int8"), tmp_path)[0].optimizer
    assert (once.params_hash, once.outer.lineage) == (again.params_hash, again.outer.lineage)


@pytest.mark.parametrize(("codec", "error"), [("fp16", 1e-2), ("int8", 0.1)])
def test_lossy_codecs_stay_near_the_exact_run(
    codec: str, error: float, runs: dict[str, tuple[list[Worker], Path]]
) -> None:
    exact, lossy = (runs[name][0][0].optimizer.outer.theta for name in ("none", codec))
    assert 0 < distance(lossy, exact, exact - initial_theta(contract_of())) < error


# --- learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[:2]], ids=["one worker", "two workers"])
def test_validation_loss_goes_down(names: Sequence[str], tmp_path: Path) -> None:
    run(contract_of(rounds=3, steps=6, inner_lr=3e-3, codec="int8"), tmp_path, names)
    losses = [line["loss"] for line in events(tmp_path, names[0], "eval")]
    assert len(losses) == 4
    assert abs(losses[0] - math.log(257)) < 0.2  # knows nothing yet: a byte or the end of a document
    assert losses[-1] < losses[0] - 1.0


# --- weights and failures ------------------------------------------------------------------------------


def averages_of(weights: Sequence[float], codec: str) -> tuple[list[Tensor], list[Tensor]]:
    """Values and averages of members of these weights in one round."""
    names = [f"member-{index}" for index in range(len(weights))]
    contract = Contract(outer=OuterConfig.model_validate({"codec": codec}))
    group = SimulatedGroup(names, get_codec(codec))
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(3000, generator=generator) for _ in names]

    def take_part(index: int) -> Tensor:
        swarm = group.member(names[index])
        vectors = swarm.allocate(vector_sizes(3000, contract))
        everybody_is_there.wait()
        get_codec(codec).encode(values[index], contribution_bytes(vectors, get_codec(codec)))
        outcome = swarm.average(RoundRequest(weight=weights[index], tokens=int(weights[index]))).result()
        assert outcome.weights == dict(zip(names, weights, strict=True))
        return vectors["average"]

    everybody_is_there = threading.Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as threads:
        return values, list(threads.map(take_part, range(len(names))))


@pytest.mark.parametrize(("codec", "error"), [("none", 1e-6), ("fp16", 2e-3), ("int8", 0.05)])
def test_the_average_is_weighted_and_the_same_for_all(codec: str, error: float) -> None:
    values, averages = averages_of((1.0, 300.0, 4096.0), codec)
    exact = (values[0].double() + 300 * values[1].double() + 4096 * values[2].double()) / 4397
    assert torch.equal(averages[0], averages[1])
    assert torch.equal(averages[0], averages[2])
    assert (averages[0].double() - exact).abs().max() < error


def test_weighting_by_tokens_lists_the_tokens_of_the_round(tmp_path: Path) -> None:
    run(contract_of(rounds=1, steps=2, weighting="tokens"), tmp_path, NAMES[:2])
    line = events(tmp_path, NAMES[0], "round")[0]
    assert line["weights"] == dict.fromkeys(NAMES[:2], 2 * 2 * 16.0)
    assert line["swarm_tokens"] == 2 * line["tokens"] == 2 * 2 * 2 * 16


def test_workers_that_come_and_go_as_planned_are_replicas_while_they_are_there(tmp_path: Path) -> None:
    there = {NAMES[0]: {1, 2, 3, 4}, NAMES[1]: {1, 3, 4}, NAMES[2]: {3}}
    plan = Plan(is_there=lambda name, round: round in there[name])
    contract = contract_of(rounds=4, steps=1, optimizer="adam", lr=0.001)
    workers = simulate(contract, COMPUTE, NAMES, tmp_path, plan=plan)
    for round in range(1, 5):
        expected = [name for name in NAMES if round in there[name]]
        for name in expected:
            lines = {line["round"]: line for line in events(tmp_path, name, "round")}
            assert lines[round]["participants"] == expected
            assert lines.keys() == there[name]
    assert {len(hashes) for hashes in replicas_of(tmp_path, NAMES).values()} == {1}
    joins = [(line["round"], line["source"]) for line in events(tmp_path, NAMES[1], "join")]
    assert joins == [(0, "fresh"), (2, "swarm")]
    assert [line["reason"] for line in events(tmp_path, NAMES[2], "leave")] == ["asked to leave"]
    assert [worker.optimizer.round for worker in workers] == [4, 4, 3]


def test_nobody_waits_for_the_part_of_an_evaluation_of_a_worker_that_leaves(tmp_path: Path) -> None:
    contract = contract_of(rounds=2, steps=1)
    contract = contract.model_copy(update={"evaluation": EvaluationConfig(by="shared")})
    plan = Plan(is_there=lambda name, round: name != NAMES[2] or round == 1)
    simulate(contract, COMPUTE, NAMES, tmp_path, plan=plan)
    assert events(tmp_path, NAMES[0], "eval")[-1]["tokens"] == 4 * 15


def test_workers_may_have_text_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(Path(threading.__file__).read_text())
    contract, sources = contract_of(rounds=1, steps=1), {NAMES[1]: f"text:{tmp_path / 'other.txt'}"}
    simulate(contract, COMPUTE, NAMES[:2], tmp_path, sources=sources)
    (first, second) = (events(tmp_path, name, "eval")[-1]["loss"] for name in NAMES[:2])
    assert first != second  # of the same parameters
    assert {len(hashes) for hashes in replicas_of(tmp_path, NAMES[:2]).values()} == {1}


def test_a_worker_that_waits_for_its_turn_ends_with_those_that_fail(tmp_path: Path) -> None:
    plan = Plan(is_there=lambda name, round: (name == NAMES[0]) == (round == 1))
    with pytest.raises(OpendilocoError, match=r"6 times .*: lower inner.lr"):
        simulate(diverging(), COMPUTE, NAMES[:2], tmp_path, plan=plan)


def test_nobody_waits_for_the_outer_state_of_a_group_that_has_failed() -> None:
    group = SimulatedGroup(NAMES, get_codec("none"))
    waiting = group.donor(1)
    group.abort()
    assert [isinstance(donor.exception(), SwarmError) for donor in (waiting, group.donor(2))] == [True, True]


def test_a_plan_says_from_when_to_when_a_worker_stays() -> None:
    plan = Plan(is_there=lambda name, round: round % 4 != 0)
    assert plan.stays("a", 6) == [range(1, 4), range(5, 7)]


def test_a_worker_that_cannot_start_ends_the_others_and_its_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / NAMES[2] / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"cannot write .*metrics.jsonl"):
        run(contract_of(), tmp_path)


def diverging() -> Contract:
    """A run of which nothing is finite from its first step on; a contract that is read does not take such a rate."""
    contract = contract_of()
    return contract.model_copy(update={"inner": contract.inner.model_copy(update={"lr": 1e30})})


def test_a_run_that_diverges_says_at_which_step_and_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(OpendilocoError, match=r"6 times .*: lower inner.lr"):
        run(diverging(), tmp_path, NAMES[:1])


def test_a_simulated_worker_leaves_its_model_in_the_outer_parameters(tmp_path: Path) -> None:
    worker = run(contract_of(rounds=1, steps=1), tmp_path, NAMES[:1])[0]
    before = copy.deepcopy(worker.model.state_dict())
    worker.optimizer.write_outer_parameters()
    assert all(torch.equal(value, before[name]) for name, value in worker.model.state_dict().items())
    assert events(tmp_path, NAMES[0], "leave")[0]["reason"] == "finished"


def test_fewer_shards_than_workers_and_shards_that_end_early_cost_one_warning(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text()[:5000])
    contract = contract_of(rounds=4)
    data = contract.data.model_copy(update={"shards": 2, "source": f"text:{tmp_path / 'text.txt'}"})
    inner = contract.inner.model_copy(update={"batch_size": 16})  # 48 of about 150 sequences of a shard in a round
    contract = contract.model_copy(update={"data": data, "inner": inner})
    run(contract, tmp_path)
    for name in NAMES:
        (warning,) = events(tmp_path, name, "warning")
        assert "has 2 shards for 3 workers, so some read the same text: raise data.shards" in warning["message"]
    rounds = [events(tmp_path, name, "round") for name in NAMES]
    assert [len(of_worker) for of_worker in rounds] == [4, 4, 4]
    read = [{shard for event in of_worker for shard in event["shards"]} for of_worker in rounds]
    assert sum(map(len, read)) == len(set.union(*read)) > 3  # leases go on, into the next passes
