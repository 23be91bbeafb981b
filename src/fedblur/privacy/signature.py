"""Signatures and seals of a ledger: what a stranger needs who does not trust whoever keeps the folder.

    signature   Ed25519 (RFC 8032) over length and last hash, by the operator's key. Nobody without the key can rewrite
                the ledger; whoever has it can, and an older ledger with its older signature still fits
    seal        length and last hash in one line of text, for a notary, a mail or a commit. Whoever kept it finds any
                ledger that does not continue the sealed one, an older copy of it too

The keys are PEM files, as `openssl genpkey -algorithm ed25519` writes them. The primitives are those of `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedblur.core.config import canonical
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import read_bytes, read_json_if_there, write_atomically
from fedblur.privacy.ledger import Chain, now
from fedblur.privacy.ledger_file import begins_with

FILE = "ledger.signature.json"  # beside the ledger
_CONTEXT = b"fedblur ledger signature, version 1\n"  # no other message of this key can be taken for a signature here
_SEAL = re.compile(r"fedblur-seal-1:(\d{1,12}):([0-9a-f]{64})")
_MOST_BYTES = 2**16  # of a key
_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


def make_key(path: Path) -> Path:
    """Write a new private key, which only this user may read, and its public key beside it; return that one's path.

    A private key that is there already is never replaced: it gets its public key.
    """
    public = path.with_name(path.name + ".pub")
    if public.exists():
        raise ConfigError(f"{public} exists; choose another name: a key that is overwritten cannot be used again")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    if path.exists():  # a kill came between the two, or openssl made it
        key = _private_key(path)
    else:
        key = Ed25519PrivateKey.generate()
        write_atomically(path, key.private_bytes(pem, pkcs8, serialization.NoEncryption()), private=True)
    write_atomically(public, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return public


def sign(chain: Chain, key: Path) -> Path:
    """Sign a ledger as it is now; return the path of the signature, which lies beside it."""
    private = _private_key(key)
    content = {"lines": len(chain.links), "head": chain.head, "at": now()}
    signature = {
        **content,
        "key": private.public_key().public_bytes(*_RAW).hex(),
        "signature": base64.b64encode(private.sign(_message(content))).decode(),
    }
    path = chain.path.with_name(FILE)
    write_atomically(path, (json.dumps(signature, indent=2) + "\n").encode())
    return path


def check_signature(chain: Chain, key: Path) -> list[str]:
    """Return what is wrong with a ledger's signature by this public key; nothing for one that holds."""
    public = _public_key(key)
    stored = read_json_if_there(chain.path.with_name(FILE), "sign the ledger again")
    if stored is None:
        return [f"the ledger is not signed: {chain.path.with_name(FILE)} is missing"]
    content = {name: stored.get(name) for name in ("lines", "head", "at")}
    if stored.get("key") != public.public_bytes(*_RAW).hex():
        return [f"the ledger is signed by another key than {key}"]
    try:
        public.verify(base64.b64decode(str(stored.get("signature")), validate=True), _message(content))
    except (InvalidSignature, binascii.Error, ValueError):
        return ["the ledger's signature is not by this key: it was forged or damaged"]
    lines: Any = content["lines"]
    head = content["head"]
    if not begins_with(chain, lines, head):
        return [_another(lines, head, "signed")]
    if lines < len(chain.links):
        return [f"{len(chain.links) - lines} lines were added after the ledger was signed; sign it again"]
    return []


def seal(chain: Chain) -> str:
    """Return one line that stands for the ledger as it is now. It tells nothing about anyone."""
    return f"fedblur-seal-1:{len(chain.links)}:{chain.head}"


def check_seal(chain: Chain, text: str) -> list[str]:
    """Return what is wrong with a ledger that was sealed; nothing where it is that one, or continues an open one."""
    found = _SEAL.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"seal={text.strip()[:80]!r} is not one; fedblur ledger seal RUN prints fedblur-seal-1:…")
    lines, head = int(found[1]), found[2]
    if not begins_with(chain, lines, head):
        return [_another(lines, head, "sealed")]
    if chain.links[lines - 1].body.get("kind") == "close" and lines < len(chain.links):
        return [f"the ledger was closed when it was sealed, and {len(chain.links) - lines} lines were added since"]
    return []


def _another(lines: Any, head: Any, what: str) -> str:
    return f"the ledger is not the one that was {what} ({lines} lines, {str(head)[:12]}…): it was cut or rewritten"


def _message(content: dict[str, Any]) -> bytes:
    return _CONTEXT + canonical(content).encode()


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(_pem(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key: {_reason(error)}; make one with fedblur ledger key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is a key of another kind; make an Ed25519 key with fedblur ledger key")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(_pem(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a public key: {_reason(error)}; give the .pub file") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is a key of another kind; give an Ed25519 public key")
    return key


def _pem(path: Path) -> bytes:
    try:
        return read_bytes(path, _MOST_BYTES, "give a PEM file")
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; give the path of a key in PEM") from None


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or ["it cannot be read"])[0].rstrip(".")
