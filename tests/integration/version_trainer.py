"""tiny_trainer as a process that speaks another protocol version: ``TEST_VERSION`` more than ours."""

import os

import tiny_trainer
from spoken_version import speak

from fabric.transport import greeting


def main() -> None:
    version = speak(int(os.environ["TEST_VERSION"]))
    made = greeting.Greeting.__init__
    made.__defaults__ = tuple(version if x == greeting.PROTOCOL_VERSION else x for x in made.__defaults__)
    greeting.PROTOCOL_VERSION = version
    tiny_trainer.main()
