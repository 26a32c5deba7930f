"""Every engine that a test starts, in this process or a child of it, refuses to wait for its device."""

import os

os.environ.setdefault("STEPAHEAD_SYNC_CHECK", "error")
