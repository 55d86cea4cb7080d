"""One file = one method."""
