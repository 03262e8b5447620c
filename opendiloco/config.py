"""Every setting: the run contract (equal on all peers of a run) and a peer's own settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings: frozen, typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


# --- run contract --------------------------------------------------------------------------------------


class RunConfig(Section):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "demo"
    """Name of the run on the DHT: letters, digits, - and _."""
    rounds: Annotated[int, Field(ge=1)] = 8
    """Outer rounds after which the run is finished."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the order of the data."""


class ModelConfig(Section):
    name: str = "tiny"
    """Preset (tiny, 14m, 60m, 150m, 400m, 1b) or hf:NAME_OR_PATH of a causal language model."""


class DataConfig(Section):
    source: str = "stdlib"
    """stdlib, text:PATH, jsonl:PATH, parquet:PATH or hf:NAME[/CONFIG]."""
    tokenizer: str = "bytes"
    """bytes (no download) or the name or folder of a Hugging Face tokenizer."""
    seq_len: Annotated[int, Field(ge=2, le=2**20)] = 128
    """Tokens per training sequence."""
    text_field: str = "text"
    """Column that holds the text in jsonl, parquet and hub data sets."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the documents held out for validation; no worker trains on them."""
    validation_sequences: Annotated[int, Field(ge=1)] = 64
    """Sequences of the held-out part that one evaluation reads."""


class InnerConfig(Section):
    optimizer: Literal["adamw"] = "adamw"
    """Inner optimizer."""
    lr: Annotated[float, Field(gt=0)] = 4e-4
    """Peak learning rate of the inner optimizer."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    """Global inner steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Course of the learning rate after warm-up; cosine ends at the run's last inner step."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of a step's gradient (after accumulation); 0 switches clipping off."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences per inner step of one worker."""
    steps: Annotated[int, Field(ge=1)] = 50
    """H: inner steps per outer round."""


class OuterConfig(Section):
    optimizer: Literal["nesterov", "sgd", "sgdm", "adam"] = "nesterov"
    """Outer optimizer (DiLoCo: Nesterov)."""
    lr: Annotated[float, Field(gt=0)] = 0.7
    """Outer learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Outer momentum (adam: decay of the first moment)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """adam: decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 0.1
    """adam: added to the root of the second moment (DiLoCo section 3.2 uses 0.1)."""
    weighting: Literal["uniform", "tokens"] = "uniform"
    """Weight of a worker's pseudo-gradient: one each, or its tokens of the round."""
    codec: Literal["none", "fp16", "int8"] = "int8"
    """How values travel in the all-reduce."""


class RoundsConfig(Section):
    start_peers: Annotated[int, Field(ge=1)] = 1
    """Workers the first round waits for; later ones come and go freely."""
    quorum: Annotated[float, Field(ge=0.5, lt=1)] = 0.5
    """A group needs more than this share of the lineage's live workers."""
    deadline: Annotated[float, Field(gt=0)] | Literal["adaptive"] = "adaptive"
    """Seconds after the first arrival at which a round starts without stragglers, or adaptive."""
    failure_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """A peer that sends nothing for so long in an all-reduce counts as dropped."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Times a failed round is tried again before the worker gives up with exit code 75."""


class Contract(Section):
    """What is equal on all peers of a run. Published on the DHT; its digest is part of every rendezvous."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    rounds: RoundsConfig = RoundsConfig()


# --- a peer's own settings -----------------------------------------------------------------------------


class SwarmConfig(Section):
    peers: tuple[str, ...] = ()
    """Addresses of peers to join through; none starts a new swarm."""
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Addresses to listen on. /ip4/0.0.0.0/tcp/PORT makes a peer reachable from other machines."""
    announce_maddrs: tuple[str, ...] = ()
    """Addresses told to others, when they differ from host_maddrs (port forwarding)."""
    identity: str = ""
    """Key file of this peer; made with mode 600 when missing. Default: OUT/identity.key."""
    client_mode: bool = False
    """Only connect outwards: for peers that cannot be reached. They send and fetch but reduce nothing."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds in which the network must be up and the first address must answer."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between progress records."""
    expiry_s: Annotated[float, Field(gt=0)] = 12.0
    """Seconds after which a peer that renews no record counts as gone."""


class ComputeConfig(Section):
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward (autocast); parameters stay fp32."""
    micro_batch_size: Annotated[int, Field(ge=0)] = 0
    """Sequences per forward pass; gradients accumulate up to inner.batch_size. 0: the whole batch."""
    compile: bool = False
    """Use torch.compile."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the trainer; 0 leaves torch's default."""


class CheckpointConfig(Section):
    every_rounds: Annotated[int, Field(ge=0)] = 0
    """Outer rounds between checkpoints; 0 writes none."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept."""


class LogConfig(Section):
    every_steps: Annotated[int, Field(ge=1)] = 10
    """Inner steps between inner_step lines."""
    sinks: tuple[Literal["jsonl"], ...] = ("jsonl",)
    """Where metrics go besides the log."""


class PeerConfig(Section):
    """What belongs to one peer."""

    swarm: SwarmConfig = SwarmConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
