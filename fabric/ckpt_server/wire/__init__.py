"""What trainer, server and readers say to each other: lines, requests, compression. No torch."""
