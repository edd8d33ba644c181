"""An adapter between stopped ranks and editors that speak the Debug Adapter Protocol."""
