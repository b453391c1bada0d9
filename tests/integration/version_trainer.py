"""tiny_trainer as a process that speaks another protocol version: ``TEST_VERSION`` more than ours."""

import os

import tiny_trainer

from fabric.protocol.messages import wire
from fabric.transport import greeting


def main() -> None:
    version = wire.PROTOCOL_VERSION + int(os.environ["TEST_VERSION"])
    wire.PROTOCOL_VERSION = version
    made = greeting.Greeting.__init__
    made.__defaults__ = tuple(version if x == greeting.PROTOCOL_VERSION else x for x in made.__defaults__)
    greeting.PROTOCOL_VERSION = version
    tiny_trainer.main()
