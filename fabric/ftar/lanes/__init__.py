"""Lanes of an epoch: the parts of the parameters that this rank exchanges, with which ranks, and where."""
