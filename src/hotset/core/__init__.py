"""Planning, policy and data: the standard library and numpy only, no torch."""
