"""The tiny trainer in a process that ends slowly: it is not gone before the file TEST_MAY_END exists."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import tiny_trainer


def end_slowly() -> None:
    while not Path(os.environ["TEST_MAY_END"]).exists():
        time.sleep(0.01)


def main() -> None:
    # registered before the session's own function, so it runs after that function
    atexit.register(end_slowly)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    tiny_trainer.main()
