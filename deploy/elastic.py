"""torchrun that says so when its machine leaves: python deploy/elastic.py, with the options of torchrun.

Told to stop, torchrun passes that on to its workers, which save and end, and then fails with a traceback. Here it ends
with the exit code 75 of a run that was stopped and can go on.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

EXIT_STOPPED = 75

if __name__ == "__main__":
    try:
        main()
    except SignalException:
        sys.stderr.write("this machine leaves the run, as it was told to; the others go on from the last checkpoint\n")
        sys.exit(EXIT_STOPPED)
