"""The process of a site's or the server's kit: NVFlare's own program, in the foreground.

    python -m fednotes.engines.nvflare.foreground KIT [--no-watch]

`processes.py` starts it in the background, or becomes it. It ends with

    0        SIGTERM: as it was told to
    130      Ctrl-C
    others   it failed: whoever looks after it (systemd, a container) may start it again

and takes every process of the kit with it. A server's has a watch beside it (`watch.py`), which is
started again if it ends.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fednotes.core.errors import MissingExtra
from fednotes.engines.nvflare import processes
from fednotes.engines.nvflare.kit import SERVER, SITE, read_kit
from fednotes.engines.nvflare.provision import HEARTBEAT_SECONDS

INTERRUPTED = 130  # as shells count a program that SIGINT ended
FAILED = 1  # NVFlare came to its end and nobody had told it to
PATIENCE = 5.0  # seconds for the other processes; a container's end may be violent after ten
AGAIN_SECONDS = 5.0  # before a watch that ended is started again
_PROGRAMS = {
    SERVER: ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    SITE: ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}
logger = logging.getLogger("fednotes.engines.nvflare.foreground")


def main(kit: Path, watch: bool = True) -> None:
    """Be the process of a kit until it ends or a signal says so; does not return.

    kit: absolute. watch: at a server, whether runs that stop go on by themselves.
    """

    def end(number: int, _frame: object) -> None:
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        with suppress(Exception):  # what does not end is the platform's
            processes.stop(kit, PATIENCE)
        os.write(2, b"stopped; its runs go on when it is started again\n")
        os._exit(0 if number == signal.SIGTERM else INTERRUPTED)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    os.umask(0o077)  # what NVFlare and torch write is for the kit's owner alone too
    facts = read_kit(kit)
    module, settings = _PROGRAMS[facts["role"]]
    options = ["secure_train=true", "config_folder=config", f"org={facts['org']}"]
    if facts["role"] == SITE:
        options += [f"uid={facts['name']}", f"heart_beat_interval={HEARTBEAT_SECONDS}"]
    elif watch:
        threading.Thread(target=_keep_watch, args=(kit,), daemon=True).start()
    sys.argv = [module, "-m", str(kit), "-s", settings, "--set", *options]
    sys.exit(_run(module))


def _run(module: str) -> int:
    """NVFlare's program as its own `__main__` runs it, but that its end is a failure."""
    try:
        from nvflare.fuel.f3.mpm import MainProcessMonitor
    except ImportError as error:
        raise MissingExtra("nvflare", "deploy") from error
    program = importlib.import_module(module)

    def until_it_ends(args: Any) -> int:
        program.main(args)
        return FAILED

    program.version_check()
    args = program.parse_arguments()
    code = MainProcessMonitor.run(main_func=until_it_ends, run_dir=args.workspace, args=args)
    return int(code or FAILED)


def _keep_watch(kit: Path) -> None:
    """One watch beside the server; those that a killed process left behind end first."""
    for pid, words in processes.of_kit(kit):
        if processes.WATCH_MODULE in words:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    while True:
        command = [sys.executable, "-m", processes.WATCH_MODULE, str(kit)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(AGAIN_SECONDS)  # where both were told to end, this is as far as it comes
        logger.warning("the watch has ended; it is started again")


if __name__ == "__main__":
    main(Path(sys.argv[1]), processes.NO_WATCH not in sys.argv)
