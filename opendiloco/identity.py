"""A peer's key: the file, its libp2p peer id, signatures, and one process per key.

libp2p's formats: keys are a protobuf of (type, data); a peer id is a multihash of the public key's protobuf, for
Ed25519 the key itself (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import weakref
from pathlib import Path

import base58
from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa

from opendiloco.errors import SettingsError

PrivateKey = ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
PublicKey = ed25519.Ed25519PublicKey | rsa.RSAPublicKey

MAX_KEY_BYTES = 4096  # of an encoded public key: room for RSA with 16,384 bits
_RSA, _ED25519 = 0, 1


class Identity:
    """A private key and the peer id that belongs to it."""

    def __init__(self, private_key: PrivateKey, path: Path | None = None) -> None:
        self.path = path
        self.public_key = encode_public_key(private_key.public_key())
        self.peer_id = peer_id_of(self.public_key)
        self._private_key = private_key

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, or make a new Ed25519 one with mode 600.

        Raises:
            SettingsError: the file is no libp2p private key, others may read it, or it cannot be made.
        """
        try:
            if not path.exists():
                _write_new_key(path)
            mode = path.stat().st_mode & 0o777
            data = path.read_bytes()
        except OSError as error:
            raise SettingsError(f"swarm.identity {path}: {error.strerror}: name a file this user can write") from None
        if mode & 0o077:
            raise SettingsError(f"swarm.identity {path} has mode {mode:o}: others can read the key, run chmod 600")
        return cls(_decode_private_key(data, path), path)

    @classmethod
    def choose(cls, file: str, folder: Path | None) -> Identity:
        """The key of `file`, where one is named, else that of a peer's folder, else a temporary one."""
        if file:
            return cls.load_or_create(Path(file))
        return cls.load_or_create(folder / "identity.key") if folder is not None else cls.temporary()

    @classmethod
    def temporary(cls) -> Identity:
        """A new key that no file keeps. While this object lives, this process and those below read it at `path`."""
        descriptor = os.memfd_create("identity", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, _new_key())
        identity = cls.load_or_create(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
        weakref.finalize(identity, os.close, descriptor)
        return identity

    def claim(self, *, wait_s: float = 5.0) -> int:
        """Lock the key file; returns the descriptor that holds the lock, for as long as it is open anywhere.

        A predecessor that was killed keeps the lock until its guard has cleaned up, so this waits a little.

        Raises:
            SettingsError: another process of this machine still holds it after `wait_s` seconds.
        """
        assert self.path is not None, "an identity without a file cannot be claimed"
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(descriptor)
                    raise SettingsError(
                        f"swarm.identity {self.path} is in use by another process: "
                        f"give each peer a folder (--out) or key file of its own"
                    ) from None
            time.sleep(0.1)

    def sign(self, message: bytes) -> bytes:
        """Signature of `message`: Ed25519, or RSA PKCS#1 v1.5 with SHA-256."""
        if isinstance(self._private_key, ed25519.Ed25519PrivateKey):
            return self._private_key.sign(message)
        return self._private_key.sign(message, padding.PKCS1v15(), hashes.SHA256())


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` over `message` is by the owner of the encoded `public_key`."""
    try:
        key = _decode_public_key(public_key)
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def encode_public_key(key: PublicKey) -> bytes:
    """libp2p's protobuf of a public key."""
    if isinstance(key, ed25519.Ed25519PublicKey):
        raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return _pack(_ED25519, raw)
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    return _pack(_RSA, key.public_bytes(serialization.Encoding.DER, info))


def peer_id_of(public_key: bytes) -> str:
    """Base58 peer id of an encoded public key: the key itself when short (Ed25519), else its SHA-256."""
    if len(public_key) <= 42:
        multihash = bytes([0x00, len(public_key)]) + public_key
    else:
        multihash = b"\x12\x20" + hashlib.sha256(public_key).digest()
    return base58.b58encode(multihash).decode()


def peer_seed(peer_id: str, *, round: int = 0) -> int:
    """A seed of this peer's own, below 2**32, where it enters a run at `round`.

    Other peers have others. A peer that starts again in the same round has the same one: what it did before counted
    nowhere. In a later round it has another, so that it does not begin the order again that it has trained on.
    """
    return int.from_bytes(blake3(f"{peer_id} {round}".encode()).digest(4), "little")


def _new_key() -> bytes:
    key = ed25519.Ed25519PrivateKey.generate()
    raw = serialization.Encoding.Raw
    seed = key.private_bytes(raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    return _pack(_ED25519, seed + key.public_key().public_bytes(raw, serialization.PublicFormat.Raw))


def _write_new_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_new_key())
        with contextlib.suppress(FileExistsError):  # another process was first: its key counts
            os.link(beside, path)
    finally:
        beside.unlink()


def _decode_private_key(data: bytes, path: Path) -> PrivateKey:
    try:
        kind, body = _unpack(data)
        if kind == _ED25519 and len(body) in (64, 96):
            key = ed25519.Ed25519PrivateKey.from_private_bytes(body[:32])
            if body[32:64] == key.public_key().public_bytes_raw():  # libp2p takes this half as it stands
                return key
        if kind == _RSA:
            loaded = serialization.load_der_private_key(body, password=None)
            if isinstance(loaded, rsa.RSAPrivateKey):
                return loaded
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: encrypted
        pass
    raise SettingsError(f"swarm.identity {path} is not an Ed25519 or RSA key of libp2p: name another file")


def _decode_public_key(data: bytes) -> PublicKey:
    if len(data) > MAX_KEY_BYTES:
        raise ValueError("public key too long")
    kind, body = _unpack(data)
    if kind == _ED25519:
        return ed25519.Ed25519PublicKey.from_public_bytes(body)
    if kind == _RSA:
        key = serialization.load_der_public_key(body)
        if isinstance(key, rsa.RSAPublicKey):
            return key
    raise ValueError("unknown kind of key")


def _pack(kind: int, body: bytes) -> bytes:
    """Protobuf message {1: kind (varint), 2: body (bytes)}."""
    length, size = b"", len(body)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([0x08, kind, 0x12]) + length + bytes([size]) + body


def _unpack(data: bytes) -> tuple[int, bytes]:
    if len(data) < 4 or data[0] != 0x08 or data[2] != 0x12:
        raise ValueError("not a key of libp2p")
    size = shift = 0
    for index in range(3, min(8, len(data))):
        size |= (data[index] & 0x7F) << shift
        shift += 7
        if not data[index] & 0x80:
            body = data[index + 1 :]
            if len(body) != size:
                raise ValueError("key of a wrong length")
            return data[1], body
    raise ValueError("not a key of libp2p")
