"""Masks of a secure sum (Bonawitz et al. 2017): vectors modulo 2^b that follow from a secret. No torch in here.

    client u sends   x_u + PRG(b_u) + Σ_{v above u} PRG(s_uv) − Σ_{v below u} PRG(s_uv)   modulo 2^b

b_u is u's own secret, s_uv the one that u and v agree on. In a sum over all clients the pairs cancel. Primitives are
those of `cryptography` (AES-256 in counter mode, HKDF) and of Flower (key agreement on P-384, sealing, Shamir shares).
Flower's own mask generator is not used: it folds a seed into 32 bits, feeds them to a Mersenne Twister, and never draws
the largest residue, so its masks can be searched for and are not uniform (docs/decisions/0070-own-masks.md).
"""

from __future__ import annotations

import hashlib

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from numpy.typing import NDArray

Residues = NDArray[np.uint32]  # modulo 2^b; sums wrap modulo 2^32, which 2^b divides


def threshold(members: int) -> int:
    """Return how many members open a secret: more than two thirds, so that no two disjoint groups can."""
    return 2 * members // 3 + 1


def session(run: int, round_: int) -> bytes:
    """Return what every secret of a round is bound to."""
    return f"fedblur secure sum 1/{run}/{round_}".encode()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret of two key pairs."""
    return generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))


def stream(secret: bytes, label: bytes, bits: int, count: int) -> Residues:
    """Draw `count` residues, uniform modulo 2^b; without the secret they cannot be told from random."""
    key = HKDF(SHA256(), length=32, salt=None, info=label).derive(secret)
    size = 2 if bits <= 16 else 4
    data = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(size * count))  # the key is used once
    return np.frombuffer(data, dtype=f"<u{size}").astype(np.uint32) & np.uint32(2**bits - 1)


def own_mask(seed: bytes, here: bytes, number: int, bits: int, count: int) -> Residues:
    """Return PRG(b_u) of the member with this number."""
    return stream(seed, here + f"/own/{number}".encode(), bits, count)


def pair_mask(secret: bytes, here: bytes, number: int, other: int, bits: int, count: int) -> Residues:
    """Return what `number` adds for its pair with `other`: the other one adds the negative."""
    low, high = sorted((number, other))
    mask = stream(secret, here + f"/pair/{low}/{high}".encode(), bits, count)
    return mask if number == low else np.negative(mask)


def commitment(seed: bytes, here: bytes) -> bytes:
    """Bind a member to its seed of 32 random bytes, so that a seed recovered from bad shares is noticed."""
    return hashlib.sha256(here + b"/seed/" + seed).digest()


def reduce(values: Residues, bits: int) -> Residues:
    """Reduce modulo 2^b."""
    return values & np.uint32(2**bits - 1)


def pack(values: Residues, bits: int) -> bytes:
    """Pack residues into as few whole bytes as 2^b needs."""
    width = -(-bits // 8)
    return np.ascontiguousarray(values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width]).tobytes()


def unpack(data: bytes, bits: int) -> Residues:
    """Undo `pack`, for any bytes of the right length."""
    width = -(-bits // 8)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    full = np.zeros((len(rows), 4), dtype=np.uint8)
    full[:, :width] = rows
    return reduce(full.view("<u4").ravel().astype(np.uint32), bits)
