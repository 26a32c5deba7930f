"""What holds for every test."""

import os
import signal

# Every engine that a test starts, in this process or a child of it, refuses to wait for its device.
os.environ.setdefault("STEPAHEAD_SYNC_CHECK", "error")

# A shell ignores Ctrl-C in what it starts in the background, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
