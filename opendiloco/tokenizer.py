"""Tokenizers: raw bytes, or any Hugging Face tokenizer with an end-of-text token."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.errors import SettingsError
from opendiloco.hub import tell_of_hub

Tokens = NDArray[np.integer[Any]]
"""Token ids, flat: 2 bytes each where the vocabulary allows, else 4."""

_MARKER = "opendiloco.json"
_BATCH_DOCUMENTS = 256


class Tokenizer(Protocol):
    """What turns text into token ids and back."""

    @property
    def name(self) -> str:
        """Value of data.tokenizer that gives this tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: all are below it."""

    @property
    def end_id(self) -> int:
        """Id that ends a document. No text encodes to it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end of the document."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; ends of documents are left out, broken characters become U+FFFD."""

    def encode_documents(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one flat array, each document followed by `end_id`."""

    def save(self, folder: Path) -> None:
        """Write what `load_saved_tokenizer` and AutoTokenizer need into a model's folder."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 as the end of a document."""

    name = "bytes"
    vocab_size = 257
    end_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def encode_documents(self, documents: Sequence[str]) -> Tokens:
        encoded = [document.encode("utf-8", "replace") for document in documents]
        ids = np.empty(sum(map(len, encoded)) + len(encoded), np.uint16)
        start = 0
        for document in encoded:
            end = start + len(document)
            ids[start:end] = np.frombuffer(document, np.uint8)
            ids[end] = self.end_id
            start = end + 1
        return ids

    def save(self, folder: Path) -> None:
        _byte_level_tokenizer().save_pretrained(folder)
        (folder / _MARKER).write_text(json.dumps({"tokenizer": self.name}) + "\n")


class HuggingFaceTokenizer:
    """Any Hugging Face tokenizer; its end-of-text token separates documents.

    Raises:
        SettingsError: the tokenizer has no end-of-text token.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise SettingsError(
                f"data.tokenizer is {name}, which has no end-of-text token to separate documents: set "
                "eos_token in its tokenizer_config.json, or use another tokenizer"
            )
        self.name = name
        self.end_id = int(tokenizer.eos_token_id)
        self.vocab_size = 1 + max(len(tokenizer) - 1, *tokenizer.get_vocab().values())
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([i for i in ids if i != self.end_id])
        return text

    def encode_documents(self, documents: Sequence[str]) -> Tokens:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32
        parts = [np.empty(0, dtype)]
        for start in range(0, len(documents), _BATCH_DOCUMENTS):
            for ids in self._encode_batch(documents[start : start + _BATCH_DOCUMENTS]):
                parts.append(np.array([*ids, self.end_id], dtype))
        return np.concatenate(parts)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # A text that spells a special token ("</s>") must not turn into one: documents would end in mid-text.
        ids: list[list[int]] = self._tokenizer(
            [text.encode("utf-8", "replace").decode() for text in texts],
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return ids


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that data.tokenizer names: `bytes`, or the folder or hub name of a Hugging Face one.

    Raises:
        SettingsError: there is no such tokenizer, or it has no end-of-text token.
    """
    if name == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer  # slow to import, and not needed for bytes

    place = Path(name).expanduser()
    if not place.is_dir() and (place.is_absolute() or name.startswith((".", "~"))):
        raise SettingsError(f"data.tokenizer is {name}, but there is no such folder: correct it or use bytes")
    if not place.is_dir():
        tell_of_hub(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(place) if place.is_dir() else name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        logging.getLogger(__name__).debug("loading tokenizer %s", name, exc_info=True)
        where = "holds no tokenizer" if place.is_dir() else "is no folder here and was not found on the hub"
        raise SettingsError(
            f"data.tokenizer is {name}, which {where}: name a folder with a tokenizer.json, or use bytes"
        ) from error
    return HuggingFaceTokenizer(name, tokenizer)


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that was saved beside a model.

    Raises:
        SettingsError: the folder holds none.
    """
    marker = folder / _MARKER
    name = json.loads(marker.read_text())["tokenizer"] if marker.is_file() else str(folder)
    return load_tokenizer(name)


def _byte_level_tokenizer() -> Any:
    """ByteTokenizer as a Hugging Face tokenizer with the same ids, for those who read the folder elsewhere."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's printable stand-ins for bytes
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown}
    vocabulary |= {chr(256 + position): byte for position, byte in enumerate(hidden)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|end|>"
    tokenizer.add_special_tokens([end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False)
