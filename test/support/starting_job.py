"""A job of a pool whose process starts another one, which is held, and then ends, fails, is killed or runs on.

python test/support/starting_job.py FOLDER notes|ignores ends|fails|killed|runs
"""

import os
import signal
import sys
import time
from pathlib import Path

from held import Hold


def main(folder, on_sigterm, how):
    def note(number, frame):
        (folder / "note").touch()
        os._exit(0)

    hold = Hold(folder / "hold")
    if not os.fork():
        signal.signal(signal.SIGTERM, {"notes": note, "ignores": signal.SIG_IGN}[on_sigterm])
        hold.here()
    hold.wait()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "runs":
        time.sleep(600)
    sys.exit(how == "fails")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
