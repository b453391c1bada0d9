"""Lanes of an epoch: which parts of the parameters this rank exchanges with whom, and where they lie."""
