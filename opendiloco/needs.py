"""What a worker of a run needs of its machine, as far as parameters decide it: see docs/design.md, Memory."""

from __future__ import annotations

from dataclasses import dataclass

from opendiloco.codec import get_codec
from opendiloco.config import Contract, PeerConfig
from opendiloco.model import check_model, count_parameters
from opendiloco.tokenizer import load_tokenizer

FP32_BYTES = 4
SHARED, TRAINER, NETWORK, CHECKPOINT = 3.3, 6.0, 1.5, 4.0
"""Multiples of the fp32 size: shared by both processes; parameters, gradients, AdamW's moments, the pseudo-gradient and
a moment's copy; the network process; a checkpoint that is being written."""
JOINER_MOMENTS = 2.0
BASE_BYTES = 1.5 * 2**30
"""Of both processes and libp2p's daemon without any model: PyTorch, transformers, hivemind."""
STATE_ON_DISK = 4.0
"""theta, momentum and AdamW's moments, in a checkpoint."""


@dataclass(frozen=True)
class Needs:
    """Bytes. What batches and activations need comes on top."""

    parameters: int
    trained: int
    """Of them; what travels."""
    host_bytes: int
    device_bytes: int
    """On a GPU, if there is one."""
    disk_bytes: int
    state_bytes: int
    """That a joiner fetches."""
    exchange_bytes: int
    """That one worker sends in a round, and as many that it receives, in a large group."""


def state_vectors(contract: Contract) -> int:
    """How many of the model's size a joiner fetches: theta, momentum, and more where the contract says so."""
    return 2 + (contract.outer.optimizer == "adam") + 2 * (contract.inner.joiner_moments == "donor")


def needs_of(contract: Contract, peer: PeerConfig, *, on_gpu: bool) -> Needs:
    """What a worker of `contract` with these settings needs.

    Raises:
        SettingsError: a model or tokenizer that cannot be had.
    """
    tokenizer = load_tokenizer(contract.data.tokenizer)
    model = check_model(contract.model, vocab_size=tokenizer.vocab_size, seq_len=contract.data.seq_len)
    whole = count_parameters(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size, frozen = FP32_BYTES * trained, FP32_BYTES * (whole - min(whole, trained))
    has_moments = contract.inner.joiner_moments == "donor"
    host = (SHARED + (JOINER_MOMENTS if has_moments else 0) + NETWORK) * size
    host += CHECKPOINT * size if peer.checkpoint.every_rounds else 0
    on_device = TRAINER * size + frozen
    wire = get_codec(contract.outer.codec).wire_bytes(trained)
    disk = (STATE_ON_DISK * size + frozen) * ((peer.checkpoint.keep + 1) if peer.checkpoint.every_rounds else 0)
    return Needs(
        parameters=whole,
        trained=trained,
        host_bytes=int(BASE_BYTES + host + (0 if on_gpu else on_device)),
        device_bytes=int(on_device + (2 * size if on_gpu else 0)),
        disk_bytes=int(disk + peer.swarm.log_rounds * wire + 2 * FP32_BYTES * whole),
        state_bytes=FP32_BYTES * trained * state_vectors(contract),
        exchange_bytes=(1 if peer.swarm.client_mode else 2) * wire,
    )
