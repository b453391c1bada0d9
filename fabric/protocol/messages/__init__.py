"""The words of the protocol: messages on the network, events and effects of the cores. Pure."""
