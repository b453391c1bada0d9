"""Training state of live objects: encode it, load it, and take snapshots while training goes on."""
