"""The lighthouse's command as a process that speaks another protocol version: ``APART ARGUMENTS...``."""

import sys

from spoken_version import speak

from fabric.cli.main import main

if __name__ == "__main__":
    speak(int(sys.argv.pop(1)))
    main()
