"""The store through which torchrun's machines find each other, in a process of its own: python deploy/store.py 29400

Let it run on a machine that stays. A machine that trains may then leave, whichever it is.
"""

import signal
import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
