"""The lighthouse's command as a process that speaks another protocol version: ``APART ARGUMENTS...``."""

import sys

from fabric.cli.main import main
from fabric.protocol.messages import wire

if __name__ == "__main__":
    wire.PROTOCOL_VERSION += int(sys.argv.pop(1))
    main()
