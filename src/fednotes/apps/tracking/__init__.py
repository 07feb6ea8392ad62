"""Runs in MLflow and TensorBoard, while they train and afterwards.

    facts         what a tracker may know of a run: settings, curves, scores, files
    tracker       the events of a run, passed on to a tracking tool
    mlflow        the tool MLflow
    tensorboard   the tool TensorBoard
    export        runs that have ended
    commands      `fednotes export mlflow` and `fednotes export tensorboard`

No text of a note and no path of notes reaches a tracker.
"""
