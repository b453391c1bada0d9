"""Training state in and out of live objects: encode, load, snapshot while training goes on."""
