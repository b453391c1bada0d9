"""The wire between trainer, server and readers: lines, requests, compression. No torch."""
