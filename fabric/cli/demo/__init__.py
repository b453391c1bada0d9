"""The demo: a language model trained by replicas that survive ``kill -9``, and the proof of it.

``command`` runs a drill with one kill. The replicas run ``trainer``; ``command`` imports no torch.
"""
