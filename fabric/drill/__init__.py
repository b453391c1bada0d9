"""The drill: breaks a real job on purpose, and judges from independent records whether the job held."""
