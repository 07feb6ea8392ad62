"""A class that no site lets a job name: it leaves a mark if it is so much as imported."""

from __future__ import annotations

import os
from pathlib import Path

Path(os.environ["FEDNOTES_TEST_MARK"]).touch()


class Foreign:
    pass
