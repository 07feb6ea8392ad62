"""Find out why a run learned little, or what a job will suffer from: `fednotes doctor`.

diagnose      a run, the runs of several seeds, or a job before training
runs          what the folder of a run holds
learning      causes that the learning curves show
gain          whether the federation pays, and where it does not
participation sites that are absent, or unlike the others
vocabulary    encoders whose vocabulary does not fit the notes
next_run      the command that tries settings
plan          causes that the settings and the sites' sizes show
"""

from fednotes.jobs.causes import Cause, Evidence, Setting
from fednotes.jobs.diagnosis.diagnose import Diagnosis, diagnose, diagnose_run

__all__ = ["Cause", "Diagnosis", "Evidence", "Setting", "diagnose", "diagnose_run"]
