"""The demo: a language model trained by replicas that survive ``kill -9``, and the proof of it.

``command`` starts the processes and kills one of them. ``fabric.audit`` recomputes the events from the
replicas' journals alone, ``report`` and the tables of the drill show them. The replicas run ``trainer``; no
other module here imports torch.
"""
