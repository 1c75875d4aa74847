"""The incident, played on a copy of the appliance: same limits, other ports, loopback only, an embedded upstream."""
