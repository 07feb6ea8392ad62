"""Estimate locally what an attacker could recover from a job's updates.

Nothing leaves the machine. The first rounds of the job run in this process with their
real settings (mini-batches, local steps, frozen layers, secure sum, noise), and each
attack gets what an honest-but-curious server sees. As a control, each attack is also
tried on the same notes without any defence: if the control fails, the attack proves
nothing. No result contains a word of any note.

    attack.py       attacks, the measure of their success, and their registration
    scene.py        the target of an attack: a job, its sites, the audited site
    listening.py    the server's observations, and what the sites' models trained on
    attacks/        the attacks, one family per file
    shadow/         models trained only at the audited site, as targets of attacks
    commands.py     the command
    target.py       the job that the command line names
    run.py          all attacks on one job

Other packages add attacks with the entry point group `fednotes.attacks`
(`core/plugins.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednotes.apps.audit.attack import Attack, NotApplicable, Trial, load_attacks
    from fednotes.apps.audit.run import run_audit
    from fednotes.apps.audit.scene import Scene
    from fednotes.apps.audit.target import Target, open_target

__all__ = [
    "Attack",
    "NotApplicable",
    "Scene",
    "Target",
    "Trial",
    "load_attacks",
    "open_target",
    "run_audit",
]
_PLACES = {
    "attack": ("Attack", "NotApplicable", "Trial", "load_attacks"),
    "run": ("run_audit",),
    "scene": ("Scene",),
    "target": ("Target", "open_target"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use; the help of the command needs none."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
