"""The order of the data, and the loaders of the user's loop. No torch state is kept here."""
