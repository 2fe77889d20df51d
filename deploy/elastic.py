"""torchrun with a clean exit on SIGTERM: python deploy/elastic.py, with the options of torchrun.

On SIGTERM, torchrun forwards the signal to its workers, which save and exit, and then fails with a traceback. This
program exits with code 75 instead: stopped, saved, can be resumed. After Ctrl-C, it exits with 130.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

EXIT_STOPPED = 75

if __name__ == "__main__":
    try:
        main()
    except SignalException as received:
        if received.sigval == signal.SIGINT:
            sys.exit(128 + signal.SIGINT)
        sys.stderr.write("SIGTERM: this machine leaves the run; the others resume from the last checkpoint\n")
        sys.exit(EXIT_STOPPED)
