"""Keys: libp2p's formats and peer ids, a file nobody else can read, one process per key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.errors import SettingsError
from opendiloco.identity import MAX_KEY_BYTES, Identity, encode_public_key, peer_id_of, verify

# A key of https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md (test vectors): seed, public key.
SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
# Primes of an RSA key with 2048 bits.
P = int(
    "fd27591e812094a025a44492b8ef77857e1ffd9f891139183d8afd29bfa301cdf5e136ca2ad445cf467c2b351acff3bf"
    "3f98faf2085b43882334b0ffa2e47c030d2ee96be50bb1a637fc1b367bbe402be952e5ab2b148e2fbb3d8104c89b5c21"
    "3b0d509a250da2c31205917858a5cfb4eee73fd94beab1138e541fa425dfbc91",
    16,
)
Q = int(
    "e80f280b1dcdcfe9473671c237d7769b41b203fb6895dbbf53de7c4f5472214b914bd3f724b3b18bbc23c7f322dc5d8e"
    "cb4fa6a851dd5b00aeaaef8795efc77fe784129b9a168017c579e9798d3d7a04c3ff8a01bcc0116d16a2257f389a3113"
    "e81d46092626fd7977632e21d89f5ead51fcee5d19cea393223c252de24ede0d",
    16,
)
KIND_RSA, KIND_ED25519, KIND_SECP256K1, KIND_ECDSA = 0, 1, 2, 3
DER = serialization.Encoding.DER
PKCS1, PKCS8 = serialization.PrivateFormat.TraditionalOpenSSL, serialization.PrivateFormat.PKCS8
# SubjectPublicKeyInfo and PKCS #8 of an algorithm (1.2.3.4) and of a curve that nobody has.
UNKNOWN_PUBLIC = bytes.fromhex(f"302a300506032a0304032100{'11' * 32}")
UNKNOWN_CURVE = bytes.fromhex(f"3054300e06072a8648ce3d020106032a030403420004{'11' * 64}")
UNKNOWN_PRIVATE = bytes.fromhex(f"302e020100300506032a030404220420{'11' * 32}")


def protobuf(kind: int, data: bytes) -> bytes:
    """A key as libp2p stores it, by its own protobuf."""
    encoded: bytes = crypto_pb2.PrivateKey(key_type=kind, data=data).SerializeToString()
    return encoded


def rsa_key() -> rsa.RSAPrivateKey:
    d = rsa.rsa_recover_private_exponent(65537, P, Q)
    dmp1, dmq1, iqmp = rsa.rsa_crt_dmp1(d, P), rsa.rsa_crt_dmq1(d, Q), rsa.rsa_crt_iqmp(P, Q)
    return rsa.RSAPrivateNumbers(P, Q, d, dmp1, dmq1, iqmp, rsa.RSAPublicNumbers(65537, P * Q)).private_key()


def key_file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "identity.key"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def plain(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(DER, form, serialization.NoEncryption())


ED25519_FILE = protobuf(KIND_ED25519, SEED + PUBLIC)
RSA_FILE = protobuf(KIND_RSA, plain(rsa_key(), PKCS1))


# --- formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [SEED + PUBLIC, SEED + PUBLIC + PUBLIC], ids=["64 bytes", "96 bytes"])
def test_an_ed25519_key_of_libp2p_gives_its_peer_id(tmp_path: Path, body: bytes) -> None:
    identity = Identity.load_or_create(key_file(tmp_path, protobuf(KIND_ED25519, body)))
    assert identity.public_key == bytes.fromhex("08011220") + PUBLIC
    assert PeerID.from_base58(identity.peer_id).to_bytes() == bytes.fromhex("002408011220") + PUBLIC
    assert str(PeerID.from_base58(identity.peer_id)) == identity.peer_id
    assert identity.peer_id.startswith("12D3KooW")


@pytest.mark.parametrize("form", [PKCS1, PKCS8])
def test_an_rsa_key_has_the_peer_id_that_hivemind_gives_it(tmp_path: Path, form: serialization.PrivateFormat) -> None:
    data = protobuf(KIND_RSA, plain(rsa_key(), form))
    identity = Identity.load_or_create(key_file(tmp_path, data))
    assert identity.peer_id == str(PeerID.from_identity(data))
    assert identity.peer_id.startswith("Qm")


@pytest.mark.parametrize("key", [ed25519.Ed25519PrivateKey.from_private_bytes(SEED), rsa_key()], ids=["Ed25519", "RSA"])
def test_public_keys_are_libp2ps_protobuf(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> None:
    parsed = crypto_pb2.PublicKey.FromString(encode_public_key(key.public_key()))
    if isinstance(key, rsa.RSAPrivateKey):
        expected = key.public_key().public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        assert (parsed.key_type, parsed.data) == (KIND_RSA, expected)
    else:
        assert (parsed.key_type, parsed.data) == (KIND_ED25519, PUBLIC)


# --- the file ------------------------------------------------------------------------------------------


def test_a_missing_key_is_made_with_mode_600_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "identity.key"
    identity = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["identity.key"]
    parsed = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    assert (parsed.key_type, len(parsed.data)) == (KIND_ED25519, 64)
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert Identity.load_or_create(tmp_path / "other.key").peer_id != identity.peer_id


def test_processes_that_start_together_make_one_key(tmp_path: Path) -> None:
    script = "import sys, pathlib; from opendiloco.identity import Identity\nsys.stdin.read(1)\n"
    script += "print(Identity.load_or_create(pathlib.Path(sys.argv[1])).peer_id)"
    command = [sys.executable, "-c", script, str(tmp_path / "identity.key")]
    pipe = subprocess.PIPE
    starting = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    peer_ids = {process.communicate("x")[0] for process in starting}
    assert len(peer_ids) == 1
    assert peer_ids != {""}
    assert os.listdir(tmp_path) == ["identity.key"]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o610, 0o666])
def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, ED25519_FILE, mode)
    with pytest.raises(SettingsError, match=rf"{path} has mode {mode:o}.*chmod 600"):
        Identity.load_or_create(path)


def test_a_read_only_key_will_do(tmp_path: Path) -> None:
    Identity.load_or_create(key_file(tmp_path, ED25519_FILE, 0o400))


EC_KEY = ec.derive_private_key(7, ec.SECP256K1())
ENCRYPTED = rsa_key().private_bytes(DER, PKCS8, serialization.BestAvailableEncryption(b"secret"))
NO_KEYS = {
    "empty": b"",
    "text": b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
    "zeros": bytes(100),
    "a public key": protobuf(KIND_ED25519, PUBLIC),
    "cut": ED25519_FILE[:-1],
    "another public half": protobuf(KIND_ED25519, SEED + PUBLIC[:-1] + bytes([PUBLIC[-1] ^ 1])),
    "too long": ED25519_FILE + b"\0",
    "Ed25519 called RSA": protobuf(KIND_RSA, SEED + PUBLIC),
    "RSA called Ed25519": protobuf(KIND_ED25519, plain(rsa_key(), PKCS1)),
    "another kind": protobuf(KIND_SECP256K1, plain(EC_KEY, PKCS8)),
    "ECDSA": protobuf(KIND_ECDSA, plain(EC_KEY, PKCS8)),
    "EC called RSA": protobuf(KIND_RSA, plain(EC_KEY, PKCS8)),
    "encrypted": protobuf(KIND_RSA, ENCRYPTED),
    "unknown algorithm": protobuf(KIND_RSA, UNKNOWN_PRIVATE),
}


@pytest.mark.parametrize("data", NO_KEYS.values(), ids=NO_KEYS.keys())
def test_a_file_that_is_no_key_is_one_line(tmp_path: Path, data: bytes) -> None:
    path = key_file(tmp_path, data)
    with pytest.raises(SettingsError, match=rf"{path} is not an Ed25519 or RSA key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


@given(st.binary(max_size=200))
def test_no_bytes_in_a_key_file_cause_another_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "keys"
    folder.mkdir(exist_ok=True)
    with pytest.raises(SettingsError):
        Identity.load_or_create(key_file(folder, data))


def test_a_place_where_no_key_can_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "identity.key"):
        with pytest.raises(SettingsError, match=f"swarm.identity {path}: .*: name a file"):
            Identity.load_or_create(path)


# --- signatures ----------------------------------------------------------------------------------------


@pytest.fixture(params=[ED25519_FILE, RSA_FILE], ids=["Ed25519", "RSA"])
def identity(request: pytest.FixtureRequest, tmp_path: Path) -> Identity:
    return Identity.load_or_create(key_file(tmp_path, request.param))


def test_a_signature_holds_for_its_message_and_key_alone(identity: Identity) -> None:
    signature = identity.sign(b"message")
    other = encode_public_key(ed25519.Ed25519PrivateKey.generate().public_key())
    assert verify(identity.public_key, b"message", signature)
    assert not verify(identity.public_key, b"messagf", signature)
    assert not verify(identity.public_key, b"", signature)
    assert not verify(other, b"message", signature)
    for index in (0, len(signature) // 2, len(signature) - 1):
        flipped = bytes(byte ^ (place == index) for place, byte in enumerate(signature))
        assert not verify(identity.public_key, b"message", flipped)
    assert not verify(identity.public_key, b"message", signature[:-1])
    assert not verify(identity.public_key, b"message", b"")


INFO = serialization.PublicFormat.SubjectPublicKeyInfo
NO_PUBLIC_KEYS = {
    "empty": b"",
    "zeros": bytes(36),
    "cut": protobuf(KIND_ED25519, PUBLIC[:-1]),
    "another kind": protobuf(KIND_SECP256K1, PUBLIC),
    "Ed25519 called RSA": protobuf(KIND_RSA, PUBLIC),
    "EC called RSA": protobuf(KIND_RSA, EC_KEY.public_key().public_bytes(DER, INFO)),
    "unknown algorithm": protobuf(KIND_RSA, UNKNOWN_PUBLIC),
    "unknown curve": protobuf(KIND_RSA, UNKNOWN_CURVE),
    "too long": protobuf(KIND_ED25519, PUBLIC + bytes(MAX_KEY_BYTES)),
}


@pytest.mark.parametrize("public_key", NO_PUBLIC_KEYS.values(), ids=NO_PUBLIC_KEYS.keys())
def test_a_strangers_key_that_is_none_verifies_nothing(public_key: bytes) -> None:
    assert not verify(public_key, b"message", bytes(64))


@given(st.binary(max_size=120), st.binary(max_size=80), st.sampled_from([b"", b"\x08\x00\x12", b"\x08\x01\x12\x20"]))
def test_no_bytes_of_a_stranger_raise(public_key: bytes, signature: bytes, start: bytes) -> None:
    assert not verify(start + public_key, b"message", signature)
    assert isinstance(peer_id_of(start + public_key), str)


# --- one process per key -------------------------------------------------------------------------------

HOLDER = """
import pathlib, sys
from opendiloco.identity import Identity
descriptor = Identity.load_or_create(pathlib.Path(sys.argv[1])).claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_key_that_no_file_keeps_is_known_to_processes_below_and_differs_each_time() -> None:
    first, second = Identity.temporary(), Identity.temporary()
    assert first.peer_id != second.peer_id
    reader = "import pathlib, sys; from opendiloco.identity import Identity as I; path = pathlib.Path(sys.argv[1]); "
    command = [sys.executable, "-c", reader + "print(I.load_or_create(path).peer_id)", str(first.path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{first.peer_id}\n"
    os.close(first.claim(wait_s=0.0))


def test_a_key_in_use_by_another_process_is_refused_until_that_process_ends(tmp_path: Path) -> None:
    identity = Identity.load_or_create(key_file(tmp_path, ED25519_FILE))
    command = [sys.executable, "-c", HOLDER, str(identity.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(SettingsError, match=rf"{identity.path} is in use by another process.*key file"):
            identity.claim(wait_s=0.0)
        holder.kill()
    os.close(identity.claim())


def test_a_claim_waits_for_a_predecessor_that_is_just_going(tmp_path: Path) -> None:
    identity = Identity.load_or_create(key_file(tmp_path, ED25519_FILE))
    command = [sys.executable, "-c", HOLDER, str(identity.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "claimed\n"
        holder.stdin.close()  # it ends some time after this
        os.close(identity.claim(wait_s=30.0))


def test_the_lock_is_held_as_long_as_a_copy_of_its_descriptor_is_open(tmp_path: Path) -> None:
    """The guard inherits one and keeps the key until it has cleaned up."""
    identity = Identity.load_or_create(key_file(tmp_path, ED25519_FILE))
    descriptor = identity.claim()
    copy = os.dup(descriptor)
    os.close(descriptor)
    with pytest.raises(SettingsError, match="in use"):
        identity.claim(wait_s=0.0)
    os.close(copy)
    os.close(identity.claim(wait_s=0.0))
