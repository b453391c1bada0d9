"""The verdict of a drill for people and for tools: tables, a page, JSON, JUnit XML."""
