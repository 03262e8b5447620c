"""Every setting: the run contract (equal on all peers of a run) and a peer's own settings."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from blake3 import blake3
from pydantic import Field, ValidationError, model_validator

from opendiloco.errors import SettingsError
from opendiloco.section import Allowed, Decay, ListenAddress, PeerAddress, Seconds, Section, Unit

MAX_WIRE_BYTES = 64 * 1024
"""Largest run contract that is taken from the swarm; an ordinary one is below 2 KB."""


Precision = Literal["fp32", "bf16", "fp16"]


# --- run contract --------------------------------------------------------------------------------------


class RunConfig(Section):
    id: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"),
        Allowed("1 to 64 letters, digits, - and _ that start with a letter or digit"),
    ] = "demo"
    """Name of the run on the DHT."""
    rounds: Annotated[int, Field(ge=1, le=10**9), Unit("outer rounds")] = 8
    """Outer rounds after which the run is finished."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the order of the data."""


class ModelConfig(Section):
    name: str = "tiny"
    """Preset (tiny, 14m, 60m, 150m, 400m, 1b) or hf:NAME_OR_PATH of a causal language model that transformers knows
    without code from the hub."""
    start: str = ""
    """What the parameters start from. Empty: an hf: model's own weights, seeded random values for a preset. random:
    seeded random values. Otherwise a folder (such as OUT/model of an earlier run) or hub name with weights that fit."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained and do not travel: shell-style patterns such as "model.embed_tokens.*"."""
    lora_rank: Annotated[int, Field(ge=0, le=65536)] = 0
    """Rank of LoRA adapters (arXiv:2106.09685), of which alone travels what is trained; 0 trains the model itself."""
    lora_alpha: Annotated[int, Field(ge=1, le=65536)] = 16
    """Adapters count lora_alpha / lora_rank times."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get adapters, such as ["q_proj", "v_proj"] (GPT-2: ["c_attn"]); none named: all but the
    output head."""

    @model_validator(mode="after")
    def _adapters_freeze_the_model_by_themselves(self) -> Self:
        if self.lora_rank and self.frozen:
            raise ValueError(
                f"model.lora_rank is {self.lora_rank} and model.frozen is {list(self.frozen)}: with adapters the whole "
                f"model is frozen; leave model.frozen out"
            )
        return self


class DataConfig(Section):
    source: str | Annotated[tuple[str, ...], Field(min_length=1, max_length=16)] = "stdlib"
    """stdlib, text:PATH, jsonl:PATH, parquet:PATH or hf:NAME[/CONFIG]; or several, each with its weight before it:
    ["0.7 hf:allenai/c4/en", "0.3 jsonl:code.jsonl"]."""
    tokenizer: str = "bytes"
    """bytes (no download) or the name or folder of a Hugging Face tokenizer."""
    seq_len: Annotated[int, Field(ge=2, le=2**20), Unit("tokens")] = 128
    """Tokens per training sequence."""
    text_field: str = "text"
    """Column that holds the text in jsonl, parquet and hub data sets."""
    separate_documents: bool = False
    """Whether documents that share a sequence are kept apart: no attention from one to another, positions that restart.
    """
    shards: Annotated[int, Field(ge=1, le=2**20), Unit("shards")] = 64
    """Parts of the text, of which every worker leases one at a time: so many workers read different text. A streamed
    source gives at most 8 for each of its files."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the documents held out for validation; no worker trains on them."""
    validation_sequences: Annotated[int, Field(ge=1, le=10**9), Unit("sequences")] = 64
    """Sequences of the held-out part that one evaluation reads."""


class InnerConfig(Section):
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """Inner optimizer. adamw8bit: moments of 1 byte each (bitsandbytes). muon: for the hidden matrices, AdamW for the
    embeddings, the output head and vectors (torch 2.9 or newer)."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 4e-4
    """Peak learning rate of the inner optimizer."""
    muon_lr: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Peak learning rate of Muon; 0 takes inner.lr. Its steps are scaled to AdamW's size, so that AdamW's learning rate
    and weight decay fit (arXiv:2502.16982)."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9), Unit("inner steps")] = 50
    """Global inner steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Course of the learning rate after warm-up; cosine ends at the run's last inner step."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.1
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Largest norm of a step's gradient (after accumulation); 0 switches clipping off."""
    batch_size: Annotated[int, Field(ge=1, le=10**9), Unit("sequences")] = 8
    """Sequences per inner step of one worker."""
    steps: Annotated[int, Field(ge=1, le=10**9), Unit("inner steps")] = 50
    """H: inner steps per outer round."""
    joiner_moments: Literal["zero", "donor"] = "zero"
    """What AdamW's moments start from at a worker that fetches the state: zero, or a donor's (twice the bytes; adamw
    alone)."""

    @model_validator(mode="after")
    def _only_adamws_moments_travel(self) -> Self:
        if self.joiner_moments == "donor" and self.optimizer != "adamw":
            raise ValueError(
                f"inner.joiner_moments is donor and inner.optimizer is {self.optimizer}: only adamw's moments travel; "
                f"set inner.joiner_moments to zero"
            )
        return self


class OuterConfig(Section):
    optimizer: Literal["nesterov", "sgd", "sgdm", "adam"] = "nesterov"
    """Outer optimizer (DiLoCo: Nesterov)."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.7
    """Outer learning rate."""
    momentum: Decay = 0.9
    """Outer momentum (adam: decay of the first moment)."""
    beta2: Decay = 0.95
    """adam: decay of the second moment."""
    eps: Annotated[float, Field(gt=0, le=1e9)] = 0.1
    """adam: added to the root of the second moment (DiLoCo uses 0.1)."""
    weighting: Literal["uniform", "tokens"] = "uniform"
    """Weight of a worker's pseudo-gradient: one each, or its tokens of the round."""
    codec: Literal["none", "fp16", "int8"] = "int8"
    """How values travel in the all-reduce."""


class RoundsConfig(Section):
    start_peers: Annotated[int, Field(ge=1, le=10**9), Unit("workers")] = 1
    """Workers the first round waits for; later ones come and go freely."""
    quorum: Annotated[float, Field(ge=0.5, lt=1)] = 0.5
    """A group needs more than this share of the lineage's live workers."""
    deadline: Seconds | Literal["adaptive"] = "adaptive"
    """Length of an inner phase. adaptive: inner.steps steps of each worker, and slow ones are waited for as their
    arrivals suggest. Seconds: each worker does as many steps as it can in that time."""
    grace: Seconds | Literal["adaptive"] = "adaptive"
    """Seconds after the first arrival at which a round starts without stragglers, or adaptive."""
    failure_timeout_s: Seconds = 5.0
    """A peer that sends nothing for so long in an all-reduce counts as dropped."""
    max_staleness: Annotated[int, Field(ge=0, le=10**9), Unit("rounds")] = 1
    """A worker that missed at most so many rounds keeps its finished inner phase, on top of the new parameters."""
    max_retries: Annotated[int, Field(ge=0, le=10**9), Unit("times")] = 5
    """Times a failed round is tried again before the worker gives up with exit code 75."""


class EvaluationConfig(Section):
    every_rounds: Annotated[int, Field(ge=1, le=10**9), Unit("outer rounds")] = 1
    """Outer rounds between evaluations of the outer parameters; also one before the first and after the last."""
    by: Literal["each", "one", "shared"] = "each"
    """Who evaluates: each worker all of data.validation_sequences, one participant of the round, another each time (its
    phase ends later by the seconds it takes), or the participants, who divide the sequences among them."""


class Contract(Section):
    """What is equal on all peers of a run. Published on the DHT; its digest is part of every rendezvous."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    rounds: RoundsConfig = RoundsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _unequal_steps_have_unequal_weights(self) -> Self:
        if self.rounds.deadline != "adaptive" and self.outer.weighting != "tokens":
            raise ValueError(
                f"rounds.deadline is {self.rounds.deadline:g} and outer.weighting is {self.outer.weighting}: workers "
                f"do unequal numbers of steps in that time; set outer.weighting to tokens"
            )
        return self

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON of all settings, in hex: equal contracts have equal digests."""
        return blake3(contract_to_wire(self)).hexdigest()


def contract_to_wire(contract: Contract) -> bytes:
    """The contract as canonical JSON: sorted keys, no spaces, ASCII."""
    values = contract.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def contract_from_wire(data: bytes) -> Contract:
    """The contract an untrusted peer published; SettingsError unless it is valid, whole and canonical."""
    upgrade = "install the version of opendiloco that the run uses"
    if len(data) > MAX_WIRE_BYTES:
        raise SettingsError(
            f"the swarm's run contract has {len(data)} bytes, more than {MAX_WIRE_BYTES}: "
            "check that --peers names the right swarm"
        )
    try:
        contract = Contract.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        setting = ".".join(str(part)[:40] for part in first["loc"][:2]) or "it"
        raise SettingsError(
            f"the swarm's run contract is not valid here, {setting!r}: {first['msg'][:120]}; {upgrade}"
        ) from None
    if contract_to_wire(contract) != data:
        raise SettingsError(f"the swarm's run contract lacks settings or is not canonical: {upgrade}")
    return contract


def contract_difference(mine: Contract, theirs: Contract) -> list[tuple[str, object, object]]:
    """(setting, my value, their value) of every setting that differs, in the order of this file."""
    ours, others = mine.model_dump(mode="json"), theirs.model_dump(mode="json")
    return [
        (f"{section}.{key}", value, others[section][key])
        for section, values in ours.items()
        for key, value in values.items()
        if json.dumps(value) != json.dumps(others[section][key])
    ]


# --- a peer's own settings -----------------------------------------------------------------------------


class SwarmConfig(Section):
    peers: Annotated[tuple[PeerAddress, ...], Field(max_length=1000)] = ()
    """Addresses of peers to join through; none starts a new swarm."""
    host_maddrs: Annotated[tuple[ListenAddress, ...], Field(min_length=1)] = ("/ip4/127.0.0.1/tcp/0",)
    """Addresses to listen on. /ip4/0.0.0.0/tcp/PORT makes a peer reachable from other machines."""
    announce_maddrs: tuple[ListenAddress, ...] = ()
    """Addresses told to others, when they differ from host_maddrs (port forwarding)."""
    identity: str = ""
    """Key file of this peer; made with mode 600 when missing. Default: OUT/identity.key."""
    client_mode: bool = False
    """Only connect outwards: for peers that cannot be reached. They send and fetch but reduce nothing."""
    startup_timeout_s: Seconds = 30.0
    """Seconds in which the network must be up and the first address must answer."""
    heartbeat_s: Seconds = 2.0
    """Seconds between progress records."""
    expiry_s: Seconds = 12.0
    """Seconds after which a peer that renews no record counts as gone; at least twice heartbeat_s."""
    log_rounds: Annotated[int, Field(ge=1, le=10**9), Unit("rounds")] = 16
    """Committed rounds kept on disk (about 1 byte per parameter each with int8) for peers that missed them."""

    @model_validator(mode="after")
    def _records_outlive_a_lost_heartbeat(self) -> Self:
        if self.expiry_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"swarm.expiry_s is {self.expiry_s} and swarm.heartbeat_s is {self.heartbeat_s}: "
                f"set swarm.expiry_s to at least {2 * self.heartbeat_s}, twice the heartbeat"
            )
        return self


class ComputeConfig(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Allowed("auto, cpu, cuda or cuda:N")] = "auto"
    """Where the trainer computes; auto takes a GPU when there is one."""
    precision: Precision = "fp32"
    """Precision of forward and backward (autocast); parameters stay fp32. fp16 scales the loss by itself."""
    micro_batch_size: Annotated[int, Field(ge=0, le=10**9), Unit("sequences")] = 0
    """Sequences per forward pass; gradients accumulate up to inner.batch_size. 0: the whole batch, or all of the share
    that a process has of it (torchrun). eval: 8."""
    compile: bool = False
    """Compile the training pass with torch.compile, before the first round; without it where that fails."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    threads: Annotated[int, Field(ge=0, le=4096), Unit("threads")] = 0
    """CPU threads of the trainer; 0 leaves torch's default."""


class CheckpointConfig(Section):
    every_rounds: Annotated[int, Field(ge=0, le=10**9), Unit("outer rounds")] = 0
    """Outer rounds between checkpoints; 0 writes none."""
    keep: Annotated[int, Field(ge=1, le=10**9), Unit("checkpoints")] = 2
    """Newest checkpoints kept."""


class LogConfig(Section):
    every_steps: Annotated[int, Field(ge=1, le=10**9), Unit("inner steps")] = 10
    """Inner steps between inner_step lines."""
    sinks: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = ("jsonl",)
    """Where metrics go: always to OUT/metrics.jsonl, and to others whose package is installed, as a list."""
    project: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"),
        Allowed("1 to 100 letters, digits, ., - and _ that start with a letter or digit"),
    ] = "opendiloco"
    """Project of wandb and trackio in which the worker's run is; the run is named after run.id and the peer id."""


class PeerConfig(Section):
    """What belongs to one peer."""

    swarm: SwarmConfig = SwarmConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
