"""An independent client of etcd (the etcd3 package, gRPC), in a process of its own.

Run with ``PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python``, without which etcd3 does not import beside a
protobuf of this decade. Usage: ``etcd3_witness.py PORT read KEY...`` prints a JSON list of
``[value in hex, create_revision, mod_revision, lease]`` or null per key; ``... write KEY HEX`` writes;
``... lease KEY HEX TTL`` writes under a new lease and prints its id; ``... delete KEY``.
"""

import json
import sys

import etcd3


def read(client: etcd3.Etcd3Client, key: str) -> list[object] | None:
    value, about = client.get(key)
    if value is None:
        return None
    return [value.hex(), about.create_revision, about.mod_revision, about.lease_id]


def main() -> None:
    port, action, *arguments = sys.argv[1:]
    client = etcd3.client(host="127.0.0.1", port=int(port), timeout=10)
    if action == "read":
        print(json.dumps([read(client, key) for key in arguments]))
    elif action == "write":
        client.put(arguments[0], bytes.fromhex(arguments[1]))
    elif action == "lease":
        lease = client.lease(int(arguments[2]))
        client.put(arguments[0], bytes.fromhex(arguments[1]), lease=lease)
        print(lease.id)
    else:
        assert action == "delete"
        assert client.delete(arguments[0])


if __name__ == "__main__":
    main()
