"""No secure sum combines sites of two submissions of one job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hospital_jobs import FEDNER, corpus
from hospitals import Hospitals, Network

from fednotes.core.errors import ConfigError

SECURE = FEDNER.replace("[federation]", "[federation]\nsecure_sum = true")


class Signer:
    """Signs as one site, and checks the signatures of all, as kits do."""

    def __init__(self, site: str, keys: dict[str, Ed25519PrivateKey]) -> None:
        self.site = site
        self.keys = keys

    def sign(self, text: bytes) -> bytes:
        return self.keys[self.site].sign(text)

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        try:
            self.keys[site].public_key().verify(signature, text)
        except InvalidSignature:
            return False
        return True


@pytest.mark.parametrize(
    "other_run", [pytest.param("", marks=pytest.mark.slow), "run2"]
)
def test_sites_of_two_submissions_exchange_no_keys(
    tmp_path: Path, other_run: str
) -> None:
    """In the difference of two sums that share all sites but one, a server would see
    what this one sent. All keys are genuine, but those of another submission are
    signed for it alone."""
    notes = corpus(tmp_path / "notes")
    hospitals = Hospitals(tmp_path, SECURE, notes)
    keys = {site: Ed25519PrivateKey.generate() for site in notes}
    for site in notes:
        setup = hospitals.setups[site]
        if other_run and site == "posts":
            setup = hospitals._setup(site, other_run)
        hospitals.setups[site] = replace(setup, identity=Signer(site, keys))
    hospitals.network = Network(hospitals.setups)
    if other_run:
        with pytest.raises(ConfigError, match="keys of 2 of 3 sites"):
            hospitals.run()
    else:
        hospitals.run()
        assert len(hospitals.ends()) == len(notes)
