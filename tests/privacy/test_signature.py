"""Signatures and seals of a ledger."""

import json
import subprocess
from pathlib import Path

import pytest

from fedblur.core.errors import FedBlurError
from fedblur.privacy.events import Gaussian, PoissonSampled
from fedblur.privacy.ledger import Budget, Chain, Ledger
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.signature import FILE, check_seal, check_signature, make_key, seal, sign

EVENT = PoissonSampled(0.1, Gaussian(2.0))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    made = Ledger(tmp_path / "ledger.jsonl", Budget(float("inf"), 1e-3, "pld", 10), randomness="operating system")
    for round_ in (1, 2, 3):
        made.spend(round_, EVENT, replay=False)
    return made.path


def chain(path: Path) -> Chain:
    return open_ledger(path)


def test_signature__holds_for_the_ledger_that_was_signed(ledger: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "operator")
    assert (tmp_path / "operator").stat().st_mode & 0o077 == 0
    sign(chain(ledger), tmp_path / "operator")
    assert check_signature(chain(ledger), public) == []
    with pytest.raises(FedBlurError, match="a key that is overwritten cannot be used again"):
        make_key(tmp_path / "operator")


def test_key__that_lost_its_public_half_gets_it_again_and_is_never_replaced(tmp_path: Path) -> None:
    """A kill may come between the two files."""
    public = make_key(tmp_path / "operator")
    both = {path: path.read_bytes() for path in (tmp_path / "operator", public)}
    public.unlink()
    make_key(tmp_path / "operator")
    assert {path: path.read_bytes() for path in both} == both
    (tmp_path / "operator").unlink()
    with pytest.raises(FedBlurError, match=r"operator\.pub exists"):
        make_key(tmp_path / "operator")


def test_signature__a_changed_byte_of_it_is_found(ledger: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "operator")
    path = sign(chain(ledger), tmp_path / "operator")
    whole = json.loads(path.read_text())
    changes = {"lines": 3, "at": "2026-01-01T00:00:00+00:00", "head": "0" * 64, "signature": "AAAA", "key": "00"}
    for name, value in changes.items():
        path.write_text(json.dumps(whole | {name: value}))
        assert check_signature(chain(ledger), public), name
    path.write_text(json.dumps(whole))
    other = make_key(tmp_path / "other")
    assert "another key" in check_signature(chain(ledger), other)[0]
    path.unlink()
    assert "is not signed" in check_signature(chain(ledger), public)[0]


def test_signature__of_fewer_lines_says_that_more_were_added(ledger: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "operator")
    sign(chain(ledger), tmp_path / "operator")
    Ledger(ledger, Budget(float("inf"), 1e-3, "pld", 10)).spend(4, EVENT, replay=False)
    assert check_signature(chain(ledger), public) == ["1 lines were added after the ledger was signed; sign it again"]


def test_signature__takes_keys_that_openssl_makes_and_refuses_others(ledger: Path, tmp_path: Path) -> None:
    key, public, wrong = (tmp_path / name for name in ("key.pem", "key.pub", "rsa.pem"))
    commands = (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)],
        ["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(public)],
        ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(wrong)],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not here")
    sign(chain(ledger), key)
    assert check_signature(chain(ledger), public) == []
    for file, words in ((wrong, "of another kind"), (public, "not a private key"), (tmp_path / "x", "does not exist")):
        with pytest.raises(FedBlurError, match=words):
            sign(chain(ledger), file)
    with pytest.raises(FedBlurError, match="not a public key"):
        check_signature(chain(ledger), key)


def test_seal__finds_what_was_cut_and_allows_an_open_ledger_to_continue(ledger: Path) -> None:
    text = seal(chain(ledger))
    assert check_seal(chain(ledger), f"{text}\n") == []
    Ledger(ledger, Budget(float("inf"), 1e-3, "pld", 10)).spend(4, EVENT, replay=False)
    assert check_seal(chain(ledger), text) == []
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:3]))
    assert "was cut or rewritten" in check_seal(chain(ledger), text)[0]
    for wrong in ("", "fedblur-seal-1:4:12", "4:" + "0" * 64):
        with pytest.raises(FedBlurError, match="is not one"):
            check_seal(chain(ledger), wrong)
    assert not ledger.with_name(FILE).exists()
