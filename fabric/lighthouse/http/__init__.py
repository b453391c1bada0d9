"""The lighthouse's HTTP: routes, the page, websockets, tokens."""
