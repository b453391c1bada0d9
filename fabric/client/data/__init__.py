"""The order of the data, and what feeds the user's loop. No torch state is kept here."""
