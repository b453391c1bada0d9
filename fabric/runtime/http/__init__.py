"""HTTP as every service of fabric does it, and how clients find and trust a service."""
