"""Stand-ins for the world outside: servers that speak the real protocol and fail when they are told to."""
