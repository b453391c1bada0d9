"""What is said in the protocol: messages on the network, events and effects of the cores. Pure."""
