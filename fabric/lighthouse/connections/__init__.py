"""Sessions of members as bytes: admitted, validated, written without waiting."""
