"""What is wrong with a run's text, model, tokenizer, optimizer or device, found before the network is joined."""

from __future__ import annotations

from opendiloco.compute import choose_device
from opendiloco.config import ComputeConfig, Contract, DataConfig, ModelConfig
from opendiloco.mixture import check_sources, split_sources
from opendiloco.optimizers import check_inner_optimizer
from opendiloco.presets import PRESETS
from opendiloco.text import check_text
from opendiloco.tokenizer import load_tokenizer


def check_replica(contract: Contract, compute: ComputeConfig) -> None:
    """Find out what a worker would say later, without reading any weights; costs nothing for an ordinary preset.

    Raises:
        SettingsError: no such device, model or tokenizer; a vocabulary or context that is too small; weights, patterns
            or layers that do not fit; an optimizer that does not work here.
    """
    check_inner_optimizer(contract.inner, choose_device(compute))
    tokenizer = load_tokenizer(contract.data.tokenizer)
    model = contract.model
    if model.name in PRESETS and model == ModelConfig(name=model.name):
        return
    from opendiloco.model import check_model  # seconds of importing

    check_model(model, vocab_size=tokenizer.vocab_size, seq_len=contract.data.seq_len)


def check_texts(data: DataConfig) -> None:
    """Find out what the beginning of each source shows; first, without reading anything, whether all are there.

    Raises:
        SettingsError: no such source, no text in it or none in data.text_field, too little of it, a broken file.
    """
    check_sources(data)
    for source in split_sources(data)[0]:
        if check_text(source):
            from opendiloco.tokens import check_length  # seconds of importing

            check_length(source, load_tokenizer(data.tokenizer))
