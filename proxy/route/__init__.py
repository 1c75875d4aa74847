"""Pure matching: from a host name and a path to the route that serves them."""
