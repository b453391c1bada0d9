"""Lets this process speak a protocol version that is so many above ours."""

from fabric.protocol.messages import wire


def speak(apart: int) -> int:
    ours, version = wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION + apart
    wire.PROTOCOL_VERSION = version
    wire._HEADS = {
        kind: head.replace(f'"version":{ours},'.encode(), f'"version":{version},'.encode())
        for kind, head in wire._HEADS.items()
    }
    wire._USUAL_HEADS.clear()  # so each message is read by its own version
    return version
