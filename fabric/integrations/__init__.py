"""Training frameworks with fabric inside: one module per framework, an optional extra, imported by name."""
