"""The rendezvous store of torchrun in a separate process: python deploy/store.py 29400

Run it on a machine that stays. Any training machine may then leave.
"""

import signal
import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
